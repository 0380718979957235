"""Which parameters travel in one byte, and how a group of them does: chosen once, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from flatshard.buffer.blocks import Code, Coder
from flatshard.engine.parameters import Site
from flatshard.layout import Layout, Wire, encodable, wire_of
from flatshard.policy import GatherFormat, MixedPrecisionPolicy, ReduceFormat

_SMALL = 1 << 16  # elements; encoding less saves no time that a launch would notice
# Last parts of the names of modules that turn hidden states into scores: an error there is an error of the result.
_HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "score", "classifier", "proj_out"})
_ROUTERS = frozenset({"router", "gate"})
_EXPERTS = 1024  # a router has a row for each; what is called so and has more is a part of a feed-forward layer


def chosen(name: str, parameter: torch.Tensor, sites: Sequence[Site], policy: MixedPrecisionPolicy) -> bool:
    """Whether a parameter is to travel in one byte where its group has such a format.

    What has no rows of numbers to share a scale never does. ``name`` is from the unit down. A layer that is a unit by
    itself, and so has no name there, counts as a head: else it would be in a block.
    """
    if not parameter.dtype.is_floating_point or parameter.dim() < 2 or not parameter.numel():
        return False
    if policy.encodes is not None:
        assert isinstance(parameter, nn.Parameter)
        return bool(policy.encodes(name, parameter))
    modules = [module for module in (site.module() for site in sites) if module is not None]
    if parameter.numel() < _SMALL or any("Embedding" in type(module).__name__ for module in modules):
        return False
    path = name.split(".")[:-1]
    if not path:
        return not any(isinstance(module, nn.Linear) for module in modules)
    last = path[-1].lower()
    return last not in _HEADS and not (last in _ROUTERS and parameter.shape[0] <= _EXPERTS)


@dataclass(frozen=True)
class Formats:
    """How the gathers and reduces of one group travel. ``encoded``: which of its tensors do in one byte."""

    layout: Layout
    encoded: tuple[bool, ...]
    gather: GatherFormat | None
    reduces: tuple[ReduceFormat | None, ...]  # per axis of the mesh
    block: int
    stochastic: bool

    @classmethod
    def of(cls, layout: Layout, marks: Sequence[bool], policy: MixedPrecisionPolicy, axes: int) -> Formats:
        """``marks``: which tensors are `chosen`. Where none is, all stay as they are."""
        encoded = encodable(layout, marks)
        gather, reduces = policy.gather_format, policy.reduce_formats(axes)
        if not any(encoded):
            gather, reduces = None, tuple(None if each == "int8" else each for each in reduces)
        return cls(layout, encoded, gather, reduces, policy.block, policy.stochastic)

    def __str__(self) -> str:
        """Gathers / reduces, or nothing."""
        if self.gather is None and not any(self.reduces):
            return ""
        return f"{self.gather or '-'} / {', '.join(str(each or '-') for each in self.reduces)}"

    def gather_coder(self, dtype: torch.dtype) -> Coder:
        """For weights; ``dtype`` is of those that stay as they are."""
        assert self.gather is not None
        return _coder(wire_of(self.layout, self.encoded, self.block, dtype.itemsize), self.gather, dtype)

    def reduce_coder(self, axis: int, dtype: torch.dtype) -> Coder:
        """For gradients; ``dtype`` is of those that stay as they are."""
        if self.reduces[axis] == "int8":
            return _coder(wire_of(self.layout, self.encoded, self.block, dtype.itemsize), "int8", dtype)
        none = tuple(False for _ in self.encoded)
        return _coder(wire_of(self.layout, none, self.block, torch.bfloat16.itemsize), "int8", torch.bfloat16)


@lru_cache(maxsize=1024)
def _coder(wire: Wire, code: Code, dtype: torch.dtype) -> Coder:
    """One for all groups that are alike: it has tables on the device."""
    return Coder(wire, code, dtype)
