"""Bad input of every public function and method, and how it is refused. `test_bad_input.py` tries each."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import flatshard
from flatshard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    Experts,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    Sharding,
    checkpoint,
    fully_shard,
    layout,
)
from flatshard.checkpoint import CheckpointError, StoredAs
from flatshard.experimental import WirePolicy
from tests.input.bench import ROWS, Bench, Case, loss_of, tiny


def _entered(context: Any) -> None:
    with context:
        pass


def _sharded(**choices: Any) -> Any:
    return lambda b: fully_shard(b.plain, **choices)


class Turned(nn.Module):
    """A parameter in the place of another that cannot be sharded."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = parameter


def _kept(model: nn.Module, call: Any) -> None:
    """A call that raises, on a model of its own, which is as it was afterwards."""
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    try:
        call(model)
    finally:
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        for name, (parameter, value) in before.items():
            assert after[name] is parameter, f"{name} is another parameter"
            assert after[name].shape == value.shape, f"{name} is empty"
            assert torch.equal(after[name].detach(), value), f"{name} has other values"
        assert [type(module) for module in model.modules()] == kinds, "the class is another"
        assert [len(module._forward_hooks) for module in model.modules()] == hooks, "there are hooks"


def _complex() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


def _strided() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3).t())


SHARDING = {
    "fully_shard": [
        Case("no module", lambda b: fully_shard("model"), TypeError, "a module or a list of modules, not str"),
        Case("none", lambda b: fully_shard(None), TypeError, "NoneType"),
        Case("an empty list", lambda b: fully_shard([]), ValueError, "empty list"),
        Case("a parameter", lambda b: fully_shard([b.plain, b.plain.head.weight]), TypeError, "Parameter"),
        Case(
            "a module inside another",
            lambda b: fully_shard([b.plain, b.plain.head]),
            ValueError,
            "one that it contains",
        ),
        Case("a module twice", lambda b: fully_shard([b.plain.head, b.plain.head]), ValueError, "twice"),
        Case("a container", lambda b: fully_shard(b.plain.blocks), ValueError, "ModuleList is never called"),
        Case("a second call", lambda b: fully_shard(b.model), ValueError, "already called on this FSDPTiny"),
        Case("a second call on a part", lambda b: fully_shard([b.plain, b.block]), ValueError, "already called"),
        Case("mesh: text", _sharded(mesh="dp"), TypeError, "mesh='dp': must be a DeviceMesh"),
        Case("mesh: a process group", lambda b: fully_shard(b.plain, mesh=dist.group.WORLD), TypeError, "DeviceMesh"),
        Case("mesh: three axes", lambda b: fully_shard(b.plain, mesh=b.meshes(3)), ValueError, "3 axes"),
        Case("data_mesh: a number", _sharded(data_mesh=2), TypeError, "data_mesh=2: must be a DeviceMesh"),
        Case("reshard: text", _sharded(reshard_after_forward="never"), ValueError, "'never'"),
        Case("reshard: no divisor", _sharded(reshard_after_forward=3), ValueError, "factor of 1, not 3"),
        Case("reshard: zero", _sharded(reshard_after_forward=0), ValueError, "not 0"),
        Case("reshard: a fraction", _sharded(reshard_after_forward=0.5), ValueError, "0.5"),
        Case("shard_placement_fn: no function", _sharded(shard_placement_fn=Shard(0)), TypeError, "function"),
        Case("shard_placement_fn: Replicate", _sharded(shard_placement_fn=lambda p: Replicate()), ValueError, "weight"),
        Case("shard_placement_fn: text", _sharded(shard_placement_fn=lambda p: "0"), ValueError, "'0' for parameter"),
        Case("shard_placement_fn: no such dim", _sharded(shard_placement_fn=lambda p: Shard(7)), ValueError, "dim 7"),
        Case(
            "shard_placement_fn: a dim that flat has not",
            _sharded(shard_placement_fn=lambda p: Shard(p.dim() - 1), layout="flat"),
            ValueError,
            "cannot be sharded on dim 1 with layout='flat'",
        ),
        Case("shard_placement_fn: raises", _sharded(shard_placement_fn=lambda p: 1 / 0), ZeroDivisionError),
        Case("mp_policy: a dtype", _sharded(mp_policy=torch.bfloat16), TypeError, "mp_policy=torch.bfloat16"),
        Case("mp_policy: a dict", _sharded(mp_policy={}), TypeError, "flatshard.MixedPrecisionPolicy"),
        Case("offload_policy: True", _sharded(offload_policy=True), TypeError, "CPUOffloadPolicy"),
        Case(
            "ignored_params: names", _sharded(ignored_params={"head.weight"}), TypeError, "ignored_params.*parameters"
        ),
        Case("ignored_params: True", _sharded(ignored_params=True), TypeError, "ignored_params"),
        Case("dp_mesh_dims: text", _sharded(dp_mesh_dims="dp"), TypeError, "dp_mesh_dims.*DataParallelMeshDims"),
        Case(
            "dp_mesh_dims: no such axis",
            lambda b: fully_shard(b.plain, mesh=b.mesh, dp_mesh_dims=DataParallelMeshDims("fsdp")),
            ValueError,
            "'fsdp' not found",
        ),
        Case(
            "dp_mesh_dims: nothing to shard over",
            lambda b: fully_shard(b.plain, mesh=b.mesh, dp_mesh_dims=DataParallelMeshDims(None, "dp"), strategy=3),
            ValueError,
            "has no `shard` axis",
        ),
        Case("strategy: a name", _sharded(strategy="zero3"), ValueError, "must be one of no_shard, optim"),
        Case("strategy: a number", _sharded(strategy=4), ValueError, "0 to 3"),
        Case("strategy: a list", _sharded(strategy=["optim"]), ValueError, "must be one of"),
        Case("outer_strategy: one axis", _sharded(outer_strategy="optim"), ValueError, "two axes"),
        Case(
            "outer_strategy: not with this strategy",
            lambda b: fully_shard(b.plain, mesh=b.meshes(2), strategy="optim", outer_strategy="optim"),
            ValueError,
            "needs strategy='optim_grads_params'",
        ),
        Case(
            "strategy: placements of two axes",
            _sharded(
                strategy=Placements(
                    (layout.Replicate(), layout.Flat()),
                    (layout.Partial("avg"), layout.Flat()),
                    (layout.Replicate(), layout.Flat()),
                )
            ),
            ValueError,
            "2 axes, but the mesh has 1",
        ),
        Case("layout: a name", _sharded(layout="dense"), ValueError, "layout='dense': must be one of tensor, flat"),
        Case("layout: a list", _sharded(layout=["flat"]), ValueError, "layout"),
        Case("gradient_scale: a name", _sharded(gradient_scale="max"), ValueError, "'mean', 'sum' or a finite number"),
        Case("gradient_scale: not finite", _sharded(gradient_scale=float("nan")), ValueError, "finite"),
        Case("gradient_scale: True", _sharded(gradient_scale=True), ValueError, "finite"),
        Case("registered, no GPU", _sharded(schedule=WirePolicy(registered=True)), ValueError, "registered=True"),
        Case("peers, no GPU", _sharded(schedule=WirePolicy(peers=True)), ValueError, "peers=True"),
        Case("schedule: a dict", _sharded(schedule={"prefetch": True}), TypeError, "SchedulePolicy"),
        Case("values: text", _sharded(values="any"), ValueError, "values='any': must be one of"),
        Case("optional: text", _sharded(optional="yes"), TypeError, "optional='yes'"),
        Case(
            "a complex parameter",
            lambda b: _kept(Turned(_complex()), fully_shard),
            ValueError,
            "second.weight.*complex",
        ),
        Case(
            "a strided parameter", lambda b: _kept(Turned(_strided()), fully_shard), ValueError, "second.weight.*contig"
        ),
        Case(
            "a part that is unsharded",
            lambda b: _unsharded_part(),
            RuntimeError,
            r"unsharded; call reshard\(\)",
        ),
        Case("in a forward", lambda b: fully_shard(b.block), ValueError, "already called", "forward"),
        Case("a position", lambda b: fully_shard(b.plain, b.mesh), TypeError),
        Case("an unknown name", lambda b: fully_shard(b.plain, device="cpu"), TypeError, "device"),
    ],
    "shard_model": [
        Case("a sharded model", lambda b: flatshard.shard_model(b.model), ValueError, "already sharded"),
        Case("no model", lambda b: flatshard.shard_model([1]), TypeError, "shard_model takes a module, not list"),
        Case(
            "units: no such class",
            lambda b: flatshard.shard_model(b.plain, units=[nn.Conv2d]),
            ValueError,
            "no module of Conv2d",
        ),
        Case(
            "units: no class",
            lambda b: flatshard.shard_model(b.plain, units=[3]),
            TypeError,
            "3 is not a subclass of nn.Module",
        ),
        Case("units: text", lambda b: flatshard.shard_model(b.plain, units="blocks"), ValueError, "'auto' or a list"),
        Case(
            "units: no such path",
            lambda b: flatshard.shard_model(b.plain, units=["a.B"]),
            ValueError,
            "cannot import 'a.B'",
        ),
        Case("units: none", lambda b: flatshard.shard_model(b.plain, units=[]), ValueError, "an empty list"),
        Case("units: a number", lambda b: flatshard.shard_model(b.plain, units=4), TypeError, "units=4"),
        Case(
            "experts: text", lambda b: flatshard.shard_model(b.plain, experts="Linear"), TypeError, "flatshard.Experts"
        ),
        Case(
            "experts: no such class",
            lambda b: flatshard.shard_model(b.plain, experts=Experts([nn.Conv2d], b.mesh)),
            ValueError,
            "experts: Tiny contains no module of Conv2d",
        ),
        Case(
            "placements: no function",
            lambda b: flatshard.shard_model(b.plain, shard_placement_fn=1),
            TypeError,
            "function",
        ),
        Case(
            "optimizer: text", lambda b: flatshard.shard_model(b.plain, optimizer="adam"), TypeError, "optimizer='adam'"
        ),
        Case("choices: unknown", lambda b: flatshard.shard_model(b.plain, zero=3), TypeError, "zero"),
        Case("choices: wrong", lambda b: flatshard.shard_model(b.plain, layout="dense"), ValueError, "dense"),
        Case(
            "a parameter of the last unit",
            lambda b: _kept(_late(_complex()), lambda model: flatshard.shard_model(model, units=[nn.Sequential])),
            ValueError,
            "weight.*complex",
        ),
        Case(
            "a placement of the last unit",
            lambda b: _kept(
                tiny(),
                lambda model: flatshard.shard_model(
                    model, shard_placement_fn=lambda p: Shard(5) if p is model.head.weight else None
                ),
            ),
            ValueError,
            "dim 5",
        ),
    ],
    "no_shard": [
        Case("text", lambda b: flatshard.no_shard("head"), TypeError, "a module or a parameter, not str"),
        Case("a tensor", lambda b: flatshard.no_shard(torch.ones(2)), TypeError, "not Tensor"),
        Case("a unit", lambda b: flatshard.no_shard(b.model), ValueError, "before fully_shard"),
        Case(
            "a sharded parameter", lambda b: flatshard.no_shard(b.model.head.weight), ValueError, "before fully_shard"
        ),
    ],
    "materialize": [
        Case("no model", lambda b: flatshard.materialize("model"), TypeError, "materialize takes a module, not str"),
        Case("init_fn: no function", lambda b: flatshard.materialize(b.plain, 3), TypeError, "init_fn=3"),
        Case("seed: text", lambda b: flatshard.materialize(b.plain, seed="x"), TypeError, "seed='x'"),
        Case("nothing to do", lambda b: flatshard.materialize(b.model), None),
        Case("no way to", lambda b: flatshard.materialize(_meta()), ValueError, "cannot initialise.*init_fn"),
    ],
    "gathered": [
        Case("no module", lambda b: _entered(flatshard.gathered("model")), TypeError, "not str"),
        Case(
            "not sharded", lambda b: _entered(flatshard.gathered(b.plain)), ValueError, "is sharded; call fully_shard"
        ),
        Case(
            "written in a pass",
            lambda b: _entered(flatshard.gathered(b.model, write=True)),
            RuntimeError,
            "between a forward and its backward",
            "awaited",
        ),
        Case("a forward while written", lambda b: _forward_while_written(b), RuntimeError, r"gathered\(write=True\)"),
    ],
    "microbatch": [
        Case("no module", lambda b: _entered(flatshard.microbatch(3)), TypeError, "not int"),
        Case(
            "not sharded",
            lambda b: _entered(flatshard.microbatch(b.plain)),
            ValueError,
            "no parameter of Tiny is sharded",
        ),
        Case("a body that raises", lambda b: _raise_in(flatshard.microbatch(b.model, is_last=False)), KeyError, "mine"),
    ],
    "summary": [
        Case("no model", lambda b: flatshard.summary("model"), TypeError, "summary takes a module, not str"),
        Case("not sharded", lambda b: flatshard.summary(b.plain), None),
    ],
    "Summary": [
        Case("nothing to tell", lambda b: str(flatshard.Summary(())), None),
        Case("no rows", lambda b: flatshard.Summary(), TypeError, "rows"),
    ],
    "sync_weights": [
        Case("no model", lambda b: flatshard.sync_weights(4, print), TypeError, "sync_weights takes a module, not int"),
        Case("no target", lambda b: flatshard.sync_weights(b.model, 4), TypeError, "target=4: must be a function"),
        Case("no names", lambda b: flatshard.sync_weights(b.model, print, names="x"), TypeError, "names='x'"),
        Case("no dtype", lambda b: flatshard.sync_weights(b.model, print, dtype="x"), TypeError, "dtype='x'"),
        Case(
            "no bytes", lambda b: flatshard.sync_weights(b.model, print, bucket_bytes=0), ValueError, "bucket_bytes=0"
        ),
    ],
    "receive_weights": [
        Case("no target", lambda b: flatshard.receive_weights(4, "x"), TypeError, "target=4: must be a module"),
        Case(
            "no source", lambda b: flatshard.receive_weights(b.plain, 4), TypeError, "source=4: must be a process group"
        ),
        Case(
            "nothing there",
            lambda b: flatshard.receive_weights(b.plain, b.new(), timeout=0.01),
            TimeoutError,
            "no weights newer than version 0",
        ),
    ],
    "Synced": [
        Case("told", lambda b: str(flatshard.Synced(1, 10**9, 0.0)), None),
        Case("no bytes", lambda b: flatshard.Synced(1), TypeError, "bytes"),
    ],
    "check_buffers": [
        Case("no model", lambda b: flatshard.check_buffers(4), TypeError, "check_buffers takes a module, not int"),
        Case("not sharded", lambda b: flatshard.check_buffers(b.plain), None),
        Case("a replaced parameter", lambda b: _replaced(), AssertionError, "replaced in its module"),
    ],
    "register_fsdp_forward_method": [
        Case("no such method", lambda b: flatshard.register_fsdp_forward_method(b.model, "x"), ValueError, "method x"),
        Case("no name", lambda b: flatshard.register_fsdp_forward_method(b.model, 3), TypeError, "method_name=3"),
        Case(
            "an attribute",
            lambda b: flatshard.register_fsdp_forward_method(b.model, "training"),
            ValueError,
            "training",
        ),
        Case("no unit", lambda b: flatshard.register_fsdp_forward_method(b.plain, "score"), None),
    ],
    "share_comm_ctx": [
        Case("no unit", lambda b: flatshard.share_comm_ctx([b.model, b.plain]), ValueError, "got Tiny"),
        Case("one model", lambda b: flatshard.share_comm_ctx(b.model), TypeError, "a list of"),
        Case("text", lambda b: flatshard.share_comm_ctx(["model"]), ValueError, "got str"),
        Case("nothing", lambda b: flatshard.share_comm_ctx([]), None),
        Case(
            "in a forward", lambda b: flatshard.share_comm_ctx([b.model, b.model]), RuntimeError, "forward", "forward"
        ),
    ],
    "install": [Case("twice", lambda b: (flatshard.install(), flatshard.install(), flatshard.uninstall()), None)],
    "uninstall": [Case("what is not installed", lambda b: flatshard.uninstall(), None)],
    "destroy_groups": [Case("without any", lambda b: flatshard.destroy_groups(), None)],
    "capture": [
        Case("no function", lambda b: flatshard.capture(3), TypeError, "step=3: must be a function"),
        Case("warmup: one", lambda b: flatshard.capture(loss_of, warmup=1), ValueError, "2 or more"),
        Case("other_shapes", lambda b: flatshard.capture(loss_of, other_shapes="x"), ValueError, "must be one of"),
    ],
    "Captured": [
        Case("no arguments", lambda b: flatshard.Captured(), TypeError, "step"),
        Case("a tensor on the CPU", lambda b: flatshard.capture(loss_of)(ROWS), (TypeError, ValueError), "cpu|GPU"),
        Case("text", lambda b: flatshard.capture(loss_of)("x"), (TypeError, ValueError), "tensors"),
    ],
    "PeerError": [Case("is a RuntimeError", lambda b: _raised(flatshard.PeerError("x")), RuntimeError, "x")],
    "offer_main_grads": [
        Case("no module", lambda b: flatshard.offer_main_grads(None), (TypeError, ValueError), "NoneType"),
        Case("not sharded", lambda b: flatshard.offer_main_grads(b.plain), ValueError, "call fully_shard first"),
    ],
    "direct_wgrads": [
        Case("no module", lambda b: flatshard.direct_wgrads(None), (TypeError, ValueError), "NoneType"),
        Case("not sharded", lambda b: flatshard.direct_wgrads(b.plain), ValueError, "call fully_shard first"),
    ],
}


