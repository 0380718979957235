"""Names of a package that are imported at their first use, so that `flatshard --help` does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``. ``homes``: submodules, and the names to import from each.

    A submodule with no names is an attribute itself.
    """
    home = {name: module for module, names in homes.items() for name in names}
    modules = {module for module, names in homes.items() if not names}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access does not call this
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home, *modules})
