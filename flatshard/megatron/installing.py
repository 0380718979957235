"""Putting this surface in the place of `megatron_fsdp`, for code that imports that."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
from types import ModuleType

_log = logging.getLogger("flatshard")

_OURS = "flatshard.megatron"
_CORE = "megatron.core.distributed.fsdp"
_NAMES = ("megatron_fsdp", f"{_CORE}.src.megatron_fsdp")
_ADAPTER = f"{_CORE}.mcore_fsdp_adapter"

_before: dict[str, ModuleType | None] | None = None  # what was in sys.modules under our names


def install() -> None:
    """Let ``import megatron_fsdp``, and Megatron-Core's copy of it, give this surface, modules below included.

    Also where the real ones are installed, or imported already; what others have taken out of them stays as it is.
    Megatron-Core's `mcore_fsdp_adapter` is its own where it is installed. `uninstall` undoes it.
    """
    global _before
    if _before is not None:
        return
    _before = {}
    modules = {"": importlib.import_module(_OURS)}
    for found in pkgutil.walk_packages(modules[""].__path__, f"{_OURS}."):
        modules[found.name.removeprefix(_OURS)] = importlib.import_module(found.name)
    has_core = _importable(_CORE)
    for name in _NAMES:
        known = [each for each in sys.modules if each == name or each.startswith(f"{name}.")]
        for each in known:  # a module of theirs that is not here must not be mixed with ours
            _remember(each)
            del sys.modules[each]
        for below, module in modules.items():
            _put(name + below, module)
    if not has_core:
        _put(_ADAPTER, modules[".mcore_fsdp_adapter"])
        _make_parents(_NAMES[1])
    _log.info("flatshard.megatron stands in for %s", " and ".join(_NAMES))


def uninstall() -> None:
    """Undo `install`: modules are again what they were."""
    global _before
    for name, module in (_before or {}).items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    for name in _before or {}:  # and packages show what they showed
        parent, _, child = name.rpartition(".")
        above = sys.modules.get(parent)
        if above is not None and not above.__name__.startswith(_OURS):
            module = sys.modules.get(name)
            if module is not None:
                setattr(above, child, module)
            elif child in vars(above):
                delattr(above, child)
    _before = None


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # looking for it imports what is above it, which may fail in any way, and is then of no use
        return False


def _remember(name: str) -> None:
    assert _before is not None
    _before.setdefault(name, sys.modules.get(name))


def _put(name: str, module: ModuleType) -> None:
    _remember(name)
    sys.modules[name] = module


def _make_parents(name: str) -> None:
    """Empty packages above a module, so that it can be imported by its dotted name."""
    child = sys.modules[name]
    while "." in name:
        name, _, last = name.rpartition(".")
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = []
            _put(name, package)
        setattr(sys.modules[name], last, child)
        child = sys.modules[name]
    setattr(sys.modules[_CORE], "mcore_fsdp_adapter", sys.modules[_ADAPTER])  # noqa: B010