def _late(parameter: nn.Parameter) -> nn.Module:
    """A model whose last unit cannot be sharded."""
    model = tiny()
    model.head.weight = parameter
    return model


def _unsharded_part() -> None:
    model = tiny()
    fully_shard(model.head)
    model.head.unshard()
    fully_shard(model)


def _meta() -> nn.Module:
    with torch.device("meta"):
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(3))
    return module


def _replaced() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.weight = nn.Parameter(model.weight.detach().clone())
    flatshard.check_buffers(model)


def _forward_while_written(b: Bench) -> None:
    with flatshard.gathered(b.model, write=True):
        b.model(ROWS)


def _raise_in(context: Any) -> None:
    with context:
        raise KeyError("mine")


_NO_FACTOR = "finite number, and not 0"
UNITS = {
    "FSDPModule": [
        Case("another device", lambda b: b.model.to("meta"), (RuntimeError, ValueError), "meta"),
        Case("an unknown dtype", lambda b: b.model.to(torch.int32), TypeError, "floating point"),
        Case("complex", lambda b: b.model.to(torch.complex64), ValueError, "complex64"),
        Case("moved in a pass", lambda b: b.model.double(), RuntimeError, "backward", "awaited"),
        Case(
            "a state dict of another model",
            lambda b: b.model.load_state_dict({"head.weight": torch.ones(9, 9)}),
            RuntimeError,
            "head.weight",
        ),
        Case("no state dict", lambda b: b.model.load_state_dict([1]), TypeError, "list"),
        Case("a forward of the wrong shape", lambda b: _given_up(b, torch.ones(2, 9)), RuntimeError, "shapes"),
        Case("a forward of text", lambda b: _given_up(b, "text"), TypeError, "str"),
        Case("forward(), without its hooks", lambda b: b.block.forward(ROWS), RuntimeError, "torch.Tensor and DTensor"),
    ],
    "FSDPModule.unshard": [
        Case("async_op: text", lambda b: b.model.unshard("yes"), TypeError, "async_op='yes'"),
        Case("twice", lambda b: (b.block.unshard(), b.block.unshard(), b.block.reshard()), None),
    ],
    "FSDPModule.unshard_all": [Case("async_op: text", lambda b: b.model.unshard_all("1"), TypeError, "async_op='1'")],
    "FSDPModule.reshard": [
        Case("what is sharded", lambda b: b.model.reshard(), None),
        Case("in a forward", lambda b: b.model.reshard(), None, "", "forward"),
        Case("before a backward", lambda b: b.model.reshard(), None, "", "awaited"),
        Case("another unit's backward", lambda b: b.block.reshard(), None, "", "backward"),
        Case(
            "in its backward", lambda b: b.model.blocks[1].reshard(), RuntimeError, "backward has returned", "backward"
        ),
    ],
    "FSDPModule.reshard_all": [
        Case("what is sharded", lambda b: b.model.reshard_all(), None),
        Case("in a backward", lambda b: b.model.reshard_all(), RuntimeError, "backward has returned", "backward"),
    ],
    "FSDPModule.own_parameters": [Case("an argument", lambda b: b.model.own_parameters(True), TypeError)],
    "FSDPModule.hold_weights": [
        Case("in a forward", lambda b: b.model.hold_weights(), RuntimeError, "call it between passes", "forward"),
        Case("in a backward", lambda b: b.model.hold_weights(), RuntimeError, "call it between passes", "backward"),
    ],
    "FSDPModule.refresh_weights": [
        Case("before a backward", lambda b: b.model.refresh_weights(), None, "", "awaited"),
        Case("in a forward", lambda b: b.model.refresh_weights(), RuntimeError, "call it between passes", "forward"),
        Case("in a backward", lambda b: b.model.refresh_weights(), RuntimeError, "call it between passes", "backward"),
    ],
    "FSDPModule.set_reshard_after_forward": [
        Case("a number", lambda b: b.model.set_reshard_after_forward(2), ValueError, "should be a bool"),
        Case("text", lambda b: b.model.set_reshard_after_forward("auto"), ValueError, "should be a bool"),
        Case("recurse: text", lambda b: b.model.set_reshard_after_forward(True, "no"), TypeError, "recurse='no'"),
    ],
    "FSDPModule.set_reshard_after_backward": [
        Case("text", lambda b: b.model.set_reshard_after_backward("no"), TypeError, "reshard_after_backward='no'"),
        Case("none", lambda b: b.model.set_reshard_after_backward(None), TypeError, "True or False"),
    ],
    "FSDPModule.set_unshard_in_backward": [
        Case("text", lambda b: b.model.set_unshard_in_backward("no"), TypeError, "unshard_in_backward='no'"),
    ],
    "FSDPModule.set_modules_to_forward_prefetch": [
        Case("no unit", lambda b: b.block.set_modules_to_forward_prefetch([b.plain]), ValueError, "got Tiny"),
        Case("one unit", lambda b: b.block.set_modules_to_forward_prefetch(b.model), TypeError, "a list of"),
    ],
    "FSDPModule.set_modules_to_backward_prefetch": [
        Case("no unit", lambda b: b.block.set_modules_to_backward_prefetch([3]), ValueError, "got int"),
        Case("one unit", lambda b: b.block.set_modules_to_backward_prefetch(b.model), TypeError, "a list of"),
    ],
    "FSDPModule.zero_grad": [Case("nothing to zero", lambda b: b.model.zero_grad(), None)],
    "FSDPModule.sync_gradients": [
        Case("wait: text", lambda b: b.model.sync_gradients("no"), TypeError, "wait='no'"),
        Case("in a forward", lambda b: b.model.sync_gradients(), None, "", "forward"),
    ],
    "FSDPModule.set_decoupled_gradients": [
        Case("text", lambda b: b.model.set_decoupled_gradients("no"), TypeError, "enable='no'"),
    ],
    "FSDPModule.set_requires_gradient_sync": [
        Case("text", lambda b: b.model.set_requires_gradient_sync("no"), TypeError, "requires_gradient_sync='no'"),
        Case("none", lambda b: b.model.set_requires_gradient_sync(None), TypeError, "True or False"),
    ],
    "FSDPModule.set_requires_all_reduce": [
        Case("text", lambda b: b.model.set_requires_all_reduce("no"), TypeError, "requires_all_reduce='no'"),
    ],
    "FSDPModule.set_manual_backward_finalization": [
        Case("text", lambda b: b.model.set_manual_backward_finalization("no"), TypeError, "enabled='no'"),
        Case("not the root", lambda b: b.block.set_manual_backward_finalization(True), RuntimeError, "root FSDP"),
    ],
    "FSDPModule.finalize_backward": [
        Case("text", lambda b: b.model.finalize_backward(async_op="no"), TypeError, "async_op='no'"),
    ],
    "FSDPModule.set_keep_unsharded_storage": [
        Case("text", lambda b: b.model.set_keep_unsharded_storage("no"), TypeError, "keep='no'"),
    ],
    "FSDPModule.set_is_last_backward": [
        Case("text", lambda b: b.model.set_is_last_backward("no"), TypeError, "is_last_backward='no'"),
    ],
    "FSDPModule.set_gradient_divide_factor": [
        Case("zero", lambda b: b.model.set_gradient_divide_factor(0), ValueError, _NO_FACTOR),
        Case("not finite", lambda b: b.model.set_gradient_divide_factor(float("inf")), ValueError, _NO_FACTOR),
        Case("text", lambda b: b.model.set_gradient_divide_factor("2"), ValueError, _NO_FACTOR),
        Case("True", lambda b: b.model.set_gradient_divide_factor(True), ValueError, _NO_FACTOR),
    ],
    "FSDPModule.set_reduce_scatter_divide_factor": [
        Case("zero", lambda b: b.model.set_reduce_scatter_divide_factor(0.0), ValueError, _NO_FACTOR),
    ],
    "FSDPModule.set_force_sum_reduction_for_comms": [
        Case("text", lambda b: b.model.set_force_sum_reduction_for_comms("no"), TypeError, "enable='no'"),
    ],
    "FSDPModule.set_reduce_scatter_unused_params": [
        Case("text", lambda b: b.model.set_reduce_scatter_unused_params("no"), TypeError, "unused_params='no'"),
    ],
    "FSDPModule.set_mp_policy": [
        Case("a dtype", lambda b: b.model.set_mp_policy(torch.float16), TypeError, "MixedPrecisionPolicy"),
        Case("none", lambda b: b.model.set_mp_policy(None), TypeError, "MixedPrecisionPolicy"),
        Case(
            "in a forward",
            lambda b: b.model.set_mp_policy(MixedPrecisionPolicy(torch.bfloat16)),
            RuntimeError,
            "run the backward first",
            "forward",
        ),
        Case(
            "in a backward",
            lambda b: b.model.set_mp_policy(MixedPrecisionPolicy(torch.bfloat16)),
            RuntimeError,
            "run the backward first",
            "backward",
        ),
        Case(
            "before its backward",
            lambda b: b.model.set_mp_policy(MixedPrecisionPolicy(torch.bfloat16)),
            RuntimeError,
            "backward",
            "awaited",
        ),
    ],
    "FSDPModule.set_custom_all_gather": [
        Case("no comm", lambda b: b.model.set_custom_all_gather(len), TypeError, "have an allocate method"),
        Case("text", lambda b: b.model.set_custom_all_gather("nccl"), TypeError, "not a str"),
    ],
    "FSDPModule.set_custom_reduce_scatter": [
        Case("no comm", lambda b: b.model.set_custom_reduce_scatter(len), TypeError, "have an allocate method"),
    ],
    "FSDPModule.set_gather_group": [
        Case("text", lambda b: b.model.set_gather_group("world"), TypeError, "must be a ProcessGroup"),
        Case("mesh: text", lambda b: b.model.set_gather_group(dist.group.WORLD, "dp"), TypeError, "DeviceMesh"),
    ],
    "FSDPModule.set_all_reduce_hook": [
        Case("no function", lambda b: b.model.set_all_reduce_hook(3), TypeError, "must be callable, not a int"),
    ],
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": [
        Case(
            "text",
            lambda b: b.model.set_allocate_memory_from_process_group_for_comm("no"),
            TypeError,
            "enable='no'",
        ),
    ],
    "FSDPModule.set_symm_mem_for_comm": [
        Case("another backend", lambda b: b.model.set_symm_mem_for_comm("gloo"), ValueError, "must be 'NCCL'"),
        Case("no CUDA", lambda b: b.model.set_symm_mem_for_comm(), ValueError, "this one is on cpu"),
    ],
    "FSDPModule.set_post_optim_event": [
        Case("text", lambda b: b.model.set_post_optim_event("event"), TypeError, "event='event'"),
    ],
    "FSDPModule.set_reduce_scatter_max_input_buffers": [
        Case("zero", lambda b: b.model.set_reduce_scatter_max_input_buffers(0), ValueError, "positive int, got 0"),
        Case("True", lambda b: b.model.set_reduce_scatter_max_input_buffers(True), TypeError, "bool"),
        Case("a fraction", lambda b: b.model.set_reduce_scatter_max_input_buffers(1.5), TypeError, "float"),
    ],
    "FSDPModule.set_separate_reduce_scatter_group": [
        Case("text", lambda b: b.model.set_separate_reduce_scatter_group("no"), TypeError, "enable='no'"),
    ],
    "FSDPModule.reset": [
        Case("at rest", lambda b: b.model.reset(), None),
        Case("an argument", lambda b: b.model.reset(True), TypeError),
    ],
    "FSDPModule.reset_iter_state": [
        Case("not the root", lambda b: b.block.reset_iter_state(), RuntimeError, "'Tiny' is|'FSDPTiny' is|root FSDP"),
    ],
    "GradientReductionHandle": [Case("no root", lambda b: flatshard.GradientReductionHandle(), TypeError)],
    "GradientReductionHandle.wait": [
        Case("of nothing", lambda b: flatshard.GradientReductionHandle(None).wait(), None)
    ],
    "UnshardHandle": [Case("no units", lambda b: flatshard.UnshardHandle(), TypeError)],
    "UnshardHandle.wait": [
        Case("twice", lambda b: _waited_twice(b), None),
        Case("after reshard", lambda b: _waited_late(b), None),
    ],
}


