"""The offsets of tensors in flat buffers. Pure integers: no process group, no device."""

# mypy: implicit-reexport
# ruff: noqa: F401

from flatshard.layout.placement import Flat, Holding, Partial, Placement, Replicate, holding, is_sharded
from flatshard.layout.planner import Layout, Parts, Segment, Slot, least_padded_dim, plan
from flatshard.layout.wire import Wire, encodable, wire_of
