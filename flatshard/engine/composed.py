"""Frozen parameters of tensor subclasses that say nothing of how they are gathered: torchao's quantised weights.

Such a tensor is made of plain ones, and tells of which (`__tensor_flatten__`). Those with a row for each of its own
rows (codes, a scale per row) are cut, gathered and put together again; all others (a scale of the whole, a packed form)
stay whole on every rank. What comes back is made of the same bytes, whatever they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatshard import _torch
from flatshard.engine.codec import Extension
from flatshard.engine.parameters import Member


@dataclass(frozen=True)
class Structure:
    """How a tensor of a subclass is made of plain tensors, which are its leaves in this order."""

    kind: Any
    context: Any
    parts: dict[str, Structure | None]  # None: a plain tensor
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Structure:
        asked: Any = tensor
        names, context = asked.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: cls.of(part) if _torch.is_made_of_others(part) else None for name, part in inner.items()}
        return cls(type(tensor), context, parts, tensor.size(), tensor.stride())

    def leaves(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for name, part in self.parts.items():
            inner = getattr(tensor, name)
            yield from (inner,) if part is None else part.leaves(inner)

    def made_of(self, leaves: Iterator[torch.Tensor], rows: int | None = None) -> torch.Tensor:
        """``rows``: how many it has, if they are not all."""
        inner = {name: next(leaves) if p is None else p.made_of(leaves, rows) for name, p in self.parts.items()}
        size = self.size if rows is None else torch.Size((rows, *self.size[1:]))
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, size, self.stride)
        return made

    def mapped(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
        """The same made of changed leaves where these have rows, and of copies of the others."""
        parts = (change(leaf) if self.has_rows(leaf) else leaf for leaf in self.leaves(tensor))
        return self.made_of((part.clone(memory_format=torch.contiguous_format) for part in parts), rows)

    def has_rows(self, leaf: torch.Tensor) -> bool:
        """Of a leaf of the whole tensor: whether it is cut where the tensor is."""
        return leaf.dim() > 0 and leaf.shape[0] == self.size[0] > 1


class Composed(Extension):
    """A parameter whose leaves are gathered as they are."""

    def __init__(self, member: Member, *others: Any) -> None:
        super().__init__(member, *others)
        assert member.made_of is not None
        self._structure, self._cut = member.made_of

    def encode(self) -> list[torch.Tensor]:
        local = self._local if self._local.device == self._device else self._local.to(self._device, non_blocking=True)
        given = []
        for leaf in (leaf for leaf, cut in zip(self._structure.leaves(local), self._cut) if cut):
            padded = leaf.new_zeros(self._padded[0], *leaf.shape[1:])
            padded[: leaf.shape[0]].copy_(leaf)
            given.append(padded)
        self._sizes = [each.size() for each in given]
        return given

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        parts = [flat.view(-1, *size[1:])[: self._shape[0]] for flat, size in zip(gathered, self._sizes)]
        if self._made is None:
            self._owned = [part.clone() for part in parts]
            left, local = iter(self._owned), self._local
            leaves = zip(self._structure.leaves(local), self._cut)
            whole = (next(left) if cut else leaf.to(self._device, copy=True) for leaf, cut in leaves)
            self._made = self._structure.made_of(whole)
            return
        for owned, part in zip(self._owned, parts):
            owned.untyped_storage().resize_(owned.numel() * owned.element_size())
            with _torch.keeping_versions([owned]):
                owned.copy_(part)