def _given_up(b: Bench, x: Any) -> None:
    """A forward that raises; `reset` gives it up."""
    try:
        b.model(x)
    finally:
        b.model.reset()


def _waited_twice(b: Bench) -> None:
    handle = b.block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    b.block.reshard()


def _waited_late(b: Bench) -> None:
    handle = b.block.unshard(async_op=True)
    b.block.reshard()
    handle.wait()
    b.block.reshard()


_FLAT, _KEPT, _AVG = layout.Flat(), layout.Replicate(), layout.Partial("avg")
POLICIES = {
    "MixedPrecisionPolicy": [
        *(
            Case(f"{field}: {value}", lambda b, f=field, v=value: MixedPrecisionPolicy(**{f: v}), TypeError, field)
            for field in ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype")
            for value in ("bf16", torch.int8)
        ),
        Case(
            "cast: text",
            lambda b: MixedPrecisionPolicy(cast_forward_inputs="no"),
            TypeError,
            "cast_forward_inputs='no'",
        ),
        Case("an unknown name", lambda b: MixedPrecisionPolicy(buffer_dtype=torch.half), TypeError, "buffer_dtype"),
        Case("changed afterwards", lambda b: _assigned(MixedPrecisionPolicy()), AttributeError, "param_dtype"),
    ],
    "OffloadPolicy": [Case("an argument", lambda b: flatshard.OffloadPolicy(True), TypeError)],
    "CPUOffloadPolicy": [Case("text", lambda b: CPUOffloadPolicy("no"), TypeError, "pin_memory='no'")],
    "DataParallelMeshDims": [
        Case("nothing", lambda b: DataParallelMeshDims(), ValueError, "At least one of shard or replicate"),
        Case("numbers", lambda b: DataParallelMeshDims(0), TypeError, "shard=0"),
        Case("one axis twice", lambda b: DataParallelMeshDims("dp", "dp"), ValueError, "'dp' is in both"),
        Case("a number in a tuple", lambda b: DataParallelMeshDims(("a", 1)), TypeError, "shard=.*1"),
    ],
    "Sharding": [
        Case("dim: text", lambda b: Sharding("0"), TypeError, "dim='0'"),
        Case("dim: True", lambda b: Sharding(True), TypeError, "dim=True"),
        Case("mesh: text", lambda b: Sharding(mesh="dp"), TypeError, "must be a DeviceMesh"),
        Case("mesh: three axes", lambda b: Sharding(mesh=b.meshes(3)), ValueError, "3 axes"),
        Case("apart: two axes", lambda b: Sharding(apart=b.meshes(2)), ValueError, "apart has 2 axes"),
    ],
    "Experts": [
        Case("no classes", lambda b: Experts([], b.mesh), ValueError, "a list of classes"),
        Case("text", lambda b: Experts("Linear", b.mesh), ValueError, "a list of classes"),
        Case("a class", lambda b: Experts(nn.Linear, b.mesh), (TypeError, ValueError), "a list of classes"),
        Case("mesh: none", lambda b: Experts([nn.Linear], None), TypeError, "must be a DeviceMesh"),
        Case("apart: two axes", lambda b: Experts([nn.Linear], b.mesh, b.meshes(2)), ValueError, "apart has 2"),
    ],
    "Placements": [
        Case("no tuples", lambda b: Placements(_FLAT, _FLAT, _FLAT), TypeError, "a tuple of flatshard.layout"),
        Case("torch's", lambda b: Placements((Shard(0),), (Partial(),), (Shard(0),)), TypeError, "flatshard.layout"),
        Case("other axes", lambda b: Placements((_FLAT,), (_FLAT,), (_FLAT, _FLAT)), ValueError, "different lengths"),
        Case("Partial weights", lambda b: Placements((_AVG,), (_AVG,), (_FLAT,)), ValueError, "only gradient can be"),
        Case("whole optimizer", lambda b: Placements((_FLAT,), (_FLAT,), (_KEPT,)), ValueError, "for optimizer too"),
        Case(
            "whole gradients",
            lambda b: Placements((_FLAT,), (_KEPT,), (_FLAT,)),
            ValueError,
            "has Replicate for gradient",
        ),
        Case(
            "first axis",
            lambda b: Placements((_FLAT, _KEPT), (_FLAT, _AVG), (_FLAT, _KEPT)),
            ValueError,
            "a later one is not",
        ),
    ],
    "SchedulePolicy": [
        Case("max_gathered: zero", lambda b: SchedulePolicy(max_gathered=0), ValueError, "at least 1"),
        Case("max_reducing: zero", lambda b: SchedulePolicy(max_reducing=0), ValueError, "at least 1"),
        Case("bytes: negative", lambda b: SchedulePolicy(keep_for_backward=-1), ValueError, "at least 0"),
        Case("bytes: text", lambda b: SchedulePolicy(max_gathered_bytes="1GB"), TypeError, "max_gathered_bytes='1GB'"),
        Case("max_gathered: text", lambda b: SchedulePolicy(max_gathered="2"), TypeError, "max_gathered='2'"),
        Case("prefetch: text", lambda b: SchedulePolicy(prefetch="no"), TypeError, "prefetch='no'"),
        Case("max_reducing: True", lambda b: SchedulePolicy(max_reducing=True), TypeError, "max_reducing=True"),
        Case("peers: a list", lambda b: WirePolicy(peers=["peers"]), TypeError, "peers"),
        Case(
            "wire: registered",
            lambda b: WirePolicy(peers=True, registered=True),
            ValueError,
            "use only one of the two",
        ),
    ],
}


