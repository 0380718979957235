"""Where tensors lie in a flat buffer. Pure integers: no process group, no device."""

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
from flatshard.layout.planner import Layout, Segment, Slot, least_padded_dim, plan
from flatshard.layout.ranges import Holding, Range, holding, local_ranges, rectangles
from flatshard.layout.wire import Wire, encodable, wire_of

__all__ = [
    "Block",
    "Flat",
    "Holding",
    "Layout",
    "Partial",
    "Placement",
    "Range",
    "Replicate",
    "Segment",
    "Slot",
    "Transition",
    "Whole",
    "Wire",
    "encodable",
    "holding",
    "is_sharded",
    "least_padded_dim",
    "local_ranges",
    "plan",
    "rectangles",
    "transition",
    "wire_of",
]
