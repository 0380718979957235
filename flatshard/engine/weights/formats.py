"""Which parameters are sent in one byte per element: chosen once, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from flatshard.layout import Layout, Placement, Wire, encodable, is_sharded, wire_of
from flatshard.policy import GatherFormat, MixedPrecisionPolicy, ReduceFormat

if TYPE_CHECKING:
    from flatshard.buffer.blocks import Code, Coder

_SMALL = 1 << 16  # elements; encoding smaller tensors saves less time than a launch takes
# Names of modules that turn hidden states into scores, where an error is an error of the result.
_HEADS = frozenset({"lm_head", "head", "output_layer", "embed_out", "score", "classifier", "proj_out"})
_ROUTERS = frozenset({"router", "gate"})
# The most ranks that can send each other all their data in no more bytes than an all-reduce of bfloat16.
_MOST_AMONG: dict[ReduceFormat, int] = {"int8": 3, "bf16_fp32": 2}
_EXPERTS = 1024  # a router has a row per expert; a module of that name with more rows is a part of a feed-forward layer


def chosen(
    name: str, parameter: torch.Tensor, modules: Sequence[nn.Module | None], policy: MixedPrecisionPolicy, owner: str
) -> bool:
    """Whether a parameter is sent in one byte per element if its group has such a format.

    ``name`` starts at the unit, ``modules`` are those that have the parameter, ``owner`` is the class of the unit's
    module. A parameter of less than two dims is never encoded, because its elements cannot share scales. A layer that
    is a unit by itself, and so has no name there, counts as a head.
    """
    if not parameter.dtype.is_floating_point or parameter.dim() < 2 or not parameter.numel():
        return False
    if policy.encodes is not None:
        assert isinstance(parameter, nn.Parameter)
        return bool(policy.encodes(name, parameter))
    *path, own = name.lower().split(".")
    if parameter.numel() < _SMALL or "embed" in own or any("Embedding" in type(m).__name__ for m in modules):
        return False
    if not path:
        return not any(isinstance(module, nn.Linear) for module in modules)
    if owner.endswith("Head") or path[-1] == "output" or _HEADS.intersection(path):
        return False
    return not _ROUTERS.intersection(path) or parameter.shape[0] > _EXPERTS


@dataclass(frozen=True)
class Formats:
    """The formats of the all-gathers and reduces of one group. ``encoded``: which of its tensors are encoded."""

    layout: Layout
    encoded: tuple[bool, ...]
    gather: GatherFormat | None
    reduces: tuple[ReduceFormat | None, ...]  # per axis of the mesh
    block: int
    stochastic: bool

    @classmethod
    def of(
        cls,
        layout: Layout,
        marks: Sequence[bool],
        policy: MixedPrecisionPolicy,
        mesh: Sequence[int],
        final: Sequence[Placement],
    ) -> Formats:
        """``marks``: which tensors are `chosen`; if none is, nothing is encoded.

        ``mesh``: the sizes of its axes; ``final``: the placements of reduced gradients. Along an axis on which all
        ranks need the whole sum, each rank sends all its data to every other: if the axis is too long for that, it
        keeps its all-reduce.
        """
        encoded = encodable(layout, marks)
        reduces = [None if each == "int8" and not any(encoded) else each for each in policy.reduce_formats(len(mesh))]
        for axis, (size, each) in enumerate(zip(mesh, reduces)):
            if each is not None and not is_sharded(final[axis]) and size > _MOST_AMONG[each]:
                reduces[axis] = None
        gather = None if policy.gather_format == "auto" or not any(encoded) else policy.gather_format
        return cls(layout, encoded, gather, tuple(reduces), policy.block, policy.stochastic)

    def __str__(self) -> str:
        """All-gathers / reduces, or nothing."""
        if self.gather is None and not any(self.reduces):
            return ""
        return f"{self.gather or '-'} / {', '.join(str(each or '-') for each in self.reduces)}"

    def gather_coder(self, dtype: torch.dtype) -> Coder:
        """For weights; ``dtype`` is that of unencoded tensors."""
        assert self.gather is not None
        return _coder(wire_of(self.layout, self.encoded, self.block, dtype.itemsize), self.gather, dtype)

    def reduce_coder(self, axis: int, dtype: torch.dtype) -> Coder:
        """For gradients; ``dtype`` is that of unencoded tensors."""
        encoded, with_uses = self.encoded, len(self.encoded) > 1
        if self.reduces[axis] != "int8":
            encoded, dtype = tuple(False for _ in encoded), torch.bfloat16
        return _coder(wire_of(self.layout, encoded, self.block, dtype.itemsize, with_uses), "int8", dtype)


@lru_cache(maxsize=1024)
def _coder(wire: Wire, code: Code, dtype: torch.dtype) -> Coder:
    """One coder for all equal groups, because it has tables on the device."""
    from flatshard.buffer.blocks import Coder  # imports Triton, which takes longer than all of flatshard

    return Coder(wire, code, dtype)
