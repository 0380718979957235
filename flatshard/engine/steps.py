"""How many steps optimizers of this process have taken.

Fused ones bump no version counter, so nothing else tells that main weights have changed.
"""

_taken = 0


def note() -> None:
    """An optimizer steps."""
    global _taken
    _taken += 1


def taken() -> int:
    return _taken
