"""The parameters of a unit that travel together: their buffers, and which form the modules see."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer, Lane, Pool, Ticket
from flatshard.buffer.dtensor import as_dtensor
from flatshard.engine.codec import codec_for
from flatshard.layout import Layout, Replicate
from flatshard.policy import MixedPrecisionPolicy, Placements, unreduced


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

    def get(self) -> nn.Parameter:
        module = self.module()
        assert module is not None
        found = module._parameters[self.name]
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

    name: str  # from the unit's module down; made full when the scope is known
    sites: list[Site]
    sharded: nn.Parameter  # a DTensor over main: what optimizers and checkpoints see
    full: nn.Parameter | None = None  # a view of the gathered buffer: what the forward sees
    arrived: torch.Tensor | None = None  # this backward's gradient of `full`
    shown: weakref.ref[torch.Tensor] | None = None  # the gradient that this group put on `sharded`


@dataclass
class Reduction:
    """A reduce on its way. ``keep`` are tensors that the lane still reads."""

    group: Group
    ticket: Ticket
    keep: list[torch.Tensor] = field(default_factory=list)


class Group:
    """Main, gathered and gradient buffers of parameters with the same dtype, ``requires_grad`` and placements.

    Between its uses the modules hold the sharded parameters. `gather` fills the gathered buffer, `swap_in` shows its
    views to the modules, `swap_out` hides them again, `release` gives the storage back.
    """

    def __init__(
        self,
        members: list[Member],
        main: DBuffer,
        placements: Placements,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.members = members
        self.placements = placements
        self.policy = policy
        self._set_main(main)
        self._sole = _sole_owners(main.layout)
        self.gathered: DBuffer | None = None
        self.reduced = False  # in the running backward
        self.waiting = 0  # gradients that have arrived and are not reduced
        self.expected = sum(member.sharded.requires_grad for member in members)  # by a backward that uses them all
        self.on_complete: Callable[[], None] | None = None  # called when all expected gradients have arrived
        self.is_full = False  # the modules hold full parameters
        self._gather_pool: Pool | None = None
        self._ticket: Ticket | None = None
        self._main_grad: weakref.ref[DBuffer] | None = None

    def _set_main(self, main: DBuffer) -> None:
        self.main = main
        policy, floating = self.policy, main.dtype.is_floating_point
        compute = policy.param_dtype if policy.param_dtype is not None and floating else main.dtype
        self.reduce_dtype = policy.reduce_dtype or compute
        self.grad_dtype = policy.grad_dtype or main.dtype
        self.codec = codec_for(main.dtype, compute)

    @property
    def mesh(self) -> DeviceMesh:
        return self.main.mesh

    @property
    def layout(self) -> Layout:
        return self.main.layout

    # Weights

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered buffer has been filled, or is being filled."""
        return self._ticket is not None

    def gather(self, pool: Pool, after: Sequence[Ticket], name: str) -> None:
        """Start filling the gathered buffer from main. No effect where that has been done."""
        if self._ticket is not None:
            return
        if self.gathered is None:
            self._make_gathered(pool)
        assert self.gathered is not None
        self._gather_pool = pool  # another one than last time, if the unit has a new root
        pool.allocate(self.gathered.local)
        if self.members[0].full is None:
            self._make_full()
        lane, target = pool.lane, self.gathered
        if not target.runs():  # only empty tensors; collectives refuse empty lists
            self._ticket = Ticket()
            return
        sharded = target.placements != self.main.placements
        with lane.entered(after):
            own = None
            if self.codec.sends_main and sharded:
                own = self.main.runs()
            else:
                self.codec.encode(target.runs(self.main.held), self.main.runs())
            if sharded:
                self._ticket = target.gather_in_place(self.main.placements, lane=lane, own=own, name=name)
            else:
                self._ticket = lane.mark()

    def swap_in(self) -> None:
        """Wait for the gather and show the full parameters to the modules."""
        assert self._ticket is not None
        self._ticket.wait()
        if self.is_full:
            return
        for member in self.members:
            full, sharded = member.full, member.sharded
            assert full is not None
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
                self.expected += 1 if sharded.requires_grad else -1
            for site in member.sites:
                site.put(full)
        self.is_full = True

    def swap_out(self) -> None:
        """Show the sharded parameters to the modules."""
        if not self.is_full:
            return
        for member in self.members:
            for site in member.sites:
                site.put(member.sharded)
        self.is_full = False

    def release(self) -> None:
        """Give the gathered storage back, once the current stream is done with it."""
        if self._ticket is None:
            return
        if not self.is_full:
            # A prefetch that nobody used may still be on its way.
            self._ticket.wait()
        self.swap_out()
        self._ticket = None
        assert self.gathered is not None
        assert self._gather_pool is not None
        self._gather_pool.release(self.gathered.local)

    def _make_gathered(self, pool: Pool) -> None:
        numel = self.layout.buffer_numel(self.layout.num_shards)
        everywhere = [Replicate()] * self.mesh.ndim
        self.gathered = DBuffer(self.layout, self.mesh, everywhere, pool.empty(numel, self.codec.wire_dtype))

    def _make_full(self) -> None:
        assert self.gathered is not None
        for index, member in enumerate(self.members):
            # `.data` gives the parameter a version counter of its own: refilling the buffer by a later gather must not
            # look to autograd as if a weight that it saved had been modified.
            view = self.gathered.local_view(index).data
            member.full = nn.Parameter(view, requires_grad=view.is_floating_point())
            member.full.__dict__.update(member.sharded.__dict__)
            if member.full.requires_grad:
                # Frozen ones get the hook too, for when they are unfrozen; it can be put only on what needs a gradient.
                hook = functools.partial(_gradient_arrived, weakref.ref(self), index)
                member.full.register_post_accumulate_grad_hook(hook)
                member.full.requires_grad_(member.sharded.requires_grad)

    def absorb(self) -> None:
        """Take over parameters that the modules were given in the place of ours: by `.to`, `to_empty`, `assign=True`.

        Their values move into a new main buffer, of their dtype and on their device. Our parameter objects stay what
        the modules and optimizers hold.
        """
        given = [member.sites[0].get() for member in self.members]
        if all(parameter is member.sharded for parameter, member in zip(given, self.members)) and self._owns_storage():
            return
        for parameter, member in zip(given, self.members):
            if not isinstance(parameter, DTensor) or parameter.shape != member.sharded.shape:
                raise ValueError(
                    f"parameter '{member.name}' was replaced by {_described(parameter)}; a sharded parameter can be "
                    f"replaced only by a DTensor of shape {tuple(member.sharded.shape)} with the same placements"
                )
        locals_ = [local_of(parameter) for parameter in given]
        kinds = {(local.dtype, local.device) for local in locals_}
        if len(kinds) > 1:
            raise ValueError(f"parameters of one group were moved to different dtypes or devices: {kinds}")
        ((dtype, device),) = kinds
        main = DBuffer.zeros(self.layout, self.mesh, self.main.placements, dtype=dtype, device=device)
        for index, (parameter, member) in enumerate(zip(given, self.members)):
            main.local_view(index).copy_(locals_[index])
            fresh = nn.Parameter(as_dtensor(main, index), requires_grad=parameter.requires_grad)
            fresh.__dict__.update(member.sharded.__dict__)
            fresh.grad = parameter.grad
            if member.sharded is not parameter:
                member.sharded.grad = None
            torch.utils.swap_tensors(member.sharded, fresh)
            for site in member.sites:
                site.put(member.sharded)
            member.full = member.shown = None
        self._set_main(main)
        self.gathered = self._main_grad = None

    def _owns_storage(self) -> bool:
        main = self.main.local.untyped_storage()._cdata
        return all(local_of(member.sharded).untyped_storage()._cdata == main for member in self.members)

    # Gradients

    def arrive(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of one full parameter."""
        member = self.members[index]
        if member.arrived is None:
            member.arrived = gradient
            self.waiting += 1
            if self.waiting == self.expected and self.on_complete is not None:
                self.on_complete()
        else:
            # Reentrant checkpointing of a unit that is called twice delivers twice.
            member.arrived.add_(gradient)

    def drop_gradients(self) -> None:
        """Forget gradients that have arrived and are not reduced."""
        for member in self.members:
            member.arrived = None
        self.waiting = 0

    def reduce(self, pool: Pool, name: str) -> Reduction:
        """Start reducing the gradients that have arrived into main gradients. Missing ones count as zero.

        A gradient that autograd left in the reduce dtype, and whose segment has no padding, is sent from where it is;
        the others are copied into a staging buffer first.
        """
        lane = pool.lane
        self.reduced = True
        gradients = [member.arrived for member in self.members]
        had_grad = [member.sharded.grad is not None for member in self.members]
        main_grad, fresh = self._take_main_grad(had_grad)
        ready = lane.mark()
        self.drop_gradients()
        direct = fresh and main_grad.dtype == self.reduce_dtype
        with lane.entered((ready,)):
            inputs, keep = self._reduce_inputs(gradients, pool)
            target = main_grad if direct else self._gradient_buffer(pool.temporary, self.reduce_dtype)
        ticket = self._reduce_into(target, inputs, lane, name)
        if not direct:
            ticket = lane.follow(ticket, functools.partial(_add_or_write, main_grad, target, fresh))
        for index, member in enumerate(self.members):
            if gradients[index] is not None and not had_grad[index]:
                self._show_grad(index, member, main_grad)
        return Reduction(self, ticket, [*keep, target.local])

    def _reduce_inputs(
        self, gradients: Sequence[torch.Tensor | None], pool: Pool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per non-empty segment, the full-size input of the reduce; and what must live until it is done."""
        runs: list[torch.Tensor | None] = [None] * len(self.layout.segments)
        staged = 0
        for number, segment in enumerate(self.layout.segments):
            owner = self._sole[number]
            gradient = None if owner is None else gradients[owner]
            if gradient is not None and gradient.dtype == self.reduce_dtype and gradient.is_contiguous():
                runs[number] = gradient.view(-1)
            else:
                staged += segment.piece * self.layout.num_shards
        keep = [gradient for gradient in gradients if gradient is not None]
        if staged:
            staging = pool.temporary(staged, self.reduce_dtype)
            keep.append(staging)
            self._stage(staging, runs, gradients)
        return [run for run in runs if run is not None and run.numel()], keep

    def _stage(
        self, staging: torch.Tensor, runs: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy the gradients of all segments that have no run yet into one buffer, and give those segments its runs."""
        end = 0
        filled = 0
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, segment in enumerate(self.layout.segments):
            if runs[number] is None:
                runs[number] = staging[end : end + segment.piece * self.layout.num_shards]
                end += segment.piece * self.layout.num_shards
        for index, slot in enumerate(self.layout.slots):
            gradient, run = gradients[index], runs[slot.segment]
            assert run is not None
            if gradient is not None and run.untyped_storage()._cdata == staging.untyped_storage()._cdata:
                places.append(run[slot.offset : slot.stop].view(slot.shape))
                sources.append(gradient)
                filled += slot.numel
        if filled < end:
            staging.zero_()  # padding and missing gradients
        if places:
            torch._foreach_copy_(places, sources)

    def _reduce_into(self, target: DBuffer, inputs: list[torch.Tensor], lane: Lane, name: str) -> Ticket:
        """Reduce full-size runs into a buffer with the gradient's placements."""
        axes = self.mesh.ndim
        if not inputs:  # only empty tensors
            return Ticket()
        unreduced_placements = unreduced(axes)
        if isinstance(target.placements[-1], Replicate):
            with lane.entered():
                torch._foreach_copy_(target.runs(), inputs)
            ticket = Ticket()
            for axis in range(axes):
                group = lane.group(self.mesh, axis)
                ticket = lane.all_reduce(group, [target.local], "avg", after=(ticket,), name=name)
            return ticket
        ticket = lane.reduce_scatter(lane.group(self.mesh, axes - 1), target.runs(), inputs, "avg", name=name)
        if axes == 1:
            return ticket
        partial = DBuffer(self.layout, self.mesh, (*unreduced_placements[:-1], target.placements[-1]), target.local)
        return partial.launch(target.placements, lane=lane, out=target, after=(ticket,), name=name)[1]

    def _gradient_buffer(self, empty: Callable[[int, torch.dtype], torch.Tensor], dtype: torch.dtype) -> DBuffer:
        """A buffer for reduced gradients. What lies between its runs is never written by a reduce, so it is zeroed."""
        local = empty(self.layout.buffer_numel(self.main.held.count), dtype)
        if local.numel() != sum(run.numel() for run in self.main.runs()):
            local.zero_()
        if self.placements.gradient == self.main.placements:
            return self.main.like(local)
        return DBuffer(self.layout, self.mesh, self.placements.gradient, local)

    def _take_main_grad(self, had_grad: Sequence[bool]) -> tuple[DBuffer, bool]:
        """The buffer of main gradients, and whether it is new (then it is to be written, not added to)."""
        known = self._main_grad() if self._main_grad is not None and any(had_grad) else None
        if known is None:
            empty = functools.partial(_empty, device=self.main.device)
            known = self._gradient_buffer(empty, self.grad_dtype)
            self._main_grad = weakref.ref(known)
            if not any(had_grad):
                return known, True
        for index, member in enumerate(self.members):
            grad = member.sharded.grad
            if grad is None:
                known.local_view(index).zero_()  # set to None alone, while others of the group were kept
            elif member.shown is None or member.shown() is not grad:
                known.local_view(index).copy_(local_of(grad))  # replaced by the user
                self._show_grad(index, member, known)
        return known, False

    def _show_grad(self, index: int, member: Member, main_grad: DBuffer) -> None:
        grad = _torch.like_dtensor(member.sharded, main_grad.local_view(index))
        # The buffer lives as long as some gradient of it does: `zero_grad(set_to_none=True)` frees it at once.
        grad._flatshard_main_grad = main_grad  # type: ignore[attr-defined]
        member.sharded.grad = grad
        member.shown = weakref.ref(grad)


def _gradient_arrived(group: weakref.ref[Group], index: int, full: torch.Tensor) -> None:
    """The one autograd hook of a parameter."""
    target, gradient = group(), full.grad
    if target is not None and gradient is not None:
        full.grad = None
        target.arrive(index, gradient)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd or dispatch."""
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def _described(value: torch.Tensor) -> str:
    return f"a {type(value).__name__} of shape {tuple(value.shape)}"


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _sole_owners(layout: Layout) -> tuple[int | None, ...]:
    """Per segment, the tensor that fills it to the last element, if there is one."""
    owners: list[int | None] = [None] * len(layout.segments)
    for index, slot in enumerate(layout.slots):
        if slot.numel == layout.segments[slot.segment].piece * layout.num_shards:
            owners[slot.segment] = index
    return tuple(owners)


def _add_or_write(main_grad: DBuffer, reduced: DBuffer, fresh: bool) -> None:
    if fresh:
        main_grad.local.copy_(reduced.local)
    else:
        main_grad.local.add_(reduced.local)


def make_members(main: DBuffer, named: Sequence[tuple[str, nn.Parameter, list[Site]]]) -> list[Member]:
    """Sharded parameters over ``main``, in the place of the originals and with their attributes."""
    members = []
    for index, (name, original, sites) in enumerate(named):
        sharded = nn.Parameter(as_dtensor(main, index), requires_grad=original.requires_grad)
        sharded.__dict__.update(original.__dict__)
        for site in sites:
            site.put(sharded)
        members.append(Member(name, sites, sharded))
    return members
