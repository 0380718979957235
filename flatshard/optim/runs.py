"""What an optimizer steps in the place of sharded parameters: plain tensors over main weights, as few as possible.

    main of a group   | wq      | wk      | norm | w1        |..| w2        |      .. padding
    parameter group   | 0       | 0       | 1    | 0         |  | 0         |
    runs              | run A             | B    | run C                    |

A run is stepped as one flat tensor. Its optimizer state has the same extent, so the state of each parameter is a view.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.engine.gradients.main_grads import MAIN_GRAD
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of

State = dict[Any, Any]  # of one parameter: name -> tensor or anything else


class Run:
    """Parameters of one group whose elements are stepped as one tensor.

    ``extent`` is where they lie in the group's buffers; None for a parameter that is stepped alone and in its shape.
    """

    def __init__(
        self,
        group: ParamGroup,
        number: int,
        indices: Sequence[int],
        extent: tuple[int, int] | None,
        flat: bool,
    ) -> None:
        self.parameters: list[nn.Parameter] = [group.params[index].sharded for index in indices]
        self.number = number  # of the parameter group that it belongs to
        self._flat = flat  # is to be flat wherever its gradients lie in one buffer
        self.main = group.main
        self._group = weakref.ref(group)
        self._indices = indices
        self._extent = extent
        local = self.main.local_view(indices[0]) if extent is None else self.main.local[slice(*extent)]
        self.tensor = nn.Parameter(local)
        if extent is None:
            self.tensor.__dict__.update(self.parameters[0].__dict__)  # what users mark parameters with
        self._views: dict[Any, tuple[torch.Tensor, list[DTensor]]] = {}

    @property
    def group(self) -> ParamGroup | None:
        """The group of its parameters, while it exists."""
        return self._group()

    @property
    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay: `.to` and its like move them."""
        group = self._group()
        return group is None or group.main is self.main

    def attach(self, uncast: bool) -> bool:
        """Give the tensor its gradient; False if the gradients are not what they were when the run was cut."""
        group = self._group()
        if self._extent is not None and group is not None and self._has_gradients_of(group):
            buffer = group.gradients.main_grads.buffer
            assert buffer is not None
            self._set_grad(self._slice_of(buffer.local), uncast)
            return True
        first = self.parameters[0].grad
        if first is None:
            return False
        buffer = getattr(first, MAIN_GRAD, None)
        if self._extent is None:
            if self._flat and suits(buffer, self.main):
                return False
            self._set_grad(_torch.local_of(first), uncast)
            return True
        if buffer is None or not suits(buffer, self.main):
            return False
        gradient = buffer.local
        for parameter in self.parameters:
            if getattr(parameter.grad, MAIN_GRAD, None) is not buffer:
                return False
        self._set_grad(self._slice_of(gradient), uncast)
        return True

    def _has_gradients_of(self, group: ParamGroup) -> bool:
        """Whether all gradients are the group's own, which is the rule and is asked first."""
        main_grads = group.gradients.main_grads
        if main_grads.buffer is None or group.main is not self.main:
            return False
        with _torch.PlainAttributes():
            for index, parameter in zip(self._indices, self.parameters):
                if parameter.grad is not main_grads.shown[index]:
                    return False
        return True

    def _slice_of(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self._extent is not None
        is_all = self._extent == (0, gradient.numel())
        return gradient if is_all else gradient[slice(*self._extent)]

    def _set_grad(self, gradient: torch.Tensor, uncast: bool) -> None:
        tensor = self.tensor
        if gradient.dtype != tensor.dtype:
            if uncast:
                _torch.allow_grad_of(tensor, gradient.dtype)
            else:
                gradient = gradient.to(tensor.dtype)
        tensor.grad = gradient

    # State

    def take(self, state: Mapping[Any, State]) -> tuple[State, dict[Any, bool]]:
        """The state of the run's tensor, from that of its parameters, which agree in all that is not elementwise; and
        what is."""
        taken: State = {}
        kinds: dict[Any, bool] = {}
        for key, value in state.get(self.parameters[0], {}).items():
            kinds[key] = is_elementwise(value, self.parameters[0])
            if kinds[key]:
                parts = [self._local(place, state[p][key]) for place, p in enumerate(self.parameters)]
                taken[key] = parts[0] if self._extent is None else self._joined(parts)
            else:
                taken[key] = _copied(value)
        return taken, kinds

    def show(self, taken: State, elementwise: Mapping[Any, bool], state: dict[Any, State]) -> None:
        """Bring the state of the parameters up to date with that of the run's tensor."""
        for place, parameter in enumerate(self.parameters):
            mine = state.setdefault(parameter, {})
            for key in [key for key in mine if key not in taken]:
                del mine[key]
            for key, value in taken.items():
                mine[key] = self._view(key, value, place) if elementwise[key] else _copied(value)

    def agrees(self, taken: State, elementwise: Mapping[Any, bool], state: Mapping[Any, State]) -> bool:
        """Whether the state of the parameters is what `show` made it: nobody has replaced or changed an entry."""
        for place, parameter in enumerate(self.parameters):
            mine = state.get(parameter, {})
            if mine.keys() != taken.keys():
                return False
            for key, value in taken.items():
                if not (mine[key] is self._view(key, value, place) if elementwise[key] else _equal(mine[key], value)):
                    return False
        return True

    def _view(self, key: Any, value: torch.Tensor, place: int) -> DTensor:
        """One parameter's part of an elementwise entry; made once for as long as the optimizer keeps the entry."""
        known = self._views.get(key)
        if known is None or known[0] is not value:
            parts = [value] if self._extent is None else [self._part(value, i) for i in range(len(self._indices))]
            views = [_torch.like_dtensor(p, part) for p, part in zip(self.parameters, parts)]
            known = self._views[key] = value, views
        return known[1][place]

    def _part(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        assert self._extent is not None
        offset, shape, stride = window(self.main, self._indices[place])
        start = offset - self._extent[0] if 0 not in shape else 0
        return flat.as_strided(shape, stride, flat.storage_offset() + start)

    def _local(self, place: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of an elementwise entry, whatever form it was given in."""
        parameter = self.parameters[place]
        assert isinstance(parameter, DTensor)
        if isinstance(value, DTensor) and cut_of(value) == cut_of(parameter):
            return _torch.local_of(value)
        return local_part(parameter, value)

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat tensor of the run's extent with these parts. Where they lie in one already, nothing is copied."""
        assert self._extent is not None
        start, stop = self._extent
        filled = [(part, window(self.main, index)) for part, index in zip(parts, self._indices) if part.numel()]
        if not filled:
            return parts[0].new_zeros(stop - start)
        first = filled[0][0]
        base = first.storage_offset() - filled[0][1].offset
        storage = first.untyped_storage()
        fits = base + start >= 0 and (base + stop) * first.element_size() <= storage.nbytes()
        for part, place in filled:
            same = part.dtype == first.dtype and part.untyped_storage()._cdata == storage._cdata
            fits = fits and same and part.is_contiguous() and part.storage_offset() - place.offset == base
        if fits:
            return first.as_strided((stop - start,), (1,), base + start)
        flat = first.new_zeros(stop - start)
        for part, place in filled:
            flat.as_strided(place.shape, place.stride, place.offset - start).copy_(part)
        return flat


def suits(buffer: DBuffer | None, main: DBuffer) -> bool:
    """Whether a buffer of gradients lies as main does."""
    return buffer is not None and buffer.local.numel() == main.local.numel() and buffer.placements == main.placements


def window(main: DBuffer, index: int) -> Any:
    """Offset, shape and stride of tensor ``index`` in the local tensor of a buffer."""
    return main.layout.windows(main.held.first, main.held.count)[index]


def cut_of(tensor: DTensor) -> Any:
    """What says which rows of a tensor a rank holds; ragged ones have more to say than mesh and placements."""
    return tensor.device_mesh, tensor.placements, getattr(tensor, "_cut", None)


def local_part(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the shape of ``parameter``, cut as that is; one of the local shape is taken to
    be it. A collective call for a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape == _torch.local_of(parameter).shape:
        return value
    return _torch.part_of(value, parameter).clone()


def is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of the state of ``parameter`` has one number for each of its elements."""
    if isinstance(value, DTensor):
        return True
    shapes = (parameter.shape, _torch.local_of(parameter).shape)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape in shapes


def cut(
    param_groups: Iterable[dict[str, Any]], state: Mapping[Any, State], flat: bool
) -> tuple[list[Run], list[nn.Parameter], list[list[torch.Tensor]]]:
    """Runs over the sharded parameters that have a gradient; those that have none; per parameter group, all others.

    With ``flat``, a run takes neighbours in the buffer as far as they are of one parameter group, have their gradients
    in one buffer, and have equal state apart from what is elementwise. Without, each parameter is a run of its own.
    """
    absent: list[nn.Parameter] = []
    others: list[list[torch.Tensor]] = []
    found: dict[ParamGroup, dict[int, tuple[int, Any]]] = {}
    places: dict[ParamGroup, dict[int, int]] = {}
    for number, param_group in enumerate(param_groups):
        others.append([])
        for parameter in param_group["params"]:
            group = group_of(parameter)
            if group is None:
                others[number].append(parameter)
            elif parameter.grad is None:
                absent.append(parameter)
            else:
                if group not in places:
                    places[group] = {id(member.sharded): index for index, member in enumerate(group.params)}
                buffer = getattr(parameter.grad, MAIN_GRAD, None)
                joins = flat and suits(buffer, group.main)
                mark = (number, id(buffer), _signature(state.get(parameter, {}), parameter)) if joins else None
                found.setdefault(group, {})[places[group][id(parameter)]] = (number, mark)
    runs = [run for group, members in found.items() for run in _cut_group(group, members, flat)]
    return runs, absent, others


def _cut_group(group: ParamGroup, members: dict[int, tuple[int, Any]], flat: bool) -> list[Run]:
    main = group.main
    windows = main.layout.windows(main.held.first, main.held.count)
    runs = []
    pieces: list[tuple[Any, list[int]]] = []
    lying = sorted((i for i in range(len(group.params)) if 0 not in windows[i].shape), key=lambda i: windows[i].offset)
    empty = [i for i in members if 0 in windows[i].shape]
    for index in lying:
        mark = members.get(index, (0, None))[1]
        if mark is not None and pieces and pieces[-1][0] == mark:
            pieces[-1][1].append(index)
        else:
            pieces.append((mark, [index]))
    for index in empty:
        # Nothing of it is here, but its state must have the keys that it has elsewhere.
        mark = members[index][1]
        with_it = next((piece for piece in pieces if mark is not None and piece[0] == mark), None)
        if with_it is None:
            pieces.append((mark, [index]))
        else:
            with_it[1].append(index)
    for mark, indices in pieces:
        if indices[0] not in members:
            continue
        extent = None
        if mark is not None:
            there = [windows[i] for i in indices if 0 not in windows[i].shape]
            last = max(there, key=lambda w: w.offset) if there else None
            extent = (there[0].offset, last.offset + _numel(last.shape)) if last is not None else (0, 0)
            if len(there) == len(lying):
                extent = (0, main.local.numel())  # padding included, so that no step has to cut the gradients
        runs.append(Run(group, members[indices[0]][0], indices, extent, flat))
    return runs


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _signature(state: State, parameter: torch.Tensor) -> Any:
    """What must be equal for two parameters to be stepped together. Costs a wait where it is on the device."""
    entries = []
    for key, value in state.items():
        if is_elementwise(value, parameter):
            entries.append((str(key), "elementwise", str(value.dtype)))
        else:
            entries.append((str(key), "shared", repr(value.tolist() if isinstance(value, torch.Tensor) else value)))
    return tuple(sorted(entries))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other.to(one.device)).all())
    return type(one) is type(other) and bool(one == other)
