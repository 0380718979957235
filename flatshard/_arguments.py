"""Checks of what users pass, in the words that all public functions have for it."""

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
    """The items of a list of modules. One that stands alone is a mistake, and would be looked through item by item."""
    if isinstance(given, (nn.Module, str)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{function} takes a list of modules, not one {type(given).__name__}")
    return list(given)


def optimizer(given: Any) -> None:
    """TypeError unless ``given`` is an optimizer, or None."""
    if given is not None and not isinstance(given, Optimizer):
        raise TypeError(f"optimizer={given!r}: must be a torch.optim.Optimizer")


def flag(name: str, given: Any) -> bool:
    """``given``, if it is true or false: text, which counts as true whatever it says, is not."""
    if isinstance(given, str) or given not in (0, 1):
        raise TypeError(f"{name}={given!r}: must be True or False")
    return bool(given)


def whole_number(name: str, given: Any, least: int) -> int:
    """``given``, if it is a whole number of at least ``least``."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name}={given!r}: must be a whole number")
    if given < least:
        raise ValueError(f"{name}={given!r}: must be at least {least}")
    return given


def real(name: str, given: Any) -> float:
    """``given`` as a number, which infinity is too; a tensor of one element can be."""
    if isinstance(given, str):
        raise TypeError(f"{name}={given!r}: must be a number")
    try:
        found = float(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={given!r}: must be a number") from error
    if math.isnan(found):
        raise ValueError(f"{name}={given!r}: must be a number")
    return found


def path(name: str, given: Any) -> Path:
    """``given`` as a path."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name}={given!r}: must be a path")
    return Path(given)
