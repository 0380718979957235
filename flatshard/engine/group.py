"""The parameters of a unit that travel together: their buffers, and which form the modules see."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import DBuffer, Pool, Ticket, turns
from flatshard.buffer.dtensor import as_dtensor
from flatshard.engine import steps
from flatshard.engine.codec import codec_for
from flatshard.engine.direct import Direct, destine
from flatshard.engine.gradients import Gradients, gradient_arrived
from flatshard.engine.host import Home
from flatshard.engine.look import Look
from flatshard.layout import Flat, Layout, Replicate
from flatshard.policy import MixedPrecisionPolicy, Placements

_DONE = Ticket()


@dataclass
class Site:
    """One place where a parameter is registered. Tied parameters have several."""

    module: weakref.ref[nn.Module]
    name: str
    slots: dict[str, nn.Parameter | None] | None  # the module's own dict, unless it overrides __setattr__ (RNNs do)

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Site:
        plain = type(module).__setattr__ is nn.Module.__setattr__
        return cls(weakref.ref(module), name, module._parameters if plain else None)

    def look(self) -> nn.Parameter | None:
        """What is there, whatever it is."""
        slots = self.slots
        if slots is None:
            module = self.module()
            assert module is not None
            slots = module._parameters
        return slots.get(self.name)

    def get(self) -> nn.Parameter:
        found = self.look()
        assert found is not None
        return found

    def put(self, parameter: nn.Parameter) -> None:
        if self.slots is not None:
            self.slots[self.name] = parameter
        else:
            module = self.module()
            assert module is not None
            setattr(module, self.name, parameter)


@dataclass
class Member:
    """One parameter of a group."""

    name: str  # from the unit's module down
    sites: list[Site]
    sharded: nn.Parameter  # a DTensor over main: what optimizers and checkpoints see
    full: nn.Parameter | None = None  # a view of the gathered buffer, or of `turned`: what the forward sees
    turned: torch.Tensor | None = None  # the full values in their own order, where the gathered buffer has another
    inner: _torch.Parallel | None = None  # of the full parameter, where tensor parallelism made it a DTensor
    attributes: dict[str, object] = field(default_factory=dict)  # of `sharded`, should it be replaced


class Group:
    """Weights of parameters with the same dtype, ``requires_grad`` and placements, and their `Gradients`.

    Between its uses the modules hold the sharded parameters. `gather` fills the gathered buffer, `swap_in` shows its
    views to the modules, `swap_out` hides them again, `release` gives the storage back. Where the gathered buffer comes
    from depends on the placements alone:

        parameter == optimizer, sharded       main, encoded into this rank's part, the rest gathered (the usual case)
        parameter == optimizer, replicated    main itself, or its cast
        parameter less sharded than optimizer a persistent compute buffer, refreshed from main when it is stale; it is
                                              the gathered buffer, or is gathered further where it is sharded itself
    """

    _gradients: type[Gradients] = Gradients

    def __init__(
        self,
        members: list[Member],
        main: DBuffer,
        placements: Placements,
        policy: MixedPrecisionPolicy,
        home: Home | None = None,
    ) -> None:
        self.members = members
        self.placements = placements
        self.policy = policy
        self.home = Home(main.device) if home is None else home
        self.look = Look(members)  # at the sharded parameters in their modules
        self._fetched: DBuffer | None = None  # main on the device, where it rests in host memory
        self.is_full = False  # the modules hold full parameters
        self.users: set[int] | None = None  # units that need it full now, where more than its own may
        self._watched = False
        self.park_mesh: DeviceMesh | None = None  # between forward and backward, shard over this smaller mesh
        self.all_gather_comm: Any = None  # an `AllGather` of torch's to gather by
        self._gather_pool: Pool | None = None
        self.ticket: Ticket | None
        self.set_main(main)

    def set_main(self, main: DBuffer) -> None:
        """Make ``main``, over which the sharded parameters lie, the main buffer; all else is derived from it anew."""
        known: Gradients | None = self.__dict__.get("gradients")
        self.main = main
        policy, floating = self.policy, main.dtype.is_floating_point
        dtype = policy.param_dtype if policy.param_dtype is not None and floating else main.dtype
        self.codec = codec_for(main.dtype, dtype)
        self.gradients = self._gradients(self.members, main, self.placements, policy, dtype, self.home)
        if known is not None:
            self.gradients.take_settings(known)
        self.gathered: DBuffer | None = None
        self.compute: DBuffer | None = None  # persistent compute weights, where their placement is not main's
        self._parked: DBuffer | None = None
        self._is_parked = False
        self._parked_at = _DONE  # where the copy stands that the smaller mesh gathers from
        self._stale = True
        self.ticket = None
        self._turned = [i for i in range(len(self.members)) if self.layout.is_turned(i, self.layout.num_shards)]
        for member in self.members:
            member.full, member.turned = None, None
            member.attributes = dict(member.sharded.__dict__)
        # Views of the gathered buffer that stay valid between uses: a full copy rests on this rank anyway.
        self._compute_rests_as_main = self.placements.parameter == self.placements.optimizer
        everywhere = all(isinstance(p, Replicate) for p in self.placements.parameter)
        self._is_sharded = not all(isinstance(p, Replicate) for p in main.placements)
        self._is_hollow = not self.layout.payload  # only empty tensors
        self._own: list[torch.Tensor] | None = None  # this rank's runs of the gathered buffer
        self._is_main = everywhere and self._compute_rests_as_main and self.codec.sends_main and not self.home.host
        self._is_compute = everywhere and not self._compute_rests_as_main

    @property
    def mesh(self) -> DeviceMesh:
        return self.main.mesh

    @property
    def layout(self) -> Layout:
        return self.main.layout

    @property
    def state(self) -> tuple[int, ...]:
        """Numbers that change with main weights, whoever writes them: an optimizer, or an operation on a parameter."""
        return (steps.taken(), self.main.local._version, *[local._version for local in self.look.locals])

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered buffer has been filled, or is being filled."""
        return self.ticket is not None

    @property
    def is_resident(self) -> bool:
        """Whether the full weights rest on this rank: nothing is gathered for a pass."""
        return self._is_main or self._is_compute

    def mark_stale(self) -> None:
        """Main may have changed: derive compute weights from it anew, the next time they are needed."""
        self._stale = True
        self._is_parked = False
        if self._is_compute or self._is_main:
            if self.ticket is not None and not self.is_full:
                self.ticket.wait()  # a refresh that nobody used may still be on its way
            self.swap_out()
            self.ticket = None

    def gather(self, pool: Pool, name: str, lasting: bool = False) -> None:
        """Start filling the gathered buffer, which is to stay for long if it is ``lasting``. No effect where it is."""
        if self.ticket is not None:
            return
        self._gather_pool = pool  # another one than last time, if the unit has a new root
        if self._is_main:
            self.gathered, self.ticket = self.main, Ticket()
            self._make_full()
            return
        lane = pool.lane
        refreshed = _DONE
        if not self._compute_rests_as_main:
            with lane.entered():
                refreshed = self._refresh(pool, name)
        if self._is_compute:
            self.gathered, self.ticket = self.compute, refreshed
            self._make_full()
            if self._turned:
                self.ticket = lane.follow(refreshed, self._turn)
            return
        if self.gathered is None:
            numel = self.layout.buffer_numel(self.layout.num_shards)
            everywhere = [Replicate()] * self.mesh.ndim
            local = pool.empty(numel, self.codec.wire_dtype)
            self.gathered = DBuffer(self.layout, self.mesh, everywhere, local)
        pool.allocate(self.gathered.local, lasting)
        if self._turned or self.members[0].full is None:
            self._make_full()
        with lane.entered(() if refreshed is _DONE else (refreshed,)):
            self.ticket = self._fill(self.gathered, pool, name)
        if self._turned:
            self.ticket = lane.follow(self.ticket, self._turn)

    def _fill(self, target: DBuffer, pool: Pool, name: str) -> Ticket:
        """Enqueue what fills the gathered buffer, inside the lane."""
        lane, comm = pool.lane, self.all_gather_comm
        if self._is_hollow:  # collectives refuse empty lists
            return Ticket()
        if self._is_parked:
            assert self._parked is not None
            whole, own = self._parked_whole(target), self._parked.runs()
            after = (self._parked_at,)
            return whole.gather_in_place(self._parked.placements, lane=lane, own=own, after=after, name=name, comm=comm)
        if self.compute is not None:
            own = self.compute.runs()
            return target.gather_in_place(self.compute.placements, lane=lane, own=own, name=name, comm=comm)
        main = self._main_on_device(pool) if self.home.host else self.main
        if self.codec.sends_main and self._is_sharded:
            return target.gather_in_place(main.placements, lane=lane, own=main.runs(), name=name, comm=comm)
        if self._own is None:
            self._own = target.runs(main.held)
        self.codec.encode(self._own, main.runs())
        if not self._is_sharded:
            return lane.mark()
        return target.gather_in_place(main.placements, lane=lane, name=name, comm=comm)

    def _main_on_device(self, pool: Pool) -> DBuffer:
        if not self.home.host:
            return self.main
        self._fetched = self.home.fetched(self.main, pool)
        return self._fetched

    def _refresh(self, pool: Pool, name: str) -> Ticket:
        """Bring the persistent compute weights up to date, inside the lane."""
        if self.compute is None:
            dtype, device = self.codec.wire_dtype, self.home.device
            self.compute = DBuffer.zeros(self.layout, self.mesh, self.placements.parameter, dtype=dtype, device=device)
        if not self._stale or not self.compute.runs():
            return Ticket()
        self._stale = False
        self.codec.encode(self.compute.runs(self.main.held), self._main_on_device(pool).runs())
        return self.compute.gather_in_place(self.main.placements, lane=pool.lane, name=f"refresh {name}")

    def swap_in(self) -> None:
        """Wait for the gather and show the full parameters to the modules."""
        assert self.ticket is not None
        self.ticket.wait()
        if self.is_full:
            return
        for member in self.members:
            full, sharded = member.full, member.sharded
            assert full is not None
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad = sharded.requires_grad
                self.gradients.expected += 1 if sharded.requires_grad else -1
            for site in member.sites:
                if site.slots is not None:  # `put` without a call
                    site.slots[site.name] = full
                else:
                    site.put(full)
        self.is_full = True

    def swap_out(self) -> None:
        """Show the sharded parameters to the modules."""
        if not self.is_full:
            return
        for member in self.members:
            full, sharded = member.full, member.sharded
            assert full is not None
            if full.requires_grad != sharded.requires_grad:  # toggled while the full one was shown
                sharded.requires_grad = full.requires_grad
                self.gradients.expected += 1 if full.requires_grad else -1
            for site in member.sites:
                if site.slots is not None:
                    site.slots[site.name] = sharded
                else:
                    site.put(sharded)
        self.is_full = False

    def release(self) -> None:
        """Give the gathered storage back, once the current stream is done with it."""
        if self.ticket is None:
            return
        if not self.is_full:
            # A prefetch that nobody used may still be on its way.
            self.ticket.wait()
        self.swap_out()
        if self._is_main or self._is_compute:
            return
        self.ticket = self._fetched = None
        assert self.gathered is not None
        assert self._gather_pool is not None
        self._gather_pool.release(self.gathered.local)
        for index in self._turned:
            self._gather_pool.release(self._whole(index))

    def park(self) -> None:
        """Before a release after forward: keep this rank's part of the full weights on the smaller mesh."""
        if self.park_mesh is None or self.gathered is None or self._is_parked:
            return
        if self.is_resident or not self._is_sharded:
            return
        if self._parked is None:
            dtype, device = self.codec.wire_dtype, self.home.device
            self._parked = DBuffer.zeros(self.layout, self.park_mesh, [Flat()], dtype=dtype, device=device)
        if self._parked.runs():
            torch._foreach_copy_(self._parked.runs(), self.gathered.runs(self._parked.held))
        assert self._gather_pool is not None
        self._parked_at = self._gather_pool.lane.mark()
        self._is_parked = True

    def _parked_whole(self, target: DBuffer) -> DBuffer:
        """The gathered buffer as the smaller mesh sees it."""
        assert self.park_mesh is not None
        return DBuffer(self.layout, self.park_mesh, [Replicate()], target.local)

    def unpark(self) -> None:
        """The backward is over: the smaller mesh's shards are of no more use."""
        self._parked = None
        self._is_parked = False

    def _whole(self, index: int) -> torch.Tensor:
        """The full values of a turned parameter, flat; without storage while nobody needs them."""
        member = self.members[index]
        if member.turned is None:
            assert self._gather_pool is not None
            member.turned = self._gather_pool.empty(self.layout.slots[index].numel, self.codec.wire_dtype)
        return member.turned

    def _turn(self) -> None:
        """Bring what was gathered of the turned parameters into their own order."""
        assert self.gathered is not None
        pairs = []
        for index in self._turned:
            slot = self.layout.slots[index]
            size = self.layout.segments[slot.segment].piece * self.layout.num_shards
            run = self.gathered.local.narrow(0, self.layout.run_starts(self.layout.num_shards)[slot.segment], size)
            pairs += turns(self.layout, index, run, self._whole(index).view(slot.shape))
        if pairs:
            gathered, whole = zip(*pairs)
            torch._foreach_copy_(list(whole), list(gathered))

    def _make_full(self) -> None:
        for index in self._turned:
            assert self._gather_pool is not None
            self._gather_pool.allocate(self._whole(index))
        if self.members[0].full is not None:
            return
        assert self.gathered is not None
        for index, member in enumerate(self.members):
            if _torch.is_wrapper(_torch.local_of(member.sharded)):
                raise TypeError(
                    f"the local part of parameter '{member.name}' became a tensor that says itself how it is gathered; "
                    "shard a parameter that is of such a class from the start"
                )
            # `.data` gives the parameter a version counter of its own: refilling the buffer by a later gather must not
            # look to autograd as if a weight that it saved had been modified.
            slot = self.layout.slots[index]
            turned = index in self._turned
            view = self._whole(index).view(slot.shape).data if turned else self.gathered.local_view(index).data
            self._adopt(member, view)
        self._watched = False
        self.gradients.expected = sum(member.sharded.requires_grad for member in self.members)
        if self.gradients.direct is not None:
            self._destine()

    def offer_main_grads(self) -> None:
        """Let kernels write the gradients of the full parameters themselves."""
        if self.gradients.direct is None and self.main.dtype.is_floating_point:
            self.gradients.direct = Direct()
            self._destine()

    def _destine(self) -> None:
        for index, member in enumerate(self.members):
            # DTensors and other subclasses, and what lies in another order in the buffer, are left to autograd.
            if type(member.full) is nn.Parameter and index not in self._turned:
                destine(member.full, self.gradients, index)

    def watch(self) -> None:
        """From now on, notice when all gradients have arrived: a hook on every full parameter, the frozen ones too."""
        if self._watched or self.members[0].full is None:
            return
        self._watched = True
        for index, member in enumerate(self.members):
            full = member.full
            assert full is not None
            if full.is_floating_point():
                hook = functools.partial(gradient_arrived, weakref.ref(self.gradients), index)
                full.requires_grad = True  # a hook can be put only on what needs a gradient
                full.register_post_accumulate_grad_hook(hook)
                full.requires_grad = member.sharded.requires_grad

    def _adopt(self, member: Member, view: torch.Tensor) -> None:
        """Make the full parameter of its values."""
        whole = view if member.inner is None else _torch.dtensor_of(view, member.inner.spec)
        member.full = nn.Parameter(whole, requires_grad=view.is_floating_point())
        member.attributes = dict(member.sharded.__dict__)
        own = member.full.__dict__
        own.update({name: value for name, value in member.attributes.items() if name not in own})
        if member.full.requires_grad:
            member.full.requires_grad = member.sharded.requires_grad


def _attributes(parameter: nn.Parameter) -> dict[str, object]:
    """What users have put on a parameter."""
    own = {"_spec", "_local_tensor", "_is_param"}  # a DTensor's own
    if _torch.is_wrapper(parameter):
        own |= {name for name, value in parameter.__dict__.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in parameter.__dict__.items() if name not in own}


def make_members(
    main: DBuffer,
    named: Sequence[tuple[str, nn.Parameter, list[Site]]],
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    local: torch.Tensor | None = None,
) -> list[Member]:
    """Sharded parameters over ``main``, in the place of the originals and with their attributes.

    ``axes``: where data parallelism has axes of the parameters' own mesh, those that shard, and those that replicate.
    ``local``: this rank's part of the one parameter, if ``main`` does not hold it.
    """
    members = []
    for index, (name, original, sites) in enumerate(named):
        inner = _torch.Parallel(_torch.spec_of(original), *axes) if _torch.is_parallel(original) else None
        sharded = _torch.as_parameter(as_dtensor(main, index, inner, local), original.requires_grad)
        sharded.__dict__.update(_attributes(original))
        for site in sites:
            site.put(sharded)
        members.append(Member(name, sites, sharded, inner=inner))
    return members
