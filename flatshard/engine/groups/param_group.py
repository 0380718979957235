"""The parameters of a unit that are communicated together: their weights, sharded and full."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import DBuffer, Pool, Ticket
from flatshard.engine import steps
from flatshard.engine.gradients.collecting import gradient_arrived
from flatshard.engine.gradients.direct import add_main_grad
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.staging import Direct
from flatshard.engine.parameters.sharded_param import ShardedParam, Snapshot
from flatshard.engine.parameters.values import Initial
from flatshard.engine.weights.codec import Blocks, Cast
from flatshard.engine.weights.extensions import Decoded, Extension, LeafwiseExtension, is_extended
from flatshard.engine.weights.formats import Formats, chosen
from flatshard.engine.weights.offload import Home
from flatshard.engine.weights.source import Source, source_for
from flatshard.layout import Layout
from flatshard.policy import MixedPrecisionPolicy, Placements


class ParamGroup:
    """Weights of parameters with the same dtype, ``requires_grad`` and placements, and their `Gradients`.

    Between uses the modules hold the sharded parameters. `gather` starts to gather the full weights from the `Source`,
    `swap` puts them into the modules, or the sharded parameters back, and `release` frees the memory.
    """

    is_away = False  # users have moved main to another device than the mesh's
    keeps_dtype = False  # full weights have the dtype from before sharding, whatever the policy of the unit says
    steps_taken = 0  # by optimizers that have its parameters
    own_grad_dtype: torch.dtype | None = None  # `parameter.grad_dtype` from before sharding, if it was set

    def __init__(
        self,
        params: list[ShardedParam],
        main: DBuffer,
        placements: Placements,
        policy: MixedPrecisionPolicy,
        home: Home,
        is_extended: bool,
        own: torch.dtype,
        owner: str,
        kind: type[Gradients],
        marks: Sequence[bool],
    ) -> None:
        """``own``: the dtype of the parameters before they were sharded.

        ``owner``: the class of the unit's module. ``kind``: the class of its gradients, `Gradients` or `RowGradients`.
        ``marks``: which parameters were `chosen` to be encoded.
        """
        self.params, self.placements, self.policy, self.home = params, placements, policy, home
        self.is_extended = is_extended  # parameters of a tensor subclass: ``main`` has a layout, and no memory
        self.snapshot = Snapshot(params)
        self.is_full = False  # the modules hold full parameters
        self.owner: weakref.ref[Any] | None = None  # a unit
        self.borrowers: list[weakref.ref[Any]] = []  # units whose modules share some of the parameters
        self.post_forward_mesh: DeviceMesh | None = None  # between forward and backward, shard over this smaller mesh
        self._watched = False
        self.ticket: Ticket | None  # of the gather, from its launch to the release
        self.gathered_from: int | None = None  # the state of main at its start, if the weights may stay
        self.gathered_after = 0  # and `writes`
        self.all_gather_comm: Any = None  # an `AllGather` of torch's to use
        self._refreshed: int | None = None  # the state of main that compute weights are known to have
        self._renewed: int | None = None  # the state of main in the last `renew`, if it is in host memory
        self.initial: Initial | None = None  # for the ranks to compare before the first launch
        self.main, self.own = main, own
        self.made_for = self.own, params[0].sharded.requires_grad  # of the originals, whatever has changed since
        self._owner, self._kind, self.by_rows = owner, kind, kind is not Gradients
        self._marks = list(marks)
        self.set_main(main)

    def set_main(self, main: DBuffer) -> None:
        """Use ``main``, which holds the sharded parameters, as the main buffer, and derive all else from it."""
        known: Gradients | None = self.__dict__.get("gradients")
        self.own = self.own if main.dtype == self.main.dtype else main.dtype  # the model was cast
        self.main = main
        self.is_away = main.device.type not in ("meta", "cpu" if self.home.host else self.home.device.type)
        self._set_codec()
        self.gradients = self._kind(
            self.params, main, self.placements, self.policy, self.codec.dtype, self.home, self.formats
        )
        if known is not None:
            self.gradients.take_settings(known)
        self._set_source()

    def _set_codec(self) -> None:
        main, policy, dtype = self.main, self.policy, self.policy.compute_of(self.own)
        encodes = not self.is_extended and not self.by_rows  # rows are looked up in main
        marks = [mark and encodes for mark in self._marks]
        self.formats = Formats.of(main.layout, marks, policy, main.mesh.shape, self.placements.optimizer)
        if self.by_rows:
            self.formats = replace(self.formats, reduces=(*self.formats.reduces[:-1], None))
        blocks = self.formats.gather is not None
        self.codec: Cast | Blocks = Blocks(self.formats, dtype) if blocks else Cast(main.dtype, dtype)

    def check_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Raise if the policy cannot be changed to this one now."""
        policy = policy.of_group(self.keeps_dtype, self.own_grad_dtype)
        name, main = self.params[0].name, self.main.dtype
        if policy.main_dtype not in (None, main) and main.is_floating_point and self.gradients.expected:
            raise ValueError(
                f"main_dtype={policy.main_dtype}: '{name}' has {main} main weights; give main_dtype to fully_shard"
            )
        if self.gradients.comm is not None and policy.reduce_format is not None:
            raise ValueError(
                f"reduce_format={policy.reduce_format!r}: '{name}' has a custom reduce-scatter; use one of the two"
            )
        dtype, known = policy.grad_of(main, policy.compute_of(self.own)), self.gradients.grad_dtype
        has_some = self.gradients.has_partial or any(param.sharded.grad is not None for param in self.params)
        if has_some and dtype != known:
            raise RuntimeError(
                f"grad_dtype={dtype}: '{name}' has gradients in {known}; call zero_grad() before you change the policy"
            )

    def set_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Compute and reduce in other dtypes. Called while nothing is gathered."""
        policy = policy.of_group(self.keeps_dtype, self.own_grad_dtype)
        known, self.policy, before = self.policy, policy, (self.codec.dtype, self.formats)
        if policy.has_formats and not (known.has_formats and policy.encodes is known.encodes):
            self._marks = [
                chosen(param.name, param.sharded, [site.module() for site in param.sites], policy, self._owner)
                for param in self.params
            ]
        self._set_codec()
        self.gradients.set_dtypes(policy, self.codec.dtype, self.formats)
        if (self.codec.dtype, self.formats) != before or self.is_extended:
            self._set_source()

    def _set_source(self, is_held: bool = False) -> None:
        """Get full weights from main from now on, or from a copy of its current values (``is_held``)."""
        self.is_held = is_held
        known: Source | None = self.__dict__.get("source")
        if known is not None and known.keeps_storage:
            self.free()
        self.source: Source
        if self.is_extended:
            given = self.main.layout, self.mesh, self.policy, self.home.device, self.codec.dtype
            each = [(LeafwiseExtension if p.structure else Extension)(p, i, *given) for i, p in enumerate(self.params)]
            self.source = Decoded(each, self.mesh)
        else:
            self.source = source_for(self.main, self.placements, self.codec, self.home, is_held)
            self.source.keeps_storage = known is not None and known.keeps_storage
        # Device memory that the full weights take, beyond what rests on this rank anyway.
        layout = self.layout
        numel = layout.buffer_numel(layout.num_shards) + sum(layout.slots[index].numel for index in layout.turned)
        self.gathered_bytes = 0 if self.source.is_resident else numel * self.codec.dtype.itemsize
        self.ticket = self._refreshed = None
        for param in self.params:
            param.full = None
            param.attributes = dict(param.sharded.__dict__)

    @property
    def units(self) -> list[Any]:
        """The units that exist of ``owner`` and ``borrowers``."""
        return [unit for ref in (self.owner, *self.borrowers) if ref is not None and (unit := ref()) is not None]

    @property
    def mesh(self) -> DeviceMesh:
        return self.main.mesh

    @property
    def layout(self) -> Layout:
        return self.main.layout

    @property
    def state(self) -> int:
        """A number that grows when an optimizer, or an operation on a parameter or on its local part, changes main."""
        number = steps.taken() + self.main.local._version
        for local in self.snapshot.locals:
            number += local._version
        for param in self.params:
            number += param.sharded._version
        return number

    @property
    def writes(self) -> int:
        """The part of `state` that grows on all ranks alike: operations on parameters, and steps of their optimizers.

        One rank alone may write its local part, or step an optimizer of another model.
        """
        number = self.steps_taken
        for param in self.params:
            number += param.sharded._version
        return number

    @property
    def arriving_bytes(self) -> int:
        """As `gathered_bytes`, from the launch of an all-gather until its result is decoded."""
        if isinstance(self.codec, Blocks) and self.source.decodes:
            return self.codec.layout.buffer_numel(self.layout.num_shards)
        return self.gathered_bytes

    @property
    def launches(self) -> bool:
        """Whether `gather` would communicate now."""
        return self.ticket is None and self.source.launches

    def mark_stale(self) -> None:
        """Main may have changed: derive compute weights from it again when they are needed next."""
        if self.is_held:
            return
        self._refreshed = None
        self.source.mark_stale()
        if self.source.is_resident:
            if self.ticket is not None and not self.is_full:
                self.ticket.wait()  # an unused refresh may be in flight
            self.swap(to_full=False)
            self.ticket = None

    def renew(self) -> None:
        """The next pass uses the current values of main: mark compute weights stale unless they are up to date."""
        if self._refreshed is None or self._refreshed != self.state:
            self.mark_stale()
        self._renewed = self.state if self.home.host else None

    def forget(self) -> None:
        """Main may have changed in a way that `state` does not show: the next `renew` marks compute weights stale."""
        self._refreshed = self._renewed = None

    def note_step(self) -> None:
        """The last optimizer step has also written the cast weights in host memory, so they may be up to date."""
        known, now = self._renewed, self.state
        is_only = known is not None and known + 1 == now  # nothing else has changed main
        host_copy = self.source.host_copy
        if host_copy is not None and host_copy.note_step() and is_only:
            self._refreshed = now

    def hold(self, pool: Pool, name: str) -> None:
        """Keep the current full weights until `refresh`. The lane must be ordered after the last write to main."""
        if self.is_held:
            return
        if self.source.compute is None:
            self.release()
            self._set_source(is_held=True)
        else:
            self.mark_stale()
        self.is_held = True
        self._derive(pool, name)

    def refresh(self, pool: Pool, name: str) -> None:
        """Start to derive persistent compute weights from the current main."""
        held, self.is_held = self.is_held, False
        if held and self.placements.parameter == self.placements.optimizer and isinstance(self.codec, Cast):
            self.release()
            self._set_source()
        elif self.source.compute is not None:
            self.mark_stale()
            self._derive(pool, name)
            self._refreshed = self.state

    def _derive(self, pool: Pool, name: str) -> None:
        """Start to refresh persistent compute weights. Main may be written afterwards."""
        compute = self.source.compute
        assert compute is not None
        compute.refresh(pool, name)
        compute.has_read.wait()

    def gather(self, pool: Pool, name: str, lasting: bool = False) -> None:
        """Start to gather full weights. ``lasting``: they stay for several passes. No effect if they are gathered."""
        if self.ticket is not None:
            return
        if self.is_away:
            raise RuntimeError(
                f"parameter '{self.params[0].name}' was moved to {self.main.device}; move the model back to "
                f"{self.home.device.type} before you use it"
            )
        self.gathered_from = None
        try:
            stays = lasting or self.source.keeps_storage
            self.ticket = self.source.gather(pool, name, stays, self.all_gather_comm)
        except BaseException:
            if pool.lane.coalescing is not None:
                pool.lane.coalescing.drop()  # deferred gathers would write to memory that is freed next
            self.source.cancel()
            raise

    def cancel(self) -> None:
        """Free the memory of an all-gather of the unit that has raised."""
        if self.ticket is not None:
            self.release()
            self.source.cancel()
        self.mark_stale()

    def update_requires_grad(self) -> None:
        """Expect gradients of the parameters that require them now, although this rank runs no forward with them."""
        if self.is_full:
            return  # `swap` updates it
        for param in self.params:
            if param.full is not None:
                param.full.requires_grad = param.sharded.requires_grad
        self.gradients.expected = sum(param.sharded.requires_grad for param in self.params)

    def swap(self, to_full: bool) -> None:
        """Put the full parameters into the modules, once they have been gathered, or the sharded ones."""
        if to_full:
            assert self.ticket is not None
            self.ticket.wait()
        if self.is_full == to_full:
            return
        if to_full:
            if self.source.opens:
                self.source.open()
            if self.params[0].full is None:
                self._make_full()
        for param in self.params:
            shown, hidden = (param.full, param.sharded) if to_full else (param.sharded, param.full)
            assert shown is not None
            assert hidden is not None
            if shown.requires_grad != hidden.requires_grad:  # changed on the other one while that was shown
                shown.requires_grad = hidden.requires_grad
                self.gradients.expected += 1 if hidden.requires_grad else -1
            for site in param.sites:
                if site.is_plain:  # `put` without a call
                    site.slots[site.name] = shown
                else:
                    site.put(shown)
        self.is_full = to_full

    def release(self) -> None:
        """Free the memory of full weights, once the current stream has finished with it."""
        if self.ticket is None:
            return
        if not self.is_full:
            self.ticket.wait()  # an unused prefetch may be in flight
        self.swap(to_full=False)
        if not self.source.is_resident:
            self.ticket = None
            self.source.release()

    def keep_storage(self, keep: bool) -> None:
        """Keep the memory of full weights while they are not gathered, from their next release on."""
        if keep and self.is_extended:
            raise NotImplementedError(
                f"set_keep_unsharded_storage: '{self.params[0].name}' is a tensor subclass, whose memory is its own"
            )
        self.source.keeps_storage = keep

    def free(self) -> None:
        """`release`, and free memory that is kept."""
        keeps, self.source.keeps_storage = self.source.keeps_storage, False
        self.release()
        if keeps and not self.source.is_resident:
            self.source.release()
        self.source.keeps_storage = keeps

    def _make_full(self) -> None:
        for index, param in enumerate(self.params):
            if not self.is_extended and is_extended(param.sharded):
                raise TypeError(
                    f"the local tensor of parameter '{param.name}' became a tensor subclass, which is gathered in its "
                    "own way; call fully_shard on a model whose parameter has that class already"
                )
            param.make_full(self.source.full(index))
        self._watched = False
        self.gradients.expected = sum(param.sharded.requires_grad for param in self.params)
        if self.gradients.direct is not None:
            self._add_main_grads()

    def offer_main_grads(self) -> None:
        """Let kernels write the gradients of the full parameters themselves."""
        if self.gradients.direct is None and self.main.dtype.is_floating_point and not self.is_extended:
            self.gradients.direct = Direct()
            self._add_main_grads()

    def _add_main_grads(self) -> None:
        for index, param in enumerate(self.params):
            # Kernels cannot write gradients of subclasses, or of tensors that the buffer holds in another order.
            if type(param.full) is nn.Parameter and index not in self.layout.turned:
                add_main_grad(param.full, self.gradients, index)

    def watch(self) -> None:
        """Detect when all gradients have arrived: a hook on every full parameter, including frozen ones."""
        if self._watched or self.params[0].full is None:
            return
        self._watched = True
        for index, param in enumerate(self.params):
            full = param.full
            assert full is not None
            if full.is_floating_point():
                hook = functools.partial(gradient_arrived, weakref.ref(self.gradients), index)
                before, full.requires_grad = full.requires_grad, True  # a hook needs a tensor that requires a gradient
                full.register_post_accumulate_grad_hook(hook)
                full.requires_grad = before
