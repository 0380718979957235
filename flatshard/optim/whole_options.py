"""Which parameters are stepped whole, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch

from flatshard.optim.assignment import Cost, Split, newton_schulz

Predicate: TypeAlias = Callable[[str, torch.Tensor], bool]
Splits: TypeAlias = Mapping[str, Split] | Callable[[str, torch.Tensor], Split] | None
BUCKET = 64 << 20


@dataclass(frozen=True)
class WholeOptions:
    """The arguments of `fully_shard_optimizer`."""

    whole: Predicate | bool = True
    split: Splits = None
    cost: Cost = newton_schulz
    owners: Literal["shards", "all"] = "shards"
    bucket_bytes: int = BUCKET
    unbind: bool = False  # let tensors of three dims be so many matrices

    def wants(self, name: str, parameter: torch.Tensor) -> bool:
        return self.whole if isinstance(self.whole, bool) else bool(self.whole(name, parameter))

    def split_of(self, name: str, parameter: torch.Tensor) -> Split:
        if self.split is None or callable(self.split):
            return None if self.split is None else self.split(name, parameter)
        return next((split for pattern, split in self.split.items() if fnmatchcase(name, pattern)), None)
