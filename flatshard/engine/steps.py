"""The number of optimizer steps in this process.

Fused optimizers do not increment version counters, so only this number shows that main weights have changed.
"""

from __future__ import annotations


class _Steps:
    taken = 0
    is_new = False  # one has been taken since they were counted


_steps = _Steps()


def note() -> None:
    """An optimizer steps. A compiled step can do this, too: it stores a constant and reads nothing."""
    _steps.is_new = True


def taken() -> int:
    """A number that changes with every step."""
    if _steps.is_new:
        _steps.is_new = False
        _steps.taken += 1
    return _steps.taken
