"""Sizes in bytes: as text, from text, and of this process."""

from __future__ import annotations

import sys

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def format_bytes(size: float, binary: bool = False) -> str:
    """``size`` with two decimals in kB, MB or GB, or in KiB, MiB or GiB if ``binary``. Fewer bytes are counted."""
    base, units = (1024, ("KiB", "MiB", "GiB")) if binary else (1000, ("kB", "MB", "GB"))
    for power in (3, 2, 1):
        if size >= base**power:
            return f"{size / base**power:.2f} {units[power - 1]}"
    return f"{size:.0f} B"


def parse_bytes(text: str, default: str = "") -> int | None:
    """The bytes in a number with one of `UNITS`, in any case, or else with ``default``; None if it is not a size."""
    text = text.strip().lower()
    unit = next((unit for unit in UNITS if text.endswith(unit.lower())), "")
    try:
        size = float(text.removesuffix(unit.lower())) * UNITS.get(unit or default, 1)
    except ValueError:
        return None
    return int(size) if 0 <= size < float("inf") else None


def peak_resident_bytes() -> int:
    """The most memory that this process has had so far."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
