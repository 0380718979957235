"""Ranks as `accelerate launch` starts them, with flatshard installed or PyTorch's FSDP2 as it is."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import flatshard
from flatshard.engine.units.unit import unit_of

WAYS = ("ours", "theirs")


@contextlib.contextmanager
def launched(rank, world, port, way):
    """Accelerate does not shard on CPUs, so it takes them for GPUs."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    made = PartialState.__init__

    def as_gpus(self, *args, **kwargs):
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    environment = {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if way == "ours":
        flatshard.install()
    try:
        with mock.patch.dict(os.environ, environment), mock.patch.object(PartialState, "__init__", as_gpus):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        flatshard.uninstall()


def is_ours(model):
    return isinstance(model, flatshard.FSDPModule)


def in_host_memory(model):
    """Whether the groups of the model have their main weights there; both if some have."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return {group.home.host for unit in units for group in unit.groups}
