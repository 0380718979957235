"""Tensors without values, for code that prepares full state dicts for files: operations are recorded and run later.

Such code renames, cuts and stacks all tensors of a model, and looks which of them share memory. With deferred tensors
it needs no memory for the full model: values are gathered a few tensors at a time when a file is written.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatshard import _torch
from flatshard.checkpoint.files import TensorEntry, bytes_view, header_of

# Computes a value from the needed tensors; with a dict of the results of recorded operations, to which it adds others.
Value = Callable[[Mapping[str, torch.Tensor], dict[Any, list[torch.Tensor]]], torch.Tensor]
_ADDRESSES = itertools.count(1 << 12, 1 << 50)  # far enough from each other that no two storages overlap


class DeferredStorage:
    """The storage of deferred tensors: an address and a size, for code that looks for shared memory."""

    def __init__(self, size: int) -> None:
        self._start, self._size = next(_ADDRESSES), size

    def data_ptr(self) -> int:
        return self._start

    def nbytes(self) -> int:
        return self._size


class DeferredTensor(torch.Tensor):
    """A CPU tensor without values: it has a shape, a dtype, strides, and a storage that it may share with others.

    Operations on it return deferred tensors. Operations that write to it raise NotImplementedError.
    """

    _meta: torch.Tensor  # a tensor of the same shape on the meta device
    _memory: DeferredStorage
    needs: frozenset[str]  # the names of the tensors that its value is computed from
    value: Value

    @staticmethod
    def __new__(
        cls, shown: torch.Tensor, memory: DeferredStorage, needs: frozenset[str], value: Value
    ) -> DeferredTensor:
        self: DeferredTensor = _torch.wrapper_like(cls, shown, torch.device("cpu"))
        self._meta, self._memory, self.needs, self.value = shown, memory, needs, value
        return self

    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = kwargs.get("device") is not None
        if moved and torch.device(kwargs["device"]).type != "cpu":
            raise NotImplementedError(f"{func}: a deferred tensor has no values, and cannot move to {kwargs['device']}")
        if _torch.writes(func):
            raise NotImplementedError(f"{func}: a deferred tensor has no values, and cannot be written to")
        deferred = [each for each in _torch.pytree_leaves((args, kwargs)) if isinstance(each, DeferredTensor)]
        shown_args, shown_kwargs = _torch.map_leaves(
            torch.Tensor, lambda x: x._meta if isinstance(x, DeferredTensor) else x.to("meta"), (args, kwargs)
        )
        shown_kwargs |= {"device": "meta"} if moved else {}
        results, shape = _torch.tree_flatten(func(*shown_args, **shown_kwargs))
        memories = {_torch.storage_id(each._meta): each._memory for each in deferred}
        needs = frozenset[str]().union(*(each.needs for each in deferred))

        def compute(number: int, tensors: Mapping[str, torch.Tensor], done: dict[Any, list[torch.Tensor]]) -> Any:
            if compute not in done:
                real = _torch.map_leaves(DeferredTensor, lambda each: each.value(tensors, done), (args, kwargs))
                done[compute] = _torch.pytree_leaves(func(*real[0], **real[1]))
            return done[compute][number]

        made = []
        for number, result in enumerate(results):
            memory = DeferredStorage(result.untyped_storage().nbytes())
            memory = memories.setdefault(_torch.storage_id(result), memory)
            made.append(cls(result, memory, needs, partial(compute, number)))
        return _torch.tree_unflatten(made, shape)

    def data_ptr(self) -> int:
        return self._memory.data_ptr() + int(self._meta.storage_offset()) * self.element_size()

    def untyped_storage(self) -> DeferredStorage:  # type: ignore[override]
        return self._memory

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} has no values, and cannot be pickled; write it to a safetensors file")


def defer(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with deferred tensors in place of tensors. A tied tensor needs the first of its names."""
    deferred: dict[int, DeferredTensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and id(value) not in deferred:
            shown = torch.empty(value.shape, dtype=value.dtype, device="meta")
            memory = DeferredStorage(shown.nbytes)
            deferred[id(value)] = DeferredTensor(shown, memory, frozenset([name]), partial(_named, name))
    return {name: deferred.get(id(value), value) for name, value in state.items()}


def _named(name: str, tensors: Mapping[str, torch.Tensor], done: Any) -> torch.Tensor:
    return tensors[name]


class DeferredFile:
    """A safetensors file of deferred tensors, in the layout of `safetensors.torch.save_file`.

    It is written under a temporary name and renamed when it is complete.
    """

    def __init__(self, path: Path, tensors: Mapping[str, DeferredTensor], metadata: dict[str, str] | None) -> None:
        from safetensors.torch import save

        self._path, self._temporary = path, path.with_name(f".{path.name}.part")
        self._tensors = tensors
        # The safetensors library decides on the order of tensors: it is taken from a file of empty tensors.
        empty = save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata)
        described = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
        ordered = {name: tensors[name] for name in described if name != "__metadata__"}
        entries = {name: TensorEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
        self._header = header_of(entries, metadata)
        begins = itertools.accumulate((entry.nbytes for entry in entries.values()), initial=len(self._header))
        self._offsets = dict(zip(entries, begins))
        self.needs = frozenset().union(*(tensor.needs for tensor in tensors.values()))

    def write(self, whole: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the file from (name, tensor) pairs of all tensors in ``needs``, in any order.

        A tensor need not stay valid after the next one is requested: those that are needed later are copied.
        """
        todo: dict[str, list[str]] = {}  # name of a needed tensor -> names of tensors in the file
        for name, tensor in self._tensors.items():
            for needed in tensor.needs:
                todo.setdefault(needed, []).append(name)
        kept: dict[str, torch.Tensor] = {}
        try:
            with open(self._temporary, "wb") as file:
                file.write(self._header)
                for needed, value in whole:
                    kept[needed] = value.detach().cpu()
                    done: dict[Any, list[torch.Tensor]] = {}
                    for name in [each for each in todo[needed] if self._tensors[each].needs <= kept.keys()]:
                        file.seek(self._offsets[name])
                        file.write(bytes_view(self._tensors[name].value(kept, done).contiguous()))
                        for other in self._tensors[name].needs:
                            todo[other].remove(name)
                    kept = {each: kept[each] for each in kept if todo[each]}
                    if needed in kept:
                        kept[needed] = kept[needed].clone()
                file.flush()
                os.fsync(file.fileno())
            missing = sorted({name for names in todo.values() for name in names})
            if missing:
                raise RuntimeError(f"the values of {missing} were not given to write()")
            self._temporary.rename(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)
