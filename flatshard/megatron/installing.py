"""`install`: programs that import `megatron_fsdp` get this package."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_log = logging.getLogger("flatshard")

_OURS = "flatshard.megatron"
_CORE = "megatron.core.distributed.fsdp"
_NAMES = ("megatron_fsdp", f"{_CORE}.src.megatron_fsdp")
_ADAPTER = f"{_CORE}.mcore_fsdp_adapter"

_found: dict[str, ModuleType] = {}  # their modules that were imported before
_changed: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, their value, our value


def install() -> None:
    """Let imports of ``megatron_fsdp``, and of Megatron-Core's copy of it, give this package and its modules.

    Megatron-Core is not imported for that. In modules that have imported names of either already, these names become
    ours. Models that were built before do not change. If Megatron-Core is installed, its `mcore_fsdp_adapter` is used,
    and shards with this package. `uninstall` undoes it.
    """
    if _FIRST in sys.meta_path:
        return
    _found.update({name: module for name, module in sys.modules.items() if name != _ADAPTER and _ours(name)})
    ours = {id(one): own for one, own in _pairs()}
    for title, module in list(sys.modules.items()):
        if title in _found or title == _OURS or title.startswith(f"{_OURS}.") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                _changed.append((module, name, value, ours[id(value)]))
                setattr(module, name, ours[id(value)])
    for title in _found:  # modules of theirs that we do not have must not be mixed with ours
        del sys.modules[title]
    sys.meta_path.insert(0, _FIRST)
    sys.meta_path.append(_LAST)
    _log.info("flatshard.megatron replaces %s", " and ".join(_NAMES))


def uninstall() -> None:
    """Undo `install`. Names that modules have imported since `install` remain ours."""
    if _FIRST not in sys.meta_path:
        return
    sys.meta_path.remove(_FIRST)
    sys.meta_path.remove(_LAST)
    while _changed:
        module, name, theirs, ours = _changed.pop()
        if vars(module).get(name) is ours:
            setattr(module, name, theirs)
    for title in [each for each in sys.modules if _ours(each) or _NAMES[1].startswith(f"{each}.")]:
        module = sys.modules[title]
        if module.__name__ == _ours(title) or getattr(module.__spec__, "loader", None) is _LAST:
            del sys.modules[title]
            parent, _, child = title.rpartition(".")
            above = sys.modules.get(parent)
            if above is not None and not above.__name__.startswith(_OURS) and vars(above).get(child) is module:
                delattr(above, child)
    sys.modules.update(_found)
    _found.clear()


def _ours(title: str) -> str | None:
    """The name of our module for a module name of theirs; None for names that are not `megatron_fsdp`'s."""
    if title == _ADAPTER:
        return f"{_OURS}.mcore_fsdp_adapter"
    for name in _NAMES:
        if title == name or title.startswith(f"{name}."):
            return title.replace(name, _OURS, 1)
    return None


def _pairs() -> Iterator[tuple[Any, Any]]:
    """Their modules, classes and functions that were imported, each with ours of the same name."""
    for title, module in _found.items():
        own = _ours(title)
        if own is None or importlib.util.find_spec(own) is None:
            continue
        ours = importlib.import_module(own)
        yield module, ours
        for name, value in vars(module).items():
            if isinstance(value, (type, FunctionType)) and value.__module__ in _found and hasattr(ours, name):
                yield value, getattr(ours, name)


class _Finder(MetaPathFinder, Loader):
    """Finds our module for a name of theirs.

    The finder at the end of ``sys.meta_path`` (``is_last``) finds what no other finder has found: our adapter, and the
    packages above Megatron-Core's copy, which are empty.
    """

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        own = _ours(fullname) if (fullname == _ADAPTER) == self.is_last else None
        if own is not None and importlib.util.find_spec(own) is not None:
            return importlib.util.spec_from_loader(fullname, self)
        is_above = self.is_last and _NAMES[1].startswith(f"{fullname}.")
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if is_above else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        own = _ours(spec.name)
        module = None if own is None else importlib.import_module(own)
        spec.loader_state = None if module is None else module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of a module of ours, which importing it by another name has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state or module.__spec__


_FIRST, _LAST = _Finder(is_last=False), _Finder(is_last=True)
