"""Frozen parameters of tensor subclasses without methods for an all-gather: torchao's quantised weights.

Such a tensor consists of plain tensors (`__tensor_flatten__`). Those with one row for each of its rows (codes, a scale
per row) are sharded, gathered and combined again; all others (a scale of the whole tensor, a packed form) stay whole on
every rank. The result has the same bytes, whatever they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatshard import _torch
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.codec import Extension


class Composed(Extension):
    """A parameter whose plain tensors are gathered unchanged."""

    def __init__(self, param: ShardedParam, *others: Any) -> None:
        super().__init__(param, *others)
        assert param.made_of is not None
        self._structure, self._cut = param.made_of

    def encode(self) -> list[torch.Tensor]:
        leaves = zip(self._structure.leaves(self._on_device()), self._cut)
        given = [self._filled_up(leaf) for leaf, is_cut in leaves if is_cut]
        self._sizes = [each.size() for each in given]
        return given

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        parts = [flat.view(-1, *size[1:])[: self._shape[0]] for flat, size in zip(gathered, self._sizes)]
        if self.made is None:
            self._owned = [part.clone() for part in parts]
            left, local = iter(self._owned), self._local
            leaves = zip(self._structure.leaves(local), self._cut)
            whole = (next(left) if cut else leaf.to(self._device, copy=True) for leaf, cut in leaves)
            self.made = self._structure.made_of(whole)
            return
        for owned, part in zip(self._owned, parts):
            owned.untyped_storage().resize_(owned.numel() * owned.element_size())
            with _torch.keeping_versions([owned]):
                owned.copy_(part)
