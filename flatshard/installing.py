"""`install`: programs that import PyTorch's `fully_shard` run on this one.

The public names of `torch.distributed.fsdp`, wherever torch exports them and whoever has imported them already, become
flatshard's. Names that only torch's own FSDP2 has (its param groups, for example) stay torch's: `FSDPMeshInfo` and
`ShardPlacementResult` are understood here.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from typing import Any

from flatshard import _torch, hf
from flatshard.api import fully_shard, installed
from flatshard.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from flatshard.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

_log = logging.getLogger("flatshard")
_OURS: dict[str, Any] = {
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "DataParallelMeshDims": DataParallelMeshDims,
    "FSDPModule": FSDPModule,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_changed: list[tuple[types.ModuleType, str, Any]] = []  # where, and what was there


def install() -> None:
    """Let `torch.distributed.fsdp.fully_shard`, and what belongs to it, be flatshard's in this process.

    Also in modules that have imported torch's already. Models that torch's has sharded stay what they are. Calling it
    again takes in what has been imported since. `uninstall` undoes it.
    """
    installed.values = "warn"  # ranks that begin with different values are no error with PyTorch's
    installed.refuses_meta = True  # nobody who wrote for PyTorch's means to train initial values
    installed.after = hf.let_trainer_save  # which may have been imported by then
    for name in _torch.FSDP_HOMES:
        importlib.import_module(name)
    theirs = {id(value): _OURS[name] for name, value in _torch.FSDP_NAMES.items() if name in _OURS}
    count = len(_changed)
    for title, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not _is_internal(title):
            _rebind(module, theirs)
    modules = len({module.__name__ for module, _, _ in _changed[count:]})
    _log.info("torch.distributed.fsdp is flatshard's now, in %d modules", modules)


def uninstall() -> None:
    """Undo `install`. Models that have been sharded meanwhile stay flatshard's, and so do names imported meanwhile:

    of a module that has come since, nothing tells whether it asked torch or flatshard for them.
    """
    installed.values, installed.refuses_meta, installed.after = "same", False, lambda: None
    hf.undo_let_trainer_save()
    while _changed:
        module, name, value = _changed.pop()
        if vars(module).get(name) is _OURS.get(_name_of(value)):
            setattr(module, name, value)


def _is_internal(title: str) -> bool:
    """Our own modules, and those by which torch implements its FSDP2."""
    if title == "flatshard" or title.startswith("flatshard."):
        return True
    return title not in _torch.FSDP_HOMES and title.startswith(_torch.FSDP_INTERNALS)


def _rebind(module: types.ModuleType, theirs: dict[int, Any]) -> None:
    for name, value in list(vars(module).items()):
        ours = theirs.get(id(value))
        if ours is not None and not (isinstance(value, type) and module.__name__ == _torch.FSDP_BODY):
            _changed.append((module, name, value))
            setattr(module, name, ours)


def _name_of(value: Any) -> str:
    return next(name for name, theirs in _torch.FSDP_NAMES.items() if theirs is value)
