"""`install`: run programs that import PyTorch's `fully_shard` with flatshard instead.

The public FSDP2 names of `torch.distributed.fsdp` are replaced by flatshard's, in every module of torch that exports
them and in every module that has imported them. Names without a counterpart stay torch's; flatshard accepts
`FSDPMeshInfo` and `ShardPlacementResult`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from typing import Any

from flatshard import _torch, hf
from flatshard.api import fully_shard, installed
from flatshard.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from flatshard.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

_log = logging.getLogger("flatshard")
_POLICIES = CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
_FUNCTIONS = fully_shard, register_fsdp_forward_method, share_comm_ctx
_CLASSES = FSDPModule, GradientReductionHandle, UnshardHandle
_OURS: dict[str, Any] = {ours.__name__: ours for ours in (*_CLASSES, *_POLICIES, *_FUNCTIONS)}
_changed: list[tuple[types.ModuleType, str, Any, Any]] = []  # module, name, their value, our value


def install() -> None:
    """Replace `torch.distributed.fsdp.fully_shard` and its related names by flatshard's in this process.

    This includes modules that have imported torch's names already; call it again for modules that were imported since.
    Models that torch has sharded do not change. `uninstall` undoes it.
    """
    installed.values = "warn"  # FSDP2 accepts ranks with different values
    installed.refuses_meta = True  # programs for FSDP2 load or initialise meta models themselves
    installed.after = hf.let_trainer_save  # after each unit, because the Trainer may be imported later
    for name in _torch.FSDP_HOMES:
        importlib.import_module(name)
    theirs = {id(value): _OURS[name] for name, value in _torch.FSDP_NAMES.items() if name in _OURS}
    count = len(_changed)
    for title, module in list(sys.modules.items()):
        known = vars(module) if isinstance(module, types.ModuleType) and not _is_internal(title) else {}
        for name, value in [(name, value) for name, value in known.items() if id(value) in theirs]:
            if not isinstance(value, type) or module.__name__ != _torch.FSDP_BODY:
                _changed.append((module, name, value, theirs[id(value)]))
                setattr(module, name, theirs[id(value)])
    modules = len({module.__name__ for module, *_ in _changed[count:]})
    _log.info("install: replaced the names of torch.distributed.fsdp in %d modules", modules)


def uninstall() -> None:
    """Undo `install`. Models that were sharded since do not change.

    Modules that were imported since keep flatshard's names: they may have imported them from flatshard itself.
    """
    installed.values, installed.refuses_meta, installed.after = "same", False, lambda: None
    hf.undo_let_trainer_save()
    while _changed:
        module, name, theirs, ours = _changed.pop()
        if vars(module).get(name) is ours:
            setattr(module, name, theirs)


def _is_internal(title: str) -> bool:
    """Whether a module is flatshard's, or part of torch's implementation of FSDP2."""
    if title == "flatshard" or title.startswith("flatshard."):
        return True
    return title not in _torch.FSDP_HOMES and title.startswith(_torch.FSDP_INTERNALS)
