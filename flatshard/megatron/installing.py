"""Putting this surface in the place of `megatron_fsdp`, for code that imports that."""

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

_found: dict[str, ModuleType] = {}  # modules of theirs that were imported before
_changed: list[tuple[ModuleType, str, Any, Any]] = []  # where a name was taken out of them, and for what


def install() -> None:
    """Let ``import megatron_fsdp``, and Megatron-Core's copy of it, give this surface, modules below included.

    Nothing of Megatron-Core is imported for it. What has been imported already, of either, is changed: names that
    modules have taken out of them become ours. Models that were built before stay what they are. Megatron-Core's
    `mcore_fsdp_adapter` is its own where it is installed, and shards with this surface. `uninstall` undoes it.
    """
    if _FINDER in sys.meta_path:
        return
    theirs = (name for name in sys.modules if name != _ADAPTER and _ours(name) is not None)
    _found.update({name: sys.modules[name] for name in theirs})
    ours = {id(one): own for one, own in _pairs()}
    for title, module in list(sys.modules.items()):
        if title in _found or title == _OURS or title.startswith(f"{_OURS}.") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                _changed.append((module, name, value, ours[id(value)]))
                setattr(module, name, ours[id(value)])
    for title in _found:  # a module of theirs that is not here must not be mixed with ours
        del sys.modules[title]
    sys.meta_path.insert(0, _FINDER)
    sys.meta_path.append(_PARENTS)
    _log.info("flatshard.megatron stands in for %s", " and ".join(_NAMES))


def uninstall() -> None:
    """Undo `install`: imports give what they gave. Names that modules have imported meanwhile stay ours."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    sys.meta_path.remove(_PARENTS)
    while _changed:
        module, name, theirs, ours = _changed.pop()
        if vars(module).get(name) is ours:
            setattr(module, name, theirs)
    for title in [each for each in sys.modules if _ours(each) or _NAMES[1].startswith(f"{each}.")]:
        module = sys.modules[title]
        if module.__name__ == _ours(title) or getattr(module.__spec__, "loader", None) is _PARENTS:
            del sys.modules[title]
            parent, _, child = title.rpartition(".")
            above = sys.modules.get(parent)
            if above is not None and not above.__name__.startswith(_OURS) and vars(above).get(child) is module:
                delattr(above, child)
    sys.modules.update(_found)
    _found.clear()


def _ours(title: str) -> str | None:
    """The name of our module in the place of one of theirs; None where that is none of `megatron_fsdp`'s."""
    if title == _ADAPTER:
        return f"{_OURS}.mcore_fsdp_adapter"
    for name in _NAMES:
        if title == name or title.startswith(f"{name}."):
            return title.replace(name, _OURS, 1)
    return None


def _pairs() -> Iterator[tuple[Any, Any]]:
    """Modules, classes and functions of theirs that were imported, each with ours of the same name and module."""
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
    """Gives our modules by their names."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        own = None if fullname == _ADAPTER else _ours(fullname)
        known = own is not None and importlib.util.find_spec(own) is not None
        return importlib.util.spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_ours(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # that of its own name, which importing it by another replaces


class _Parents(MetaPathFinder, Loader):
    """Gives what lies above Megatron-Core's copy where nobody else does: empty packages, and our own adapter."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == _ADAPTER:
            return importlib.util.spec_from_loader(fullname, _FINDER)
        above = _NAMES[1].startswith(f"{fullname}.")
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if above else None

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


_FINDER, _PARENTS = _Finder(), _Parents()