def _assigned(policy: Any) -> None:
    policy.param_dtype = torch.half


def _stepped_early() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    loss_of(model).backward()
    optimizer.step()


def _early() -> torch.optim.Optimizer:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    return optimizer


def _patched(b: Bench) -> None:
    optimizer = torch.optim.SGD(b.model.parameters(), lr=0.1)
    optimizer.step = lambda: None  # type: ignore[method-assign]
    flatshard.fully_shard_optimizer(optimizer)


OPTIMIZERS = {
    "fully_shard_optimizer": [
        Case("no optimizer", lambda b: flatshard.fully_shard_optimizer(b.model), TypeError, "not FSDPTiny"),
        Case(
            "LBFGS",
            lambda b: flatshard.fully_shard_optimizer(torch.optim.LBFGS(b.model.parameters())),
            ValueError,
            "elementwise",
        ),
        Case(
            "Adafactor",
            lambda b: flatshard.fully_shard_optimizer(torch.optim.Adafactor(b.model.parameters())),
            ValueError,
            "factors",
        ),
        Case(
            "SparseAdam",
            lambda b: flatshard.fully_shard_optimizer(torch.optim.SparseAdam(b.model.parameters())),
            ValueError,
            "use Adam",
        ),
        Case(
            "differentiable",
            lambda b: flatshard.fully_shard_optimizer(torch.optim.SGD(b.model.parameters(), differentiable=True)),
            ValueError,
            "leave it out",
        ),
        Case(
            "built before sharding",
            lambda b: flatshard.fully_shard_optimizer(_early()),
            RuntimeError,
            "Build the optimizer after fully_shard",
        ),
        Case(
            "a step of one built before",
            lambda b: _stepped_early(),
            RuntimeError,
            "Build the optimizer after fully_shard",
        ),
        Case(
            "state of whole parameters in host memory",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, offload_state=True, whole=True),
            ValueError,
            "leave it out",
        ),
        Case("a step that was replaced", _patched, ValueError, "call fully_shard_optimizer before"),
        Case(
            "precision_aware: text",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, precision_aware="no"),
            TypeError,
            "precision_aware='no'",
        ),
        Case(
            "whole: text",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, whole="yes"),
            TypeError,
            "whole='yes'",
        ),
        Case(
            "split without whole",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, split={"*": 2}),
            ValueError,
            "split applies to whole",
        ),
        Case(
            "split: a number",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, whole=True, split=2),
            TypeError,
            "split=2",
        ),
        Case(
            "cost: a number",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, whole=True, cost=2),
            TypeError,
            "cost=2",
        ),
        Case(
            "owners: unknown",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, whole=True, owners="some"),
            ValueError,
            "owners='some'",
        ),
        Case(
            "bucket_bytes: zero",
            lambda b: flatshard.fully_shard_optimizer(b.optimizer, whole=True, bucket_bytes=0),
            ValueError,
            "bucket_bytes=0",
        ),
    ],
    "whole_optimizer": [
        Case("no model", lambda b: flatshard.whole_optimizer(torch.optim.Muon, 3), TypeError, "not int"),
        Case(
            "a factory of something else",
            lambda b: flatshard.whole_optimizer(lambda matrices: matrices, b.model),
            TypeError,
            "not list",
        ),
        Case(
            "a factory that leaves out some",
            lambda b: flatshard.whole_optimizer(lambda matrices: torch.optim.Muon(matrices[:1]), b.model),
            ValueError,
            "does not have",
        ),
        Case(
            "whole: no function",
            lambda b: flatshard.whole_optimizer(torch.optim.Muon, b.model, 3),
            TypeError,
            "whole=3",
        ),
    ],
    "clip_grad_norm_": [
        Case("norm_type: zero", lambda b: flatshard.clip_grad_norm_(b.model, 1.0, 0), ValueError, "must be positive"),
        Case(
            "norm_type: text",
            lambda b: flatshard.clip_grad_norm_(b.model, 1.0, "two"),
            (TypeError, ValueError),
            "norm_type='two'",
        ),
        Case(
            "norm_type: nan",
            lambda b: flatshard.clip_grad_norm_(b.model, 1.0, float("nan")),
            ValueError,
            "norm_type=nan",
        ),
        Case(
            "max_norm: text",
            lambda b: _with_grads(b, lambda: flatshard.clip_grad_norm_(b.model, "1")),
            TypeError,
            "max_norm='1'",
        ),
        Case("max_norm: negative", lambda b: flatshard.clip_grad_norm_(b.model, -1.0), ValueError, "max_norm=-1.0"),
        Case("max_norm: nan", lambda b: flatshard.clip_grad_norm_(b.model, float("nan")), ValueError, "max_norm=nan"),
        Case("no tensors", lambda b: flatshard.clip_grad_norm_(["x"], 1.0), TypeError, "str"),
        Case("a number", lambda b: flatshard.clip_grad_norm_(3, 1.0), TypeError, "int"),
        Case("an optimizer", lambda b: flatshard.clip_grad_norm_(b.optimizer, 1.0), TypeError, "SGD"),
        Case(
            "stages: two axes",
            lambda b: flatshard.clip_grad_norm_(b.model, 1.0, stages=b.meshes(2)),
            ValueError,
            "of one axis",
        ),
        Case("stages: text", lambda b: flatshard.clip_grad_norm_(b.model, 1.0, stages="pp"), ValueError, "of one axis"),
        Case("not finite", lambda b: _nonfinite(b), RuntimeError, "find_nonfinite"),
        Case("no gradients", lambda b: flatshard.clip_grad_norm_(b.model, 1.0), None),
    ],
    "sum_shared_gradients": [
        Case(
            "stages: no mesh",
            lambda b: flatshard.sum_shared_gradients(list(b.model.parameters()), None),
            ValueError,
            "stages=None: must be a DeviceMesh of one axis",
        ),
        Case(
            "names for parameters",
            lambda b: flatshard.sum_shared_gradients(["head.weight"], b.mesh),
            TypeError,
            "takes parameters, not 'head.weight'",
        ),
    ],
    "grad_norms": [
        Case("no model", lambda b: flatshard.grad_norms([1]), TypeError, "grad_norms takes a module, not list"),
        Case("norm_type: negative", lambda b: flatshard.grad_norms(b.model, -2), ValueError, "must be positive"),
        Case("norm_type: text", lambda b: flatshard.grad_norms(b.model, "x"), (TypeError, ValueError), "norm_type='x'"),
        Case("no gradients", lambda b: flatshard.grad_norms(b.model), None),
    ],
    "weight_norms": [
        Case(
            "no model", lambda b: flatshard.weight_norms(None), TypeError, "weight_norms takes a module, not NoneType"
        ),
        Case("norm_type: zero", lambda b: flatshard.weight_norms(b.model, 0), ValueError, "must be positive"),
    ],
    "find_nonfinite": [
        Case(
            "no model", lambda b: flatshard.find_nonfinite("model"), TypeError, "find_nonfinite takes a module, not str"
        ),
        Case("not sharded", lambda b: flatshard.find_nonfinite(b.plain), None),
    ],
}


