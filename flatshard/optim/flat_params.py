"""What an optimizer steps in place of sharded parameters: plain tensors over main weights, as few as possible.

    main weights              | wq      | wk      | norm | w1        |..| w2        |      .. padding
    optimizer's param group   | 0       | 0       | 1    | 0         |  | 0         |
    flat parameters           | A                 | B    | C                        |

Each is stepped as one flat tensor. Its optimizer state has the same extent, so the state of each parameter is a view.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.engine.gradients.main_grads import MAIN_GRAD
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of
from flatshard.optim.adamw8bit import with_rows_of

State = dict[Any, Any]  # of one parameter: name -> tensor or anything else
Rows: TypeAlias = "slice | EllipsisType"  # an index for dim 0
# Names in the state of torch's optimizers that have one number per parameter, whatever its shape.
PER_PARAMETER = {"step", "mu_product", "eta", "mu"}


class FlatParam:
    """Parameters of one group whose elements are stepped as one tensor.

    ``extent`` is where they lie in the group's buffers; None for a parameter that is stepped alone and in its shape.
    """

    def __init__(
        self, group: ParamGroup, number: int, indices: Sequence[int], extent: tuple[int, int] | None, flat: bool
    ) -> None:
        self.parameters: list[nn.Parameter] = [group.params[index].sharded for index in indices]
        self.number = number  # of the parameter group that it belongs to
        self.is_streamed = False  # stepped on the device with state, or also weights, from host memory
        self._flat = flat  # is to be flat wherever its gradients lie in one buffer
        self.main = group.main
        self.group = weakref.ref(group)
        windows = self.main.layout.windows(self.main.held.first, self.main.held.count)
        self._indices, self._windows = indices, [windows[index] for index in indices]
        self._extent = extent
        self._is_all = extent == (0, self.main.local.numel())
        self.tensor = nn.Parameter(self.part(self.main))
        if extent is None:
            self.tensor.__dict__.update(self.parameters[0].__dict__)  # what users mark parameters with
        self._views: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def part(self, buffer: DBuffer) -> torch.Tensor:
        """Its place in a buffer with the layout of main."""
        if self._extent is None:
            return buffer.local_view(self._indices[0])
        return buffer.local if self._is_all else buffer.local[slice(*self._extent)]

    def pieces(self, most: int) -> list[Rows]:
        """The rows of each piece of the tensor, and of others with as many rows. A piece has at most so many elements.

        A flat tensor has rows of one element. A row is never split.
        """
        if self.tensor.dim() == 0:
            return [...]
        rows = max(most // max(self.tensor.shape[1:].numel(), 1), 1)
        return [slice(at, at + rows) for at in range(0, max(len(self.tensor), 1), rows)]

    def attach_gradient(self, keep_dtype: bool) -> bool:
        """Set the gradient of the tensor; False if the gradients have changed since this was created."""
        group = self.group()
        if group is not None and group.main is not self.main:  # `.to` and its like have moved the parameters
            return False
        if group is not None and group.home.host and not self.is_streamed:
            group.gradients.main_grads.copy_to_host()
        if self._extent is None:
            first = _torch.grad_of(self.parameters[0])
            if first is None or (self._flat and buffer_of(first, self.main, self._indices[0]) is not None):
                return False
            gradient = _torch.local_of(first)
        else:
            buffer = self._gradient_buffer(group)
            if buffer is None:
                return False
            gradient = self.part(buffer)
        set_grad(self.tensor, gradient, keep_dtype)
        return True

    def _gradient_buffer(self, group: ParamGroup | None) -> DBuffer | None:
        """The one buffer of all gradients, if there is one and it has the layout of main."""
        main_grads = None if group is None else group.gradients.main_grads
        if main_grads is not None and main_grads.buffer is not None:  # the group's own is the rule, and asked first
            with _torch.PlainAttributes():
                for index, parameter in zip(self._indices, self.parameters):
                    if parameter.grad is not main_grads.shown[index]:
                        break
                else:
                    return main_grads.buffer
        buffers = {buffer_of(_torch.grad_of(p), self.main, i) for i, p in zip(self._indices, self.parameters)}
        return buffers.pop() if len(buffers) == 1 else None

    # State

    def join_state(self, state: Mapping[Any, State]) -> tuple[State, dict[Any, bool]]:
        """The state of the flat tensor, made of that of its parameters, and which entries are elementwise.

        All other entries are equal for these parameters.
        """
        joined: State = {}
        elementwise: dict[Any, bool] = {}
        for key, value in state.get(self.parameters[0], {}).items():
            elementwise[key] = is_elementwise(value, self.parameters[0])
            if not elementwise[key]:
                joined[key] = _copied(value)
            elif self._extent is None:
                shard = functools.partial(local_part, self.parameters[0])
                joined[key] = _torch.map_leaves(torch.Tensor, shard, value)
            else:
                joined[key] = self._joined([local_part(p, state[p][key]) for p in self.parameters])
        return joined, elementwise

    def write_state(self, joined: State, elementwise: Mapping[Any, bool], state: dict[Any, State]) -> None:
        """Update the state of the parameters from that of the flat tensor."""
        for index, parameter in enumerate(self.parameters):
            entries = state.setdefault(parameter, {})
            entries.clear()
            for key, value in joined.items():
                entries[key] = self._shown(key, value, index) if elementwise[key] else _copied(value)

    def matches_state(self, joined: State, elementwise: Mapping[Any, bool], state: Mapping[Any, State]) -> bool:
        """Whether the state of the parameters is as `write_state` left it, with no entry replaced or changed."""
        for index, parameter in enumerate(self.parameters):
            entries = state.get(parameter, {})
            if entries.keys() != joined.keys():
                return False
            for key, value in joined.items():
                if not are_equal(entries[key], self._shown(key, value, index) if elementwise[key] else value):
                    return False
        return True

    def _shown(self, key: Any, value: Any, index: int) -> Any:
        """One parameter's part of an elementwise entry; of each tensor, where the entry is a list or a dict of them."""
        if isinstance(value, torch.Tensor):
            return self._view(key, value, index)
        numbers = itertools.count()
        return _torch.map_leaves(torch.Tensor, lambda each: self._view((key, next(numbers)), each, index), value)

    def _view(self, key: Any, value: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's part of a tensor; created once and kept as long as that."""
        cached = self._views.get(key)
        if cached is None or cached[0] is not value:
            parts = [value]
            if self._extent is not None:
                base = value.storage_offset() - self._extent[0]
                starts = [base + each.offset if 0 not in each.shape else 0 for each in self._windows]
                parts = [value.as_strided(w.shape, w.stride, at) for w, at in zip(self._windows, starts)]
            views = [with_rows_of(p, part) for p, part in zip(self.parameters, parts)]
            cached = self._views[key] = value, views
        return cached[1][index]

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat tensor with these parts. Nothing is copied if they are already parts of one."""
        assert self._extent is not None
        start, stop = self._extent
        filled = [(part, window) for part, window in zip(parts, self._windows) if part.numel()]
        if not filled:
            return parts[0].new_zeros(stop - start)
        first = filled[0][0]
        base = first.storage_offset() - filled[0][1].offset
        storage = first.untyped_storage()
        fits = base + start >= 0 and (base + stop) * first.element_size() <= storage.nbytes()
        for part, window in filled:
            same = part.dtype == first.dtype and part.untyped_storage()._cdata == storage._cdata
            fits = fits and same and part.is_contiguous() and part.storage_offset() - window.offset == base
        if fits:
            return first.as_strided((stop - start,), (1,), base + start)
        flat = first.new_zeros(stop - start)
        for part, window in filled:
            flat.as_strided(window.shape, window.stride, window.offset - start).copy_(part)
        return flat


def buffer_of(grad: torch.Tensor | None, main: DBuffer, index: int) -> DBuffer | None:
    """The buffer in which a gradient is where tensor ``index`` is in main; None if users have swapped gradients."""
    buffer: DBuffer | None = getattr(grad, MAIN_GRAD, None)
    if buffer is None or buffer.local.numel() != main.local.numel() or buffer.placements != main.placements:
        return None
    assert grad is not None
    offset = _torch.local_of(grad).storage_offset() - buffer.local.storage_offset()
    return buffer if offset == main.layout.windows(main.held.first, main.held.count)[index].offset else None


def set_grad(tensor: torch.Tensor, gradient: torch.Tensor, keep_dtype: bool) -> None:
    """Give a plain parameter its gradient, in its dtype unless ``keep_dtype``."""
    gradient = gradient if keep_dtype or gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)
    _torch.allow_grad_of(tensor, gradient.dtype)  # the last one may have had another dtype
    tensor.grad = gradient


def sharding_of(tensor: torch.Tensor) -> Any:
    """What determines which rows of a DTensor a rank has: mesh, placements and, if it is ragged, its cut."""
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh, tensor.placements, getattr(tensor, "_cut", None)


def cut_as(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A gradient, sharded as its parameter. Collective if it is sharded in another way, or Partial."""
    if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor) or hasattr(grad, MAIN_GRAD):
        return grad
    if sharding_of(grad) == sharding_of(parameter):
        return grad
    return grad.redistribute(parameter.device_mesh, parameter.placements)


