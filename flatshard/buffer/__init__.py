"""Flat local tensors on a mesh, and the only code that calls collectives."""

# mypy: implicit-reexport
# ruff: noqa: F401

from flatshard.buffer.collectives import CoalescedGather, Op
from flatshard.buffer.control_plane import Exchange, broadcast, from_first
from flatshard.buffer.dbuffer import DBuffer, turns
from flatshard.buffer.groups import destroy_unused_within
from flatshard.buffer.lanes import Lane, record_replay, watch_over
from flatshard.buffer.pools import Pool
from flatshard.buffer.tickets import DONE, Ticket