def _with_grads(b: Bench, call: Any) -> None:
    loss_of(b.model).backward()
    try:
        call()
    finally:
        b.optimizer.zero_grad()


def _nonfinite(b: Bench) -> None:
    def call() -> None:
        b.model.head.weight.grad.to_local()[0, 0] = float("nan")
        flatshard.clip_grad_norm_(b.model, 1.0, error_if_nonfinite=True)

    _with_grads(b, call)


def _saved(b: Bench, *args: Any, **kwargs: Any) -> Any:
    path = b.new()
    try:
        return checkpoint.save(path, b.model, *args, progress=False, **kwargs)
    finally:
        assert not path.exists(), "half a checkpoint is there"
        assert not [left for left in b.folder.iterdir() if left.name.startswith(".saving-")], "something was left"


def _good(b: Bench) -> Any:
    path = b.new()
    checkpoint.save(path, b.model, progress=False)
    return path


def _exported(b: Bench, *args: Any, **kwargs: Any) -> None:
    path = b.new()
    try:
        checkpoint.export_safetensors(b.model, path, *args, progress=False, **kwargs)
    finally:
        assert not path.exists() or not list(path.iterdir()), "half an export is there"


def _converted(b: Bench, source: Any, **kwargs: Any) -> None:
    target = b.new()
    try:
        checkpoint.convert(source, target, **kwargs)
    finally:
        assert not target.exists()