def local_part(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor of the shape of ``parameter``. A plain tensor of the local shape is the shard.

    Collective for a DTensor that is sharded in another way.
    """
    if isinstance(value, DTensor):
        if sharding_of(value) == sharding_of(parameter):
            return _torch.local_of(value)
        value = value.full_tensor()
    if value.shape == _torch.local_of(parameter).shape:
        return value
    return _torch.part_of(value, parameter).clone()


def is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of the state of ``parameter`` has one number for each of its elements, or a list of such."""
    if isinstance(value, DTensor):
        return True
    shapes, tensors = (parameter.shape, _torch.local_of(parameter).shape), tensors_in(value)
    return bool(tensors) and all(isinstance(e, DTensor) or (e.dim() > 0 and e.shape in shapes) for e in tensors)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an entry of a state: itself, or those in the lists and dicts that it consists of."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for each in _torch.pytree_leaves(value) if isinstance(each, torch.Tensor)]


def make_flat_params(
    param_groups: Iterable[dict[str, Any]], state: Mapping[Any, State], flat: bool
) -> tuple[list[FlatParam], list[nn.Parameter], list[list[torch.Tensor]]]:
    """Flat parameters over those with a gradient; sharded parameters without one; per parameter group, all others.

    With ``flat``, neighbours in the buffer are joined if they are in one parameter group, have their gradients in one
    buffer, and have equal state where it is not elementwise. Without, each parameter is separate.
    """
    without_grad: list[nn.Parameter] = []
    unsharded: list[list[torch.Tensor]] = []
    numbers_of: dict[ParamGroup, dict[int, int]] = {}  # by the id of a parameter, the number of its parameter group
    for number, param_group in enumerate(param_groups):
        unsharded.append([])
        for parameter in param_group["params"]:
            group = group_of(parameter)
            if group is None:
                unsharded[number].append(parameter)
            elif _torch.grad_of(parameter) is None:
                without_grad.append(parameter)
            else:
                numbers_of.setdefault(group, {})[id(parameter)] = number
    flat_params = [p for group, numbers in numbers_of.items() for p in _flat_params_of(group, numbers, state, flat)]
    return flat_params, without_grad, unsharded


def _flat_params_of(
    group: ParamGroup, numbers: Mapping[int, int], state: Mapping[Any, State], flat: bool
) -> list[FlatParam]:
    main = group.main
    windows = main.layout.windows(main.held.first, main.held.count)
    # Neighbours with the same mark can be one flat parameter: the number of their parameter group, the buffer of their
    # gradients, and what else must be equal. A parameter whose gradient is in no buffer stays alone.
    marks: dict[int, tuple[int, int | None, Any]] = {}
    for index, parameter in enumerate(param.sharded for param in group.params):
        if id(parameter) in numbers:
            buffer = buffer_of(_torch.grad_of(parameter), main, index) if flat else None
            alike = index if buffer is None else _signature(state.get(parameter, {}), parameter)
            marks[index] = numbers[id(parameter)], None if buffer is None else id(buffer), alike
    ordered = sorted((i for i in range(len(windows)) if 0 not in windows[i].shape), key=lambda i: windows[i].offset)
    runs = [(mark, list(indices)) for mark, indices in itertools.groupby(ordered, marks.get) if mark is not None]
    for index in (i for i in marks if 0 in windows[i].shape):
        # This rank holds nothing of it, but its state must have the keys that it has on other ranks.
        same = next((indices for mark, indices in runs if mark == marks[index]), None)
        if same is None:
            runs.append((marks[index], [index]))
        else:
            same.append(index)
    flat_params = []
    for mark, indices in runs:
        extent = None
        if mark[1] is not None:
            filled = [windows[i] for i in indices if 0 not in windows[i].shape]
            extent = (filled[0].offset, filled[-1].offset + math.prod(filled[-1].shape)) if filled else (0, 0)
            if len(filled) == len(ordered):
                extent = (0, main.local.numel())  # padding included, so that no step has to cut the gradients
        flat_params.append(FlatParam(group, mark[0], indices, extent, flat))
    return flat_params


def _signature(state: State, parameter: torch.Tensor) -> Any:
    """What must be equal for two parameters to be stepped together. Waits for the device if it is there."""
    entries = []
    for key, value in state.items():
        if is_elementwise(value, parameter):
            entries.append((str(key), "elementwise", str(value.dtype)))
        else:
            entries.append((str(key), "shared", repr(value.tolist() if isinstance(value, torch.Tensor) else value)))
    return tuple(sorted(entries))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two entries of a state, or options, have the same value; for tensors on any device.

    DTensors must be the same object: to compare their values would be collective.
    """
    if one is other or isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other.to(one.device)).all())
    return bool(one == other)
