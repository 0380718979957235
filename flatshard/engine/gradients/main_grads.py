"""The reduced gradients of a group, which are the ``.grad`` of its sharded parameters."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DONE, DBuffer, Lane, Ticket
from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.offload import Home

MAIN_GRAD = "_flatshard_main_grad"  # on a gradient of `MainGrads`: its buffer
DECOUPLED = "decoupled_grad"
STAYING: weakref.WeakSet[Reduced] = weakref.WeakSet()  # on the device, until they are read, stepped or zeroed
_LARGE = 10 << 20  # bytes; for a smaller tensor the allocator takes 20 MiB, too much for a pool of one
_sharded: Callable[[ShardedParam], torch.Tensor] = operator.attrgetter("sharded")


@dataclass(eq=False)
class Reduced:
    """Reduced gradients on the device, of a group whose gradients belong in host memory."""

    buffer: DBuffer
    dtype: torch.dtype  # of the gradients
    write: Callable[[Ticket, Callable[[torch.Tensor], torch.Tensor]], Ticket]  # to host memory: `Home.write`
    scale: torch.Tensor | None = None  # clipping has multiplied them by it
    holder: weakref.ref[MainGrads] | None = None  # once the reduce has ended

    def final(self, part: torch.Tensor) -> torch.Tensor:
        """A part of the buffer, as gradients."""
        gradient = part.to(self.dtype)
        return gradient if self.scale is None else gradient * self.scale

    def copy_to_host(self, ticket: Ticket = DONE) -> Ticket:
        """Start to copy them to host memory after ``ticket``."""
        return self.write(ticket, self.final)


class MainGrads:
    """One buffer with the layout of main, and a DTensor over it for each param.

    They are created for each step. Once ``.grad`` of all parameters is None, `free_cleared` drops them, and the next
    backward creates new ones. Code that holds a gradient keeps its values, also if only some were set to None or
    replaced.

    Decoupled gradients are set as ``decoupled_grad`` instead of ``.grad``. Between `hide` and `unhide` parameters have
    no gradients: this object keeps them.
    """

    def __init__(
        self, params: Sequence[ShardedParam], main: DBuffer, dtype: torch.dtype, home: Home, room: int = 0
    ) -> None:
        """``room``: the number of additional elements at the end of the buffer, for use counts."""
        self.params, self.main, self.dtype, self.home, self.room = params, main, dtype, home, room
        self.buffer: DBuffer | None = None
        self.shown: list[DTensor] = []
        self.on_device: Reduced | None = None  # the values, until they are read; the buffer has none then
        self._accumulators: dict[int, object] = {}  # nodes of autograd that copy what is on the device before they add
        self.in_flight = 0  # reduces that write here
        # Params that this rank has not used, while it does not know whether another rank has.
        self.undecided: Counter[int] = Counter()
        self.is_decoupled = False
        self.kept: list[torch.Tensor | None] | None = None
        self._numel, self._has_gaps = main.local.numel(), has_gaps(main)
        self._is_large = self._numel * dtype.itemsize > _LARGE
        self.is_apart = False  # the buffer has a separate memory pool
        self._accumulates = False  # the last backward added to the gradients of earlier ones
        self._is_new = False  # nothing has been reduced into the buffer yet

    def free_cleared(self, always: bool = False) -> None:
        """Free the buffer if `zero_grad` has set all gradients to None.

        If steps have several backwards, it is kept for the next backward unless ``always``: its memory is needed in
        all micro-batches but the first, and other tensors in its place would enlarge the heap. Called within
        `_torch.PlainAttributes`, because it reads every parameter.
        """
        if always and self.buffer is None:
            self._free_memory_pool()
        if self.buffer is None or self.in_flight or self.undecided or (self._accumulates and not always):
            return
        if self.kept is not None and any(grad is not None for grad in self.kept):
            return
        for param in self.params:
            if param.sharded.grad is not None or (self.is_decoupled and getattr(param.sharded, DECOUPLED) is not None):
                return
        self.buffer, self.shown, self.on_device = None, [], None
        if always:
            self._free_memory_pool()

    def _free_memory_pool(self) -> None:
        """Free the separate memory pool, and with it the memory that it caches."""
        self.__dict__.pop("_memory", None)

    @property
    def live_bytes(self) -> int:
        """The device memory of the gradients."""
        return 0 if self.buffer is None or self.home.host else self.buffer.local.untyped_storage().nbytes()

    def may_stay_on_device(self, dtype: torch.dtype) -> bool:
        """Whether reduced gradients of a dtype may. A norm is computed of them: no cast may change it.

        Only ``.grad`` copies them when it is read.
        """
        if self.is_decoupled or self.kept is not None or torch.promote_types(dtype, self.dtype) != self.dtype:
            return False
        staying = sum(each.buffer.local.nbytes for each in STAYING)
        return staying + self._numel * dtype.itemsize <= self.home.device_grad_bytes

    def leave_on_device(self, reduced: Reduced) -> None:
        self.on_device, reduced.holder = reduced, weakref.ref(self)
        # A backward from sharded parameters adds to the buffer without reading a `.grad`.
        for index, param in enumerate(self.params):
            if index not in self._accumulators and param.sharded.requires_grad:
                node = self._accumulators[index] = _torch.accumulation(param.sharded)
                _torch.before_node(node, copy_all_to_host)

    def accumulations(self, indices: Iterable[int]) -> list[Any]:
        """The nodes with which autograd adds to the gradients of these parameters."""
        known = self._accumulators
        return [known.get(index) or _torch.accumulation(self.params[index].sharded) for index in indices]

    @property
    def trained(self) -> list[int]:
        """The parameters that may get gradients."""
        return [index for index, param in enumerate(self.params) if param.sharded.requires_grad]

    def copy_to_host(self) -> None:
        """Copy gradients that have stayed on the device to where they belong."""
        reduced, self.on_device = self.on_device, None
        if reduced is not None:
            reduced.copy_to_host().wait()

    def prepare(self) -> None:
        """Create the buffer for the next backward."""
        self._make()
        self._is_new = True

    def take(self, had_grad: Sequence[int], lane: Lane, is_last: bool) -> tuple[DBuffer, bool, list[torch.Tensor]]:
        """The buffer; whether to write instead of add; and the tensors that the lane reads to prepare it.

        A buffer that further backwards add to gets a separate memory pool: between activations it would split a segment
        that the next forward needs whole.
        """
        any_had, buffer = bool(had_grad or self.undecided), self.buffer
        self._accumulates = any_had
        if any_had:
            self.copy_to_host()
        self.on_device = None
        if buffer is None or not (any_had or self._is_new):
            buffer = self._make(apart=not is_last and self._is_large and self.main.local.is_cuda)
        self._is_new = False
        if not any_had:
            return buffer, True, []
        with _torch.PlainAttributes():
            others = [i for i in range(len(self.params)) if self._grad(i) is not self.shown[i]]
        others = [i for i in others if i not in self.undecided] if self.undecided else others
        return buffer, False, self._copy_replaced(others, buffer, lane) if others else []

    def hide(self) -> None:
        """Keep gradients here instead of setting them on parameters, which have none now."""
        self.kept = [None] * len(self.params)

    def unhide(self) -> None:
        """Set the gradients that were kept here, and later ones, on parameters."""
        kept, self.kept = self.kept or [], None
        for index, grad in enumerate(kept):
            if grad is not None:
                self._set(index, grad)

    def _grad(self, index: int) -> torch.Tensor | None:
        if self.kept is not None:
            return self.kept[index]
        sharded = self.params[index].sharded
        found: torch.Tensor | None = getattr(sharded, DECOUPLED) if self.is_decoupled else sharded.grad
        if found is not None and not isinstance(found, DTensor):  # the gradient of a sum of ragged shards is whole
            return _torch.like_dtensor(sharded, _torch.part_of(found, sharded).contiguous())
        return found

    def _set(self, index: int, grad: torch.Tensor | None) -> None:
        """Set a gradient, or None, even if its dtype differs from that of the previous one."""
        sharded = self.params[index].sharded
        if self.kept is not None:
            self.kept[index] = grad
        elif self.is_decoupled:
            setattr(sharded, DECOUPLED, grad)
        else:
            sharded.grad = None
            if grad is not None:
                _torch.allow_grad_of(sharded, grad.dtype)
                sharded.grad = grad

    def grads_and_hooks(self) -> tuple[list[int], list[int], list[int], list[Any]]:
        """`_torch.grads_and_hooks`, also if gradients are decoupled or hidden.

        Instead of the parameters in graphs, the nodes with which the running backward itself adds to their gradients:
        a penalty on sharded parameters is a part of its loss.
        """
        had_grad, changed, finished, in_graphs = _torch.grads_and_hooks(map(_sharded, self.params))
        if self.is_decoupled or self.kept is not None:
            had_grad = [index for index in range(len(self.params)) if self._grad(index) is not None]
        adding = list[Any]()
        if in_graphs and _torch.in_backward():
            adding = [node for node in self.accumulations(in_graphs) if _torch.will_be_executed(node)]
        return had_grad, changed, finished, adding

    def show(self, indices: Sequence[int]) -> None:
        """Set the gradients of parameters that have none."""
        if self.is_decoupled or self.kept is not None:
            for index in indices:
                self._set(index, self.shown[index])
            return
        other_dtype = self.dtype != self.main.local.dtype
        with _torch.PlainAttributes():
            for index in indices:
                if other_dtype:
                    _torch.allow_grad_of(self.params[index].sharded, self.dtype)
                self.params[index].sharded.grad = self.shown[index]

    def conceal(self, indices: Sequence[int]) -> None:
        """Set gradients that `show` has set to None, until it is called again."""
        with _torch.PlainAttributes():
            for index in indices:
                if self._grad(index) is self.shown[index]:
                    self._set(index, None)

    def decide(self, unused: Sequence[int], used_by_any: Callable[[], Sequence[int]]) -> None:
        """After the reduce has been waited for: set the gradients of undecided params that some rank has used."""
        used = used_by_any()
        self.undecided -= Counter(unused)
        with _torch.PlainAttributes():
            wanted = [index for index in used if self._grad(index) is None]
        self.show(wanted)

    def decouple(self, enable: bool) -> None:
        """Show gradients as ``decoupled_grad``, or as ``grad``, from now on."""
        self.is_decoupled = enable
        for param in self.params:
            setattr(param.sharded, DECOUPLED, None)

    def take_settings(self, other: MainGrads) -> None:
        """Copy the settings of the object that this one replaces."""
        other.copy_to_host()
        self.is_decoupled, self.kept = other.is_decoupled, other.kept

    def clear_decoupled(self, set_to_none: bool) -> None:
        """Drop decoupled and hidden gradients, or set them to zero."""
        for index in range(len(self.params)) if self.is_decoupled or self.kept is not None else ():
            grad = self._grad(index)
            if grad is not None and not set_to_none:
                grad.zero_()
            elif grad is not None:
                self._set(index, None)

    def _make(self, apart: bool = False) -> DBuffer:
        self.buffer, self.shown, self.on_device = None, [], None  # frees their memory
        is_captured = self.main.local.is_cuda and torch.cuda.is_current_stream_capturing()
        self.is_apart = apart and not is_captured  # a graph has its own memory
        if self.is_apart:
            with self._memory:
                local = self.home.empty(self._numel + self.room, self.dtype)
        else:
            if "_memory" in self.__dict__ and not is_captured:
                self._free_memory_pool()
            local = self.home.empty(self._numel + self.room, self.dtype)
        buffer = self.buffer = self.main.like(local[: self._numel] if self.room else local)
        if self._has_gaps:
            buffer.local.zero_()
        if self._places is None:
            self.shown = [_torch.like_dtensor(p.sharded, buffer.local_view(i)) for i, p in enumerate(self.params)]
        else:
            self.shown = _torch.dtensors_over(buffer.local, *self._places)
        for shown in self.shown:
            shown.__dict__[MAIN_GRAD] = buffer
        return buffer

    @functools.cached_property
    def _memory(self) -> AbstractContextManager[None]:
        return _torch.memory(self.home.device)

    @functools.cached_property
    def _places(self) -> tuple[list[_torch.Spec], list[Any], list[Any], list[int]] | None:
        """Specs, shapes, strides and offsets of the gradients in the buffer; None if some are not plain DTensors."""
        kinds: set[type] = {type(param.sharded) for param in self.params}
        if kinds != {DTensor}:
            return None
        windows = self.main.layout.windows(self.main.held.first, self.main.held.count)
        specs = [_torch.spec_with_dtype(_torch.spec_of(param.sharded), self.dtype) for param in self.params]
        return specs, [w.shape for w in windows], [w.stride for w in windows], [w.offset for w in windows]

    def _copy_replaced(self, others: Sequence[int], buffer: DBuffer, lane: Lane) -> list[torch.Tensor]:
        """Copy gradients that users replaced or set to None into the buffer; returns what the lane reads for it."""
        replaced: list[torch.Tensor] = []
        for index in others:  # code that holds the previous gradients keeps their values
            known = weakref.ref(self.shown[index])
            self.shown[index].__dict__.pop(MAIN_GRAD)
            self.shown[index] = _torch.like_dtensor(self.params[index].sharded, buffer.local_view(index))
            self.shown[index].__dict__[MAIN_GRAD] = buffer
            _torch.keep_values(known)
        with lane.after_current_stream():  # an earlier reduce of the group may still write there
            for index in others:
                view = buffer.local_view(index)
                with _torch.PlainAttributes():
                    grad = self._grad(index)
                if grad is None:
                    view.zero_()  # set to None, while others of the group were not
                else:
                    replaced.append(_torch.local_of(grad))
                    view.copy_(replaced[-1])
                    self._set(index, self.shown[index])
        return replaced


def copy_all_to_host() -> None:
    """Copy all gradients that have stayed on the device to host memory, but not those of reduces in flight."""
    for each in list(STAYING):
        holder = None if each.holder is None else each.holder()
        if holder is not None:
            holder.copy_to_host()


def has_gaps(buffer: DBuffer) -> bool:
    """Whether a buffer for reduced gradients must be zeroed, because reduces do not write between its runs."""
    return buffer.local.numel() != buffer.layout.run_numel * buffer.held.count


# Hooks that users register on sharded parameters are called when autograd would call them on unsharded ones. Those of
# `register_hook` get the reduced gradient of a backward, before it is added to `.grad`; their result replaces it. Those
# of `register_post_accumulate_grad_hook` get the parameter, when its `.grad` is final for the current stream, or on CPU
# complete. Both are called once per backward that reduces to final gradients, and only for parameters that it used.


def change_gradients(
    params: Sequence[ShardedParam], hooked: Callable[[], Sequence[int]], reduced: DBuffer, factor: float
) -> None:
    """Scale the reduced gradients, and call the tensor hooks of the params ``hooked``, which may change theirs."""
    if factor != 1.0:
        reduced.local.mul_(factor)
    for index in hooked():
        param, view = params[index], reduced.local_view(index)
        for hook in _torch.hooks_of(param.sharded, post_accumulate=False):
            given = _torch.like_dtensor(param.sharded, view)
            changed, known = hook(given), weakref.ref(given)
            changed = None if changed is given else changed
            del given
            _torch.keep_values(known)
            if changed is None:
                continue
            if not isinstance(changed, DTensor) or not is_cut_alike(changed, param.sharded):
                raise TypeError(
                    f"a hook on parameter '{param.name}' returned a {type(changed).__name__} instead of a gradient "
                    "sharded like the parameter; compute the result from the gradient that the hook receives"
                )
            view.copy_(_torch.local_of(changed))


@torch.no_grad()
def call_finished(params: Sequence[ShardedParam], hooked: Callable[[], Sequence[int]]) -> None:
    """Call the post-accumulate hooks of the params ``hooked``, whose gradients are final."""
    for index in hooked():
        for hook in _torch.hooks_of(params[index].sharded, post_accumulate=True):
            hook(params[index].sharded)