CHECKPOINTS = {
    "checkpoint.save": [
        Case("no model", lambda b: checkpoint.save(b.new(), "model"), TypeError, "not str"),
        Case("path: a number", lambda b: checkpoint.save(3, b.model), TypeError, "path=3"),
        Case("path: is there", lambda b: checkpoint.save(b.folder, b.model), CheckpointError, "exists"),
        Case(
            "path: below a file",
            lambda b: checkpoint.save(b.write("") / "a", b.model, progress=False),
            CheckpointError,
            "Not a directory",
        ),
        Case("no optimizer", lambda b: _saved(b, "adam"), TypeError, "optimizer='adam'"),
        Case(
            "another's optimizer",
            lambda b: _saved(b, torch.optim.SGD(tiny().parameters())),
            (CheckpointError, ValueError),
            "model.parameters",
        ),
        Case(
            "extra: an object",
            lambda b: _saved(b, None, {"a": object()}),
            (CheckpointError, TypeError),
            "a checkpoint takes",
        ),
        Case("extra: a set", lambda b: _saved(b, None, {1, 2}), (CheckpointError, TypeError), "a checkpoint takes"),
        Case(
            "extra: a DTensor",
            lambda b: _saved(b, None, b.model.head.weight),
            (CheckpointError, TypeError),
            "plain tensors",
        ),
        Case(
            "extra: a dtype",
            lambda b: _saved(b, None, torch.ones(2, dtype=torch.complex128)),
            (CheckpointError, TypeError),
            "complex128",
        ),
        Case("keep_last: zero", lambda b: _saved(b, keep_last=0), ValueError, "at least 1"),
        Case("keep_last: text", lambda b: _saved(b, keep_last="2"), TypeError, "keep_last='2'"),
        Case(
            "a meta model", lambda b: checkpoint.save(b.new(), _meta(), progress=False), CheckpointError, "materialize"
        ),
        Case("before a backward", lambda b: checkpoint.save(b.new(), b.model, progress=False), None, "", "awaited"),
        Case("in a forward", lambda b: checkpoint.save(b.new(), b.model, progress=False), None, "", "forward"),
        Case(
            "in a backward",
            lambda b: checkpoint.save(b.new(), b.model, progress=False),
            CheckpointError,
            "in its backward",
            "backward",
        ),
    ],
    "checkpoint.load": [
        Case("no model", lambda b: checkpoint.load(_good(b), "model"), TypeError, "not str"),
        Case("path: a number", lambda b: checkpoint.load(3, b.model), TypeError, "path=3"),
        Case("path: nothing there", lambda b: checkpoint.load(b.new(), b.model), CheckpointError, "does not exist"),
        Case("path: an empty folder", lambda b: checkpoint.load(b.folder, b.model), CheckpointError, "no manifest"),
        Case("path: a file", lambda b: checkpoint.load(b.write("x"), b.model), CheckpointError, "new-"),
        Case("another model", lambda b: checkpoint.load(_good(b), nn.Linear(2, 2)), CheckpointError, "does not fit"),
        Case(
            "no optimizer in it",
            lambda b: checkpoint.load(_good(b), b.model, b.optimizer),
            CheckpointError,
            "without an optimizer",
        ),
        Case("optimizer: text", lambda b: checkpoint.load(_good(b), b.model, "adam"), TypeError, "optimizer='adam'"),
    ],
    "checkpoint.verify": [
        Case("path: none", lambda b: checkpoint.verify(None), TypeError, "path=None"),
        Case("nothing there", lambda b: checkpoint.verify(b.new()), CheckpointError, "does not exist"),
        Case("no checkpoint", lambda b: checkpoint.verify(b.folder), CheckpointError, "no manifest"),
    ],
    "checkpoint.latest": [
        Case("path: none", lambda b: checkpoint.latest(None), TypeError, "path=None"),
        Case("nothing there", lambda b: checkpoint.latest(b.new()), None),
        Case("a file", lambda b: checkpoint.latest(b.write("x")), None),
    ],
    "checkpoint.iter_full_tensors": [
        Case("no model", lambda b: list(checkpoint.iter_full_tensors("model")), TypeError, "not str"),
        Case("bucket: zero", lambda b: list(checkpoint.iter_full_tensors(b.model, 0)), ValueError, "at least 1"),
        Case(
            "bucket: text",
            lambda b: list(checkpoint.iter_full_tensors(b.model, "1GB")),
            TypeError,
            "bucket_bytes='1GB'",
        ),
        Case("not to the end", lambda b: next(checkpoint.iter_full_tensors(b.model)), None),
    ],
    "checkpoint.export_safetensors": [
        Case("no model", lambda b: checkpoint.export_safetensors("m", b.new()), TypeError, "not str"),
        Case("folder: a number", lambda b: checkpoint.export_safetensors(b.model, 3), TypeError, "folder=3"),
        Case(
            "folder: a file",
            lambda b: checkpoint.export_safetensors(b.model, b.write(""), progress=False),
            CheckpointError,
            "exists",
        ),
        Case("size: text", lambda b: _exported(b, "huge"), ValueError, "a number of bytes"),
        Case("size: zero", lambda b: _exported(b, 0), ValueError, "a number of bytes"),
        Case("dtype: text", lambda b: _exported(b, dtype="bfloat16"), TypeError, "dtype='bfloat16'"),
        Case("dtype: integers", lambda b: _exported(b, dtype=torch.int8), TypeError, "floating-point"),
        Case("names: text", lambda b: _exported(b, names="MIXTRAL"), TypeError, "StoredAs"),
        Case("bucket: zero", lambda b: _exported(b, bucket_bytes=0), ValueError, "at least 1"),
        Case(
            "names: a shape that has no parts",
            lambda b: _exported(b, names=[StoredAs("head.weight", ("a", "b"), dim=5)]),
            ValueError,
            "cannot be stored",
        ),
        Case(
            "a meta model",
            lambda b: checkpoint.export_safetensors(_meta(), b.new(), progress=False),
            ValueError,
            "materialize",
        ),
    ],
    "checkpoint.load_safetensors": [
        Case("no model", lambda b: checkpoint.load_safetensors("m", b.folder), TypeError, "not str"),
        Case("folder: a number", lambda b: checkpoint.load_safetensors(b.model, 3), TypeError, "folder=3"),
        Case(
            "nothing there", lambda b: checkpoint.load_safetensors(b.model, b.new()), CheckpointError, "cannot be read"
        ),
        Case(
            "no safetensors",
            lambda b: checkpoint.load_safetensors(b.model, b.write("text text")),
            CheckpointError,
            "not a safetensors",
        ),
        Case("another model", lambda b: _another(b), CheckpointError, "'weight' is not in the checkpoint"),
        Case(
            "names: text",
            lambda b: checkpoint.load_safetensors(b.model, b.folder, names="MIXTRAL"),
            TypeError,
            "StoredAs",
        ),
    ],
    "checkpoint.renamed": [
        Case("no such prefix", lambda b: checkpoint.renamed({"a": 1}, remove="module."), ValueError, "does not begin"),
        Case("no dict", lambda b: checkpoint.renamed([1]), TypeError, "a state dict, not list"),
        Case("add: a number", lambda b: checkpoint.renamed({"a": 1}, add=3), TypeError, "add=3"),
    ],
    "checkpoint.convert": [
        Case("nothing there", lambda b: _converted(b, b.new()), CheckpointError, "is no checkpoint"),
        Case("source: a number", lambda b: _converted(b, 3), TypeError, "source=3"),
        Case("to: unknown", lambda b: _converted(b, b.folder, to="onnx"), ValueError, "must be one of"),
        Case("onto something", lambda b: checkpoint.convert(_good(b), b.folder), CheckpointError, "exists"),
        Case("no expression", lambda b: _converted(b, b.folder, rename=[("(", "")]), ValueError, "regular expression"),
        Case("no pair", lambda b: _converted(b, b.folder, rename=["a=b"]), TypeError, "rename"),
        Case("names: a list", lambda b: _converted(b, b.folder, names=["a"]), TypeError, "names=.*dict"),
        Case("a text file", lambda b: _converted(b, b.write("text")), CheckpointError, "torch.save"),
        Case(
            "two of one name",
            lambda b: _converted(b, _good(b), rename=[(".*", "x")]),
            CheckpointError,
            "a name that another tensor has",
        ),
    ],
    "checkpoint.StoredAs": [
        Case("stars", lambda b: StoredAs("a.*", ("b",)), ValueError, r"as many \* as name"),
        Case("no files", lambda b: StoredAs("a", ()), ValueError, "must be names"),
        Case("some experts", lambda b: StoredAs("a", ("b.{expert}", "c")), ValueError, "or none"),
        Case("dim of the experts", lambda b: StoredAs("a", ("b.{expert}", "c.{expert}"), dim=0), ValueError, "dim 0"),
        Case("files: text", lambda b: StoredAs("a", "b"), TypeError, "files='b'"),
        Case("name: none", lambda b: StoredAs(None, ("b",)), TypeError, "name=None"),
    ],
    "checkpoint.MIXTRAL": [Case("of another model", lambda b: _missing(b, checkpoint.MIXTRAL), None)],
    "checkpoint.QWEN_MOE": [Case("of another model", lambda b: _missing(b, checkpoint.QWEN_MOE), None)],
    "checkpoint.CheckpointError": [Case("is a ValueError", lambda b: _raised(CheckpointError("x")), ValueError, "x")],
    "checkpoint.PendingSave": [
        Case(
            "a failed save",
            lambda b: checkpoint.save(b.write("") / "a", b.model, asynchronous=True).result(),
            CheckpointError,
            "Not a directory",
        ),
        Case("waited for twice", lambda b: _waited(b), None),
    ],
}


