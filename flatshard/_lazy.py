"""Names of a package that are imported when they are first used: importing torch takes seconds, `--help` none."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def attach(package: str, modules: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``: of what it imports for type checkers, and of these modules in it.

    What it imports so stands in its source, under ``if TYPE_CHECKING:``, and nowhere else.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    home = {each.name: node.module for node in imports if isinstance(node, ast.ImportFrom) for each in node.names}
    home |= dict.fromkeys(modules, package)

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(str(home[name])), name)
        setattr(sys.modules[package], name, value)  # next time it is found without asking
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})
