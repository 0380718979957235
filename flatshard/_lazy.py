"""Names of a package that are imported when they are first used: importing torch takes seconds, `--help` none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``. ``homes``: a module within it, and the names to take from it.

    A module without names is one itself.
    """
    home = {name: module for module, names in homes.items() for name in names}
    modules = {module for module, names in homes.items() if not names}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # next time it is found without asking
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home, *modules})
