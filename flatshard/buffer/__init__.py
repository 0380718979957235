"""Flat local tensors on a mesh, and the only code that communicates."""

from flatshard.buffer.dbuffer import DBuffer, turns
from flatshard.buffer.lanes import Exchange, Lane, Operation, Ticket, from_first, spread, watch_over
from flatshard.buffer.planned import Planner, PoolStatistics
from flatshard.buffer.pools import Pool

__all__ = [
    "DBuffer",
    "Exchange",
    "Lane",
    "Operation",
    "Planner",
    "Pool",
    "PoolStatistics",
    "Ticket",
    "from_first",
    "spread",
    "turns",
    "watch_over",
]
