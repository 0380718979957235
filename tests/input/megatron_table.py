"""The same of the entry points of `flatshard.megatron`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatshard import megatron
from tests.input.bench import Case, tiny


def _model(**kwargs: Any) -> Any:
    return lambda b: megatron.fully_shard_model(b.plain, **kwargs)


def _wrapped() -> megatron.MegatronFSDP:
    return megatron.fully_shard_model(tiny(), fsdp_unit_modules=[nn.Sequential])


MEGATRON: dict[str, list[Case]] = {
    "megatron.fully_shard_model": [
        Case("no module", lambda b: megatron.fully_shard_model("model"), TypeError, "str"),
        Case("a sharded one", lambda b: megatron.fully_shard_model(b.model), ValueError, "already"),
        Case("strategy: a name", _model(zero_dp_strategy="zero3"), ValueError, "must be one of"),
        Case("strategy: a number", _model(zero_dp_strategy=7), ValueError, "must be one of"),
        Case("outer: no axis", _model(outer_dp_sharding_strategy="optim"), ValueError, "needs dp_outer_dim"),
        Case("outer: no mesh", _model(dp_outer_dim="outer"), ValueError, "need a device_mesh"),
        Case("mesh: text", _model(device_mesh="dp", dp_shard_dim="dp"), TypeError, "device_mesh='dp'"),
        Case(
            "mesh: no such axis",
            lambda b: megatron.fully_shard_model(b.plain, b.mesh, dp_shard_dim="x"),
            ValueError,
            "no axis 'x'",
        ),
        Case(
            "mesh: no axis named",
            lambda b: megatron.fully_shard_model(b.plain, b.meshes(2)),
            ValueError,
            "name the axis",
        ),
        Case("units: no such class", _model(fsdp_unit_modules=["no.Such"]), ValueError, "cannot import"),
        Case("units: text", _model(fsdp_unit_modules="Linear"), ValueError, "a list of classes"),
        Case("device: another", _model(device=torch.device("cuda")), ValueError, "the mesh is on cpu"),
        Case("precision: a dtype", _model(mixed_precision_policy=torch.half), TypeError, "MixedPrecisionPolicy"),
        Case("layout", _model(layout="dense"), ValueError, "dense"),
    ],
    "megatron.fully_shard_optimizer": [
        Case("no optimizer", lambda b: megatron.fully_shard_optimizer("adam"), TypeError, "not str"),
        Case(
            "of another model", lambda b: megatron.fully_shard_optimizer(b.optimizer), ValueError, "fully_shard_model"
        ),
    ],
    "megatron.fully_shard": [
        Case("no optimizer", lambda b: megatron.fully_shard(b.plain, "adam"), TypeError, "not str"),
        Case("an unknown name", lambda b: megatron.fully_shard(b.plain, b.optimizer, zero=3), TypeError, "zero"),
    ],
    "megatron.MegatronFSDP": [
        Case("no module", lambda b: megatron.MegatronFSDP("model"), TypeError, ""),
        Case("precision: text", lambda b: _wrapped().reset_mixed_precision_policy("half"), TypeError, "MixedPrecision"),
        Case("factor: text", lambda b: _wrapped().scale_gradients("2"), TypeError, "scaling_factor='2'"),
    ],
    "megatron.FullyShardedDataParallel": [
        Case("no config", lambda b: megatron.FullyShardedDataParallel(None, "x", b.plain), TypeError, "Config"),
    ],
    "megatron.DistributedOptimizer": [
        Case(
            "no optimizer",
            lambda b: megatron.DistributedOptimizer("adam", None, [b.plain]),
            (TypeError, ValueError),
            "str",
        ),
    ],
    "megatron.DistributedDataParallelConfig": [
        Case("an unknown field", lambda b: megatron.DistributedDataParallelConfig(zero=3), TypeError, "zero"),
    ],
    "megatron.FSDPDistributedIndex": [
        Case("no axis", lambda b: megatron.FSDPDistributedIndex(b.meshes(2), None), ValueError, "name the axis"),
        Case("no such axis", lambda b: megatron.FSDPDistributedIndex(b.mesh, "x"), ValueError, "no axis 'x'"),
        Case("no mesh", lambda b: megatron.FSDPDistributedIndex("mesh", "x"), TypeError, "DeviceMesh"),
        Case(
            "no group of all",
            lambda b: megatron.FSDPDistributedIndex(b.meshes(2), "b", "a").get_dp_group(),
            ValueError,
            "hybrid_fsdp_group",
        ),
    ],
    "megatron.MixedPrecisionPolicy": [
        Case("text", lambda b: megatron.MixedPrecisionPolicy("bf16"), TypeError, "bf16"),
    ],
    "megatron.fsdp_no_shard": [
        Case("text", lambda b: megatron.fsdp_no_shard("head"), TypeError, "str"),
        Case("a sharded one", lambda b: megatron.fsdp_no_shard(b.model), ValueError, "before fully_shard"),
    ],
    "megatron.install": [Case("twice", lambda b: (megatron.install(), megatron.install(), megatron.uninstall()), None)],
    "megatron.uninstall": [Case("what is not installed", lambda b: megatron.uninstall(), None)],
}
