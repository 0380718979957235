"""Checks of arguments, with the same error texts in all public functions."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer


def module(function: str, given: Any) -> None:
    """TypeError unless ``given`` is a module."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"{function} takes a module, not {type(given).__name__}")


def modules(function: str, given: Any) -> list[Any]:
    """``given`` as a list; TypeError for a single module, also for one that can be iterated, such as a ModuleList."""
    if isinstance(given, (nn.Module, str)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{function} takes a list of modules, not {type(given).__name__}; put one module into a list")
    return list(given)


def optimizer(given: Any) -> None:
    """TypeError unless ``given`` is an optimizer or None."""
    if given is not None and not isinstance(given, Optimizer):
        raise TypeError(f"optimizer={given!r}: must be a torch.optim.Optimizer")


def flag(name: str, given: Any) -> bool:
    """``given`` as a bool; TypeError unless it is True, False, 0 or 1."""
    if isinstance(given, str) or given not in (0, 1):
        raise TypeError(f"{name}={given!r}: must be True or False")
    return bool(given)


def whole_number(name: str, given: Any, least: int) -> int:
    """``given``; TypeError unless it is an integer, ValueError unless it is at least ``least``."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name}={given!r}: must be an integer")
    if given < least:
        raise ValueError(f"{name}={given!r}: must be at least {least}")
    return given


def real(name: str, given: Any) -> float:
    """``given`` (a number, infinity, a tensor of one element) as a float; TypeError for others, ValueError for NaN."""
    if isinstance(given, str):
        raise TypeError(f"{name}={given!r}: must be a number")
    try:
        found = float(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={given!r}: must be a number") from error
    if math.isnan(found):
        raise ValueError(f"{name}={given!r}: must not be NaN")
    return found


def path(name: str, given: Any) -> Path:
    """``given`` as a path; TypeError unless it is a string or an ``os.PathLike``."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name}={given!r}: must be a path (str or os.PathLike)")
    return Path(given)
