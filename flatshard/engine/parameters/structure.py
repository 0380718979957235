"""The plain tensors of which a tensor subclass consists, and which of them are sharded with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flatshard import _torch


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
        """``rows``: the number of rows, if there are fewer than in the whole."""
        inner = {name: next(leaves) if p is None else p.made_of(leaves, rows) for name, p in self.parts.items()}
        size = self.size if rows is None else torch.Size((rows, *self.size[1:]))
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, size, self.stride)
        return made

    def mapped(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
        """The same tensor with changed leaves if they have rows, and with copies of the others."""
        parts = (change(leaf) if self.has_rows(leaf) else leaf for leaf in self.leaves(tensor))
        return self.made_of((part.clone(memory_format=torch.contiguous_format) for part in parts), rows)

    def has_rows(self, leaf: torch.Tensor) -> bool:
        """Of a leaf of the whole tensor: whether it is cut where the tensor is."""
        return leaf.dim() > 0 and leaf.shape[0] == self.size[0] > 1
