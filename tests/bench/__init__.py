"""Runs a function on real rank processes: see `pool.RankPool`, and the `ranks` fixture of the tests."""

from .pool import RankError, RankPool

__all__ = ["RankError", "RankPool"]