def _raised(error: Exception) -> None:
    raise error


def _another(b: Bench) -> None:
    folder = b.new()
    checkpoint.export_safetensors(b.model, folder, progress=False)
    checkpoint.load_safetensors(nn.Linear(3, 3), folder, progress=False)


def _missing(b: Bench, names: Any) -> None:
    """Rules that fit nothing change nothing."""
    folder = b.new()
    checkpoint.export_safetensors(b.model, folder, names=names, progress=False)
    checkpoint.load_safetensors(b.model, folder, names=names, progress=False)


def _waited(b: Bench) -> None:
    pending = checkpoint.save(b.new(), b.model, asynchronous=True)
    pending.wait()
    pending.wait()
    assert pending.done()


def _command(*arguments: str) -> Any:
    """The command, in this process; what it writes to stderr is raised."""

    def call(b: Bench) -> None:
        from flatshard.cli import main

        told = io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = main([each.replace("NEW", str(b.new())) for each in arguments])
            except SystemExit as error:
                status = error.code
        assert "Traceback" not in told.getvalue()
        raise SystemExit(f"{status}: {told.getvalue()}")

    return call


COMMANDS = {
    "flatshard train": [
        Case(
            "no such flag",
            _command("train", "--no-such-flag"),
            SystemExit,
            "2: (?s:.*)Unrecognized options",
        ),
        Case("steps: text", _command("train", "--steps", "many"), SystemExit, "2: .*--steps"),
        Case("steps: negative", _command("train", "--steps", "-1"), SystemExit, "2: flatshard train: .*steps"),
        Case("no such text", _command("train", "--data", "NEW"), SystemExit, "2: flatshard train: .*new-"),
    ],
    "flatshard rehearse": [
        Case("no script", _command("rehearse", "--world", "2"), SystemExit, "2: .*SCRIPT"),
        Case(
            "no such script", _command("rehearse", "--world", "2", "NEW"), SystemExit, "2: flatshard rehearse: .*new-"
        ),
        Case("world: zero", _command("rehearse", "--world", "0", "NEW"), SystemExit, "2: flatshard rehearse: .*world"),
        Case("no such network", _command("rehearse", "--world", "2", "--network", "x", "NEW"), SystemExit, "2: .*'x'"),
        Case("rank: too high", _command("rehearse", "--world", "2", "--rank", "5", "NEW"), SystemExit, "2: .*rank"),
    ],
    "flatshard run": [
        Case("no script", _command("run"), SystemExit, "2: .*SCRIPT"),
        Case("no such script", _command("run", "NEW"), SystemExit, "2: flatshard run: .*new-"),
        Case(
            "no such module", _command("run", "-m", "no.such.module"), SystemExit, "2: flatshard run: .*no.such.module"
        ),
    ],
    "flatshard plan": [
        Case(
            "no such model",
            _command("plan", "llama-9z", "--devices", "8", "--memory", "80"),
            SystemExit,
            "2: flatshard plan: .*llama-9z",
        ),
        Case(
            "devices: zero",
            _command("plan", "llama-1b", "--devices", "0", "--memory", "80"),
            SystemExit,
            "2: flatshard plan: .*devices",
        ),
        Case(
            "memory: text",
            _command("plan", "llama-1b", "--devices", "8", "--memory", "much"),
            SystemExit,
            "number of GB",
        ),
        Case(
            "a dtype",
            _command("plan", "llama-1b", "--devices", "8", "--memory", "80", "--main-dtype", "f7"),
            SystemExit,
            "must be a dtype of torch",
        ),
        Case(
            "optimizer",
            _command("plan", "llama-1b", "--devices", "8", "--memory", "80", "--optimizer", "x"),
            SystemExit,
            "must be one of adamw",
        ),
    ],
    "flatshard blame": [
        Case("nothing there", _command("blame", "NEW"), SystemExit, "2: flatshard blame: no flight records"),
        Case("no folder", _command("blame"), SystemExit, "2: .*FOLDER"),
        Case("last: text", _command("blame", "NEW", "--last", "x"), SystemExit, "2: .*--last"),
    ],
    "flatshard report": [
        Case("nothing there", _command("report", "NEW"), SystemExit, "2: flatshard report: .*new-"),
        Case("no recording", _command("report"), SystemExit, "2: .*RECORD"),
        Case(
            "three",
            _command("report", "NEW", "NEW", "NEW"),
            SystemExit,
            "2: flatshard report: 3 recordings .* give one or two",
        ),
    ],
    "flatshard convert": [
        Case("nothing there", _command("convert", "NEW", "NEW"), SystemExit, "2: flatshard convert: .*no checkpoint"),
        Case("rename", _command("convert", "NEW", "NEW", "--rename", "x"), SystemExit, "PATTERN=NEW|must be"),
        Case("names", _command("convert", "NEW", "NEW", "--names", "NEW"), SystemExit, "2: .*cannot be read as JSON"),
        Case("to", _command("convert", "NEW", "NEW", "--to", "onnx"), SystemExit, "2: .*onnx"),
    ],
    "flatshard": [
        Case("no command", _command(), SystemExit, "2: flatshard: "),
        Case("no such command", _command("fly"), SystemExit, "2: flatshard: .*fly"),
    ],
}
