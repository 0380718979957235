"""The offsets of tensors in flat buffers. Pure integers: no process group, no device."""

# mypy: implicit-reexport
# ruff: noqa: F401

from flatshard.layout.placement import (
    Block,
    Flat,
    Partial,
    Placement,
    Replicate,
    Transition,
    Whole,
    is_sharded,
    transition,
)
from flatshard.layout.planner import Layout, Parts, Segment, Slot, least_padded_dim, plan
from flatshard.layout.ranges import Holding, Range, holding, local_ranges
from flatshard.layout.wire import Wire, encodable, wire_of
