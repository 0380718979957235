"""A few training steps of every strategy, layout and policy, and of what users do in between: no race among streams.

Each case runs as one rank of several in this process, under `checker.watching`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import flatshard
from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    SchedulePolicy,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.optim import adamw8bit, streaming
from flatshard.rehearsal import rehearse
from tests.dist.models import DIM, Block, Net, batches, loss_of, make_net
from tests.dist.random_models import DIM as ROW
from tests.dist.random_models import build, rows_of
from tests.fsdp2.test_extensions import Coded
from tests.fsdp2.test_offload import keep_apart
from tests.races.checker import Checker, watching

pytestmark = [pytest.mark.sampled(3), pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = list(batches(4, 2))
TO_BF16 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


@contextmanager
def one_rank(world: int = 4, rank: int = 1) -> Iterator[Checker]:
    """Within, this is one of several ranks; what it has done must be in order."""
    with rehearse(world, "free", rank=rank), watching() as checker:
        yield checker
        assert checker.accesses > 100
        assert not checker.races, checker.report()


def sharded(model: Any = None, others: Sequence[Any] = (), *, sizes: tuple[int, ...] = (4,), **choices: Any) -> Any:
    """A model whose embedding, blocks and root are units, and ``others`` in it."""
    model = make_net(depth=2) if model is None else model
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for unit in (model.embed, *model.blocks, *others, model):
        fully_shard(unit, mesh=mesh, **choices)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> None:
    """Steps, with an evaluation after the first."""
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    for number, tokens in enumerate(TOKENS[:steps]):
        loss_of(model, tokens).backward()
        flatshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            with torch.no_grad():
                model(tokens)


def accumulate(model: nn.Module, around: Callable[[int], AbstractContextManager[None] | None]) -> None:
    """Two steps of three micro-batches. ``around(left)`` is a context for the one with so many to follow."""
    optimizer = optimizer_of(model)
    for number in range(2):
        for left in (2, 1, 0):
            with around(left) or nullcontext():
                loss_of(model, TOKENS[number + left]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 1)


def as_microbatch(model: nn.Module) -> Callable[[int], AbstractContextManager[None]]:
    return lambda left: microbatch(model, is_first=left == 2, is_last=left == 0)


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)


# What fully_shard is told

HSDP: dict[str, Any] = {"sizes": (2, 2)}
HFSDP: dict[str, Any] = {"sizes": (2, 2), "outer_strategy": "optim"}
CHOICES: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "optim": {"strategy": "optim"},
    "optim_grads": {"strategy": "optim_grads"},
    "optim_grads_params": {},
    "HSDP": HSDP,
    "HSDP of gradients": {**HSDP, "strategy": "optim_grads"},
    "HSDP of nothing": {**HSDP, "strategy": "no_shard"},
    "HFSDP": HFSDP,
    "flat": {"layout": "flat"},
    "flat where small": {"layout": "auto"},
    "flat optim": {"layout": "flat", "strategy": "optim"},
    "flat HFSDP": {"layout": "flat", **HFSDP},
    "bf16": {"mp_policy": TO_BF16},
    "bf16 throughout": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, grad_dtype=BF16)},
    "bf16 main": {"mp_policy": MixedPrecisionPolicy(main_dtype=BF16, param_dtype=F32, reduce_dtype=F32)},
    "bf16 reduces": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)},
    "bf16 no_shard": {"mp_policy": TO_BF16, "strategy": "no_shard"},
    "bf16 optim": {"mp_policy": TO_BF16, "strategy": "optim"},
    "bf16 HSDP": {"mp_policy": TO_BF16, **HSDP},
    "bf16 HFSDP": {"mp_policy": TO_BF16, **HFSDP},
    "bf16 flat": {"mp_policy": TO_BF16, "layout": "flat"},
    "f16 reduces": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F16)},
    "f16 reduces, optim": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=F16), "strategy": "optim"},
    "kept for backward": {"reshard_after_forward": False},
    "resharded to two": {"reshard_after_forward": 2},
    "resharded to two, bf16": {"reshard_after_forward": 2, "mp_policy": TO_BF16},
    "resharded to two, flat": {"reshard_after_forward": 2, "layout": "flat"},
    "kept if it fits": {"reshard_after_forward": "auto", "schedule": SchedulePolicy(keep_for_backward=4000)},
    "kept if it fits, all": {"reshard_after_forward": "auto", "schedule": SchedulePolicy(keep_for_backward=1 << 20)},
    "sums": {"gradient_scale": "sum"},
    "scaled": {"gradient_scale": 0.3, "mp_policy": TO_BF16},
    "columns": {"shard_placement_fn": _columns},
    "columns, bf16": {"shard_placement_fn": _columns, "mp_policy": TO_BF16},
    "columns, optim": {"shard_placement_fn": _columns, "strategy": "optim"},
    "columns, HSDP": {"shard_placement_fn": _columns, **HSDP},
    "no prefetch": {"schedule": SchedulePolicy(prefetch=False)},
    "reduces waited for": {"schedule": SchedulePolicy(async_reduce=False)},
    "one gathered": {"schedule": SchedulePolicy(max_gathered=1)},
    "three gathered": {"schedule": SchedulePolicy(max_gathered=3)},
    "gathered by bytes": {"schedule": SchedulePolicy(max_gathered_bytes=1 << 20)},
    "one reducing": {"schedule": SchedulePolicy(max_reducing=1)},
    "three reducing": {"schedule": SchedulePolicy(max_reducing=3), "mp_policy": TO_BF16},
    "one process group": {"schedule": SchedulePolicy(separate_groups=False)},
    "three ahead, bf16": {"schedule": SchedulePolicy(max_gathered=3), "mp_policy": TO_BF16},
}

IN_BYTES = MixedPrecisionPolicy(
    param_dtype=BF16,
    gather_format="int8",
    reduce_format="int8",
    block=16,
    stochastic=True,
    encodes=lambda name, parameter: "." in name,
)
PER_AXIS = dataclasses.replace(IN_BYTES, reduce_format=("int8", "bf16_fp32"), gather_format="float8")
CHOICES |= {
    "in bytes": {"mp_policy": IN_BYTES},
    "in bytes, optim": {"mp_policy": IN_BYTES, "strategy": "optim"},
    "in bytes, HSDP": {"mp_policy": PER_AXIS, **HSDP},
    "in bytes, flat HFSDP": {"mp_policy": PER_AXIS, "layout": "flat", **HFSDP},
    "in bytes, resharded to two": {"mp_policy": IN_BYTES, "reshard_after_forward": 2},
    "in bytes, three ahead": {"mp_policy": IN_BYTES, "schedule": SchedulePolicy(max_gathered=3)},
}


_OFTEN = ("in bytes, HSDP", "in bytes, three ahead")  # of these, in every run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name.startswith("in bytes") and name not in _OFTEN else [])
        for name in CHOICES
    ],
)
def test_choices(name):
    with one_rank():
        train(sharded(make_net(depth=3 if "gathered" in name else 2), **CHOICES[name]))


@pytest.mark.parametrize("name", ["optim", "HFSDP", "bf16", "columns"])
def test_torch_steps_through_dtensors(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["optim_grads_params", "bf16 HSDP", "three gathered", "resharded to two"])
def test_recompute(name, recompute):
    with one_rank():
        train(sharded(make_net(depth=2, recompute=recompute), **CHOICES[name]))


# Accumulation


@pytest.mark.parametrize("name", ["no_shard", "optim", "bf16", "bf16 HSDP", "HFSDP", "f16 reduces", "columns"])
def test_gradients_that_stay_unreduced(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        accumulate(model, lambda left: model.set_requires_gradient_sync(left == 0))


@pytest.mark.parametrize("name", ["optim_grads_params", "optim", "bf16 HSDP", "HSDP of gradients", "HFSDP", "bf16"])
def test_microbatches(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        accumulate(model, as_microbatch(model))


@pytest.mark.parametrize("budget", [5000, 1 << 20])
def test_weights_kept_for_the_next_microbatch(budget):
    with one_rank():
        schedule = SchedulePolicy(keep_for_next=budget, keep_for_backward=budget // 2)
        model = sharded(schedule=schedule, reshard_after_forward="auto", mp_policy=TO_BF16)
        accumulate(model, as_microbatch(model))


def test_outer_reduces_that_wait():
    with one_rank():
        model = sharded(**CHOICES["bf16 HSDP"])
        accumulate(model, lambda left: model.set_requires_all_reduce(left == 0))


@pytest.mark.parametrize("name", ["optim_grads_params", "bf16", "HSDP"])
def test_backwards_that_do_not_wait_for_their_reduces(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        accumulate(model, lambda left: model.set_is_last_backward(left == 0))


def test_weights_that_stay_after_backward():
    with one_rank():
        model = sharded(mp_policy=TO_BF16)
        accumulate(model, lambda left: model.set_reshard_after_backward(left == 0))


# Models


def test_frozen_and_unused_and_whole_parameters():
    with one_rank():
        net = make_net()
        flatshard.no_shard(net.blocks[0].norm)
        for parameter in (*net.blocks[1].up.parameters(), net.norm.weight):
            parameter.requires_grad_(False)
        net.blocks[2].extra = nn.Linear(DIM, DIM)
        model = sharded(net, mp_policy=TO_BF16)
        model.set_reduce_scatter_unused_params(True)
        train(model)


def test_tied_parameters():
    with one_rank():
        net = make_net()
        net.head.weight = net.embed.weight
        train(sharded(net, mp_policy=TO_BF16))


def test_tied_parameters_of_two_units():
    with one_rank():
        net = make_net()
        net.head.weight = net.embed.weight
        train(sharded(net, [net.head]))


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_parameters_that_encode_themselves(sizes):
    with one_rank():
        net = make_net()
        for block in net.blocks:
            for layer in (block.up, block.down):
                layer.weight = nn.Parameter(Coded(layer.weight.data))
        model = sharded(net, sizes=sizes)
        train(model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2)))


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has no mesh per parameter")
def test_parameters_on_two_meshes():
    with one_rank():
        inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
        place = _fsdp_common.ShardPlacementResult(Shard(0), _fsdp_common.FSDPMeshInfo(inner, shard_mesh_dim=0))

        train(sharded(shard_placement_fn=lambda parameter: place if parameter.shape == (20, DIM) else None))


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_that_ranks_hold_apart_on_a_mesh_of_their_own(dim):
    with one_rank():
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        place = flatshard.Sharding(dim, sparse["edp"], sparse["ep"])
        train(sharded(shard_placement_fn=lambda parameter: place if parameter.shape == (20, DIM) else None))


def test_units_on_another_mesh_within_blocks():
    with one_rank():
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        net = make_net(depth=3)
        for block in net.blocks:
            fully_shard(block.up, mesh=sparse["edp"], mp_policy=TO_BF16)
        train(sharded(net, mp_policy=TO_BF16))


def test_a_list_of_modules_and_a_head_that_is_a_unit():
    with one_rank():
        net = make_net()
        train(sharded(net, [[net.norm, net.head]]))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_unit_whose_gradients_come_in_two_parts(hooked):
    with one_rank():
        net = make_net(recompute="reentrant")
        mesh = init_device_mesh("cpu", (4,))
        fully_shard(list(net.blocks), mesh=mesh)
        model = fully_shard(net, mesh=mesh, schedule=SchedulePolicy(max_reducing=4))
        for parameter in model.blocks.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(0.5))
        train(model)


def test_a_model_that_is_materialized():
    with one_rank():
        with torch.device("meta"):
            net = Net()
        model = sharded(net, mp_policy=TO_BF16)
        flatshard.materialize(model, init_fn=_fill)
        train(model)


@pytest.mark.parametrize("seed", range(10))
def test_random_models(seed):
    with one_rank():
        case, mesh = build(seed), init_device_mesh("cpu", (4,))
        for names, choices in case.units:
            modules = [case.model.get_submodule(name) for name in names]
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **choices)
        optimizer = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], lr=0.1)
        fully_shard_optimizer(optimizer)
        for number in range(4):
            case.clock["now"] = number
            loss = rows_of(case.model(torch.randn(3, ROW))).mean()
            if loss.requires_grad:
                loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def test_a_model_that_is_dropped_and_another_that_takes_its_memory():
    with one_rank():
        train(sharded(mp_policy=TO_BF16))


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (4, 0), (4, 3)])
def test_other_ranks(world, rank):
    with one_rank(world, rank):
        train(sharded(sizes=(world,), mp_policy=TO_BF16))


# Gradients


@pytest.mark.parametrize("name", ["optim_grads_params", "bf16", "optim", "HSDP", "columns"])
def test_kernels_that_write_gradients(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        assert flatshard.direct_wgrads(model)
        train(model)
        accumulate(model, lambda left: model.set_requires_gradient_sync(left == 0))


def test_hooks_of_users():
    with one_rank():
        model = sharded(mp_policy=TO_BF16)
        seen: list[torch.Tensor] = []
        for parameter in model.blocks[1].parameters():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().abs().sum()))
        for unit in (model.blocks[0], model):
            unit.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, async_op=True).wait())
        train(model)
        assert seen


def test_gradients_that_the_user_replaces():
    with one_rank():
        model = sharded()
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:3]:
            loss_of(model, tokens).backward()
            model.head.weight.grad = model.head.weight.grad * 2
            model.norm.weight.grad = None
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


# Communication


class Gather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


@pytest.mark.parametrize("name", ["optim_grads_params", "bf16 HSDP"])
def test_comms_of_users(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        for unit in model.blocks:
            unit.set_custom_all_gather(Gather())
            unit.set_custom_reduce_scatter(Reduce())
        train(model)


def test_prefetch_as_the_user_says():
    with one_rank():
        model = sharded(make_net(depth=3))
        first, second, third = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([third])
        third.set_modules_to_backward_prefetch([second, first])
        train(model)


def test_gathering_by_hand():
    with one_rank():
        model = sharded(make_net(depth=3), mp_policy=TO_BF16)
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:3]:
            handle = model.blocks[0].unshard(async_op=True)
            model.blocks[1].unshard()
            model.blocks[1].up.weight.sum()
            model.blocks[1].reshard()
            model.blocks[2].unshard(async_op=True)
            loss_of(model, tokens).backward()
            handle.wait()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["HSDP", *(pytest.param(n, marks=pytest.mark.full) for n in ("flat", "optim"))])
def test_whole_matrices(name):
    """Pieces of the next bucket come, and new weights go out, while a bucket is stepped."""
    with one_rank():
        model = sharded(**CHOICES[name])
        optimizer = fully_shard_optimizer(
            torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
            whole=lambda name, p: p.dim() == 2,
            owners="all" if name == "HSDP" else "shards",
            bucket_bytes=2000,
        )
        train(model, optimizer)


def test_gathers_wait_for_the_event_of_the_optimizer():
    with one_rank() as checker:
        model = sharded()
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:3]:
            loss_of(model, tokens).backward()
            optimizer.step()
            event = checker.event()
            event.record()
            model.set_post_optim_event(event)
            optimizer.zero_grad()


def test_models_that_share_lanes():
    with one_rank():
        models = [sharded() for _ in range(2)]
        flatshard.share_comm_ctx(models)
        optimizers = [optimizer_of(model) for model in models]
        for tokens in TOKENS[:3]:
            losses = [loss_of(model, tokens) for model in models]
            for loss in reversed(losses):
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


# What happens between steps


@pytest.mark.parametrize("name", ["optim_grads_params", "flat", "bf16 optim"])
def test_generation_and_state_dicts(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        train(model)
        with torch.inference_mode():
            model(TOKENS[0])
        state = {key: value.full_tensor() for key, value in model.state_dict().items()}
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        flatshard.grad_norms(model)
        flatshard.weight_norms(model)
        train(model)
        assert state


@pytest.mark.parametrize("name", ["optim_grads_params", "optim"])
def test_parameters_that_are_cast(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        train(model)
        model.to(BF16)
        train(model)


@pytest.mark.parametrize("name", ["optim_grads_params", "bf16 HSDP"])
def test_steps_that_break_off(name):
    class Broken(Block):
        calls = 0

        def forward(self, x):
            Broken.calls += 1
            if Broken.calls == 2:
                raise KeyError("broken")
            return super().forward(x)

    with one_rank():
        net = make_net()
        net.blocks[1] = Broken()
        model = sharded(net, **CHOICES[name])
        optimizer = optimizer_of(model)
        for number, tokens in enumerate((*TOKENS, *TOKENS)):
            try:
                loss = loss_of(model, tokens)
                if number == 3:
                    loss.register_hook(lambda grad: 1 / 0)
                if number != 4:  # one forward is without its backward
                    loss.backward()
            except (KeyError, ZeroDivisionError):
                model.reset()
            else:
                optimizer.step()
            optimizer.zero_grad()


def test_several_forwards_before_their_backwards():
    with one_rank():
        model = sharded(mp_policy=TO_BF16)
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:3]:
            losses = [loss_of(model, tokens), loss_of(model, tokens)]
            sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()


# By hand


@pytest.mark.parametrize(
    "name", ["no_shard", "optim", "bf16", "bf16 optim", "bf16 HFSDP", "optim_grads_params", "columns"]
)
def test_weights_held_and_refreshed_by_hand(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:2]:
            loss_of(model, tokens).backward()
            model.hold_weights()
            optimizer.step()
            loss_of(model, tokens).backward()
            model.refresh_weights()
            optimizer.step()  # nobody has waited for the refresh
            model.refresh_weights()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["no_shard", "optim", "bf16", "bf16 HSDP", "HFSDP"])
def test_gradients_synchronised_by_hand(name):
    with one_rank():
        model = sharded(**CHOICES[name])
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        optimizer = optimizer_of(model)
        for tokens in TOKENS[:2]:
            loss_of(model, tokens).backward()
            model.sync_gradients(wait=False)
            loss_of(model, tokens).backward()
            model.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()


def test_decoupled_gradients():
    with one_rank():
        model = sharded(**CHOICES["bf16 throughout"])
        model.set_decoupled_gradients()
        for tokens in TOKENS[:2]:
            loss_of(model, tokens).backward()
            loss_of(model, tokens).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().sub_(parameter.decoupled_grad.to_local().float())
            model.zero_grad()


@pytest.mark.parametrize("choices", ["bf16", "in bytes"])
def test_memory_that_is_kept_after_a_reshard(choices):
    with one_rank():
        model = sharded(**CHOICES[choices])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        model.set_keep_unsharded_storage(True)
        for tokens in TOKENS[:3]:
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_backwards_that_are_finalized_by_hand():
    with one_rank():
        model = sharded(**CHOICES["bf16 throughout"])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for tokens in TOKENS[:3]:
            model.set_manual_backward_finalization(True)
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss_of(model, tokens).backward()
            handle = model.finalize_backward(async_op=True)
            handle.wait()
            optimizer.step()
            optimizer.zero_grad()


# Steps of state and weights in host memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", "8 bits"])
@pytest.mark.parametrize(
    ("choices", "options"),
    [
        ({}, {"in_backward": True}),
        ({"mp_policy": TO_BF16}, {"offload_state": True}),
        ({"mp_policy": TO_BF16}, {"offload_state": True, "in_backward": True}),
        ({"strategy": "optim", "mp_policy": TO_BF16}, {"offload_state": True, "in_backward": True}),
        ({"offload_policy": CPUOffloadPolicy(), "mp_policy": TO_BF16}, {"in_backward": True}),
        ({"offload_policy": CPUOffloadPolicy(), "strategy": "optim"}, {"in_backward": True}),
        ({"offload_policy": CPUOffloadPolicy()}, {"in_backward": True}),
        ({"offload_policy": CPUOffloadPolicy(device_grad_bytes=1 << 30), "mp_policy": TO_BF16}, {}),
    ],
)
def test_steps_of_state_and_weights_in_host_memory(choices, options, kind, micro, monkeypatch):
    keep_apart(monkeypatch)
    monkeypatch.setattr(streaming, "PIECE", 64)
    monkeypatch.setattr(adamw8bit, "_LEAST_ROW", 8)
    with one_rank():
        model = sharded(make_net(depth=4), **choices)
        make = functools.partial(torch.optim.AdamW, fused=True) if kind == "adamw" else adamw8bit.AdamW8bit
        optimizer = fully_shard_optimizer(make(model.parameters(), lr=1e-2), **options)
        for number in range(3):
            for index in range(micro):
                with microbatch(model, is_first=index == 0, is_last=index == micro - 1):
                    loss_of(model, TOKENS[number]).backward()
            if not options:
                flatshard.clip_grad_norm_(model, 0.1)
                if number == 0:
                    assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                assert [value.sum() for state in optimizer.state.values() for value in state.values()]
                with torch.no_grad():
                    model(TOKENS[0])
