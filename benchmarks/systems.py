"""The systems under comparison.  A builder takes a :class:`Setup` and returns a function that runs one training step.

All systems train the same model on the same tokens with fused AdamW over float32 main weights; they differ in how the
weights, gradients and optimizer state are held and moved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import flatshard
import flatshard.megatron
from benchmarks.models import Llama, LlamaConfig
from benchmarks.moe import MixtureConfig, connect, is_expert, mixture

Step = Callable[[], Tensor]
Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]

Around = Callable[[int], AbstractContextManager[None]]

# Of gathers and reduces, by the end of a system's name. Embedding and head stay in bfloat16, except in the last.
FORMATS: dict[str, dict[str, Any]] = {
    "int8-gathers": {"gather_format": "int8"},
    "auto-gathers": {"gather_format": "auto"},
    "int8": {"gather_format": "int8", "reduce_format": "int8"},
    "int8-stochastic": {"gather_format": "int8", "reduce_format": "int8", "stochastic": True},
    "float8": {"gather_format": "float8"},
    "bf16-fp32": {"reduce_format": "bf16_fp32"},
    "int8-all": {"gather_format": "int8", "reduce_format": "int8", "encodes": lambda name, weight: weight.dim() > 1},
}

BETWEEN_MICROBATCHES = 2_600_000_000  # bytes: the 1B model in bfloat16
AHEAD = 2_700_000_000  # bytes: the head of the 8B model and four of its blocks


@dataclass(frozen=True)
class Setup:
    """``batch`` sequences of ``seq`` tokens per micro-batch and rank; compute and reduction in ``dtype``.

    ``compiled``: the blocks go through torch.compile, before they are sharded. ``offload``: main weights, gradients and
    optimizer state of sharded systems are in host memory, and the optimizer steps there, unless in the backward.
    ``device_grad_bytes``: as of flatshard's `CPUOffloadPolicy`.
    """

    model: LlamaConfig
    batch: int
    seq: int
    world: int
    microbatches: int = 1
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    offload: bool = False
    device_grad_bytes: int = 0

    @property
    def ep(self) -> int:
        """How many ranks have different experts."""
        return self.model.ep if isinstance(self.model, MixtureConfig) else 1

    def expert_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """The ranks that have the same experts, and those that have all of them together: the neighbours."""
        mesh = init_device_mesh(self.device, (self.world // self.ep, self.ep), mesh_dim_names=("edp", "ep"))
        return mesh["edp"], mesh["ep"]


def limit(setup: Setup) -> Step:
    """What no sharded system can beat: the whole model in the compute dtype, a rank's share of optimizer work, no wire.

    The optimizer's main weights are the first 1/W of every parameter; their gradients are cast from the model's and
    the result is cast back, since every system has to do this much.
    """
    model = on_meta(setup)
    model = model.to(setup.dtype).to_empty(device=setup.device)
    model.init_weights()
    weights = []
    for name, parameter in model.named_parameters():
        shards = setup.world // setup.ep if is_expert(name) else setup.world
        weights.append(parameter.detach().view(-1)[: -(-parameter.numel() // shards)])
    mains = [nn.Parameter(weight.float()) for weight in weights]
    for main in mains:
        main.grad = torch.empty_like(main)
    optimizer = adamw(mains)
    accumulate = accumulation(setup, model)

    def step() -> Tensor:
        loss = accumulate()
        grads = [parameter.grad.view(-1)[: main.numel()] for parameter, main in zip(model.parameters(), mains)]
        torch._foreach_copy_([main.grad for main in mains], grads)
        optimizer.step()
        torch._foreach_copy_(weights, [main.detach() for main in mains])
        model.zero_grad()
        return loss

    return step


def ddp(setup: Setup) -> Step:
    """PyTorch DistributedDataParallel: everything replicated."""
    model = on_meta(setup).to_empty(device=setup.device)
    model.init_weights()
    return trainer(setup, nn.parallel.DistributedDataParallel(model))


def fsdp2(setup: Setup, optimizer: str = "fused", clipped: bool = False, **units: Any) -> Step:
    """PyTorch FSDP2. ``optimizer``: one of `OPTIMIZERS`. ``clipped``: gradients are clipped to a norm of 1."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype)
    clip = nn.utils.clip_grad_norm_ if clipped else None
    return trainer(setup, sharded_model(setup, fully_shard, policy, **units), make=OPTIMIZERS[optimizer], clip=clip)


def fsdp2_captured(setup: Setup, **units: Any) -> Step:
    """FSDP2 with forward and backward in one CUDA graph and an eager optimizer step, as torchtitan's trainer has it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype)
    model = sharded_model(setup, fully_shard, policy, **units)
    optimizer, accumulate = adamw(list(model.parameters())), accumulation(setup, model)
    stream, graph, numbers, eager = torch.cuda.Stream(), torch.cuda.CUDAGraph(), itertools.count(), 2
    loss = torch.zeros(())

    def step() -> Tensor:
        nonlocal loss
        number = next(numbers)
        if number < eager:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = accumulate()
            torch.cuda.current_stream().wait_stream(stream)
        elif number == eager:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                loss = accumulate()
        if number >= eager:
            graph.replay()
        optimizer.step()
        if number < eager:
            optimizer.zero_grad()  # a replay writes its gradients anew
        return loss

    return step


def simple_fsdp(setup: Setup) -> Step:
    """torchtitan's SimpleFSDP, compiled as one graph; torchtitan (0.3) must be on the path.

    On a GPU, inductor buckets and overlaps collectives, as in torchtitan's trainer; that pass of torch 2.11 fails on
    attention with grouped queries, as these models have it. Weights stay gathered from forward to backward.
    """
    from torch._inductor import comm_analysis, config
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing_from_inductor_configs
    from torchtitan.experiments.graph_trainer.simple_fsdp import (
        MixedPrecisionPolicy,
        data_parallel,
        disable_active_parametrization,
    )

    def milliseconds(node: torch.fx.Node, numel: int | None = None) -> float | None:
        """Of a collective, by inductor's formula: there is no NCCL to ask in a rehearsal. None: to be measured."""
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            return None
        return comm_analysis.estimate_nccl_collective_runtime_from_fx_node(node, numel, use_nccl_estimator=False)

    model, mesh = on_meta(setup), init_device_mesh(setup.device, (setup.world,))
    data_parallel(model, mesh, "fully_shard", MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype))
    with disable_active_parametrization():
        model.to_empty(device=setup.device).init_weights()
    config.allow_buffer_reuse = config.reorder_for_peak_memory = config.reorder_for_compute_comm_overlap = False
    if setup.device == "cuda":
        overlap = config.aten_distributed_optimizations
        overlap.collective_bucketing = overlap.insert_overlap_deps = True
        overlap.custom_runtime_estimation = milliseconds
        config.post_grad_custom_post_pass = lambda graph: schedule_overlap_bucketing_from_inductor_configs(
            graph.owning_module
        )
    model.compile(fullgraph=True)
    return trainer(setup, model)


def flat(
    setup: Setup,
    finer: bool = False,
    formats: str | None = None,
    rows: bool = False,
    ahead: int = 0,
    kept: bool = False,
    hybrid: str | None = None,
    in_backward: bool = False,
    offload_state: bool | None = None,
    device_grads: bool = False,
    clipped: bool = False,
    optimizer: str = "fused",
    **schedule: Any,
) -> Step:
    """flatshard, by FSDP2's own argument names, with its optimizer step on local tensors.

    ``formats``: of what travels, one of `FORMATS`. ``rows``: of the embedding, only those travel that are read.
    ``ahead``: bytes of weights that are gathered at most, more than the next unit. ``hybrid``: the strategy along the
    axis of nodes, as of `hybrid_mesh`. ``in_backward``, ``offload_state``: as of `fully_shard_optimizer`.
    The latter leaves weights on the device. ``device_grads``: those of offloaded weights stay there until the step.
    ``clipped``: gradients are clipped to a norm of 1. ``optimizer``: one of `OPTIMIZERS`.
    ``schedule``: more of `SchedulePolicy`. Others: as of `shard_units`.
    It is told which micro-batch runs, and keeps blocks gathered from one to the next in memory that is free then.
    """
    offload, grads = setup.offload and not offload_state, 1 << 40 if device_grads else 0
    setup = replace(setup, offload=offload, device_grad_bytes=grads)
    chosen = {} if formats is None else FORMATS[formats]
    policy = flatshard.MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype, **chosen)
    told = flatshard.SchedulePolicy(
        keep_for_next=BETWEEN_MICROBATCHES if setup.microbatches > 1 else 0,
        max_gathered_bytes=ahead,
        **schedule,
    )
    fully_shard = functools.partial(flatshard.fully_shard, schedule=told)
    if hybrid == "optim":
        fully_shard = functools.partial(fully_shard, outer_strategy=hybrid)
    model = sharded_model(setup, fully_shard, policy, finer=finer, rows=rows, kept=kept, hybrid=hybrid)
    wrap = functools.partial(flatshard.fully_shard_optimizer, in_backward=in_backward, offload_state=offload_state)
    make, clip = OPTIMIZERS[optimizer], flatshard.clip_grad_norm_ if clipped else None
    if setup.microbatches == 1:
        return trainer(setup, model, wrap, make=make, clip=clip)

    def around(number: int) -> AbstractContextManager[None]:
        return flatshard.microbatch(model, is_first=number == 0, is_last=number == setup.microbatches - 1)

    return trainer(setup, model, wrap, around, make, clip)


def by_torchao(setup: Setup, ours: bool) -> Step:
    """torchao's float8 training, with its gathers in float8, of the blocks' layers; torchao must be on the path."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=setup.device == "cpu")
    model = on_meta(setup)
    for block in model.blocks:
        convert_to_float8_training(block, config=config)
    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype)
    model = initialised(setup, model, flatshard.fully_shard if ours else fully_shard, policy)

    def after(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        found = flatshard.fully_shard_optimizer(optimizer) if ours else optimizer
        found.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
        return found

    return trainer(setup, model, after)


def deepspeed(setup: Setup) -> Step:
    """DeepSpeed's ZeRO-3; the package deepspeed (0.19) must be on the path. One micro-batch per step.

    The optimizer is torch's, as in all systems: DeepSpeed's own for CPUs would be compiled first.
    """
    import deepspeed

    if not dist.is_initialized():
        dist.init_process_group()
    model = on_meta(setup).to_empty(device="cpu" if setup.offload else setup.device)
    for name, buffer in model.named_buffers(recurse=False):
        setattr(model, name, buffer.to(setup.device))
    model.init_weights()
    on_host = {"device": "cpu", "pin_memory": setup.device != "cpu"}
    places = {"offload_param": on_host, "offload_optimizer": on_host} if setup.offload else {}
    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "bf16": {"enabled": setup.dtype is torch.bfloat16},
        "zero_optimization": {"stage": 3, **places},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = adamw(list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    accumulate = accumulation(setup, engine)

    def step() -> Tensor:
        loss = accumulate()
        engine.step()
        return loss

    return step


def hybrid_mesh(setup: Setup, *further: str) -> DeviceMesh:
    """Nodes of up to eight ranks: axes ``outer`` and ``fsdp``, and ``further`` ones of one rank each."""
    inside = min(8, setup.world)
    shape = (setup.world // inside, inside, *(1 for _ in further))
    return init_device_mesh(setup.device, shape, mesh_dim_names=("outer", "fsdp", *further))


def megatron(setup: Setup, hybrid: str | None = None) -> Step:
    """Megatron-FSDP: the package megatron-fsdp (0.6.1), which must be on the path. CUDA only."""
    import megatron_fsdp
    from megatron_fsdp import param_and_grad_buffer

    # Checkpoints need to know what other ranks hold, and a rehearsal has no others to ask.
    for name in ("update_uneven_dtensor_chunk_metadata", "validate_uneven_dtensor"):
        setattr(param_and_grad_buffer, name, lambda tensor: None)
    return by_megatrons_names(setup, megatron_fsdp, hybrid)


def flat_megatron(setup: Setup, hybrid: str | None = None) -> Step:
    """flatshard under Megatron-FSDP's names, with the same choices."""
    return by_megatrons_names(setup, flatshard.megatron, hybrid)


def by_megatrons_names(setup: Setup, surface: Any, hybrid: str | None) -> Step:
    """Weights are made whole, in the compute dtype, before they are sharded. Gradients rest in float32, as everywhere
    here, and travel in the compute dtype. ``hybrid``: the strategy along the axis of nodes.
    """
    mesh, further = init_device_mesh(setup.device, (setup.world, 1), mesh_dim_names=("fsdp", "tp")), {}
    if hybrid is not None:
        mesh = hybrid_mesh(setup, "tp")
        everyone = mesh["outer", "fsdp"]._flatten("everyone").get_group()
        further = {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": hybrid, "hybrid_fsdp_group": everyone}
    whole = on_meta(setup).to(setup.dtype).to_empty(device=setup.device)
    whole.init_weights()
    policy = surface.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=setup.dtype
    )
    model = surface.fully_shard_model(
        whole,
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[type(whole.blocks[0]), nn.Embedding],
        mixed_precision_policy=policy,
        sync_model_each_microbatch=setup.microbatches == 1,
        preproc_state_dict_for_dcp_ckpt=False,
        **further,
    )

    def around(number: int) -> AbstractContextManager[None]:
        return nullcontext() if number == setup.microbatches - 1 else model.no_sync()

    wrap = functools.partial(surface.fully_shard_optimizer, preproc_state_dict_for_dcp_ckpt=False)
    return trainer(setup, model, wrap, around if setup.microbatches > 1 else None)


BASES: dict[str, Callable[..., Step]] = {
    "limit": limit,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-torchao": functools.partial(by_torchao, ours=False),
    "simple-fsdp": simple_fsdp,
    "megatron-fsdp": megatron,
    "deepspeed": deepspeed,
    "flatshard": flat,
    "flatshard-megatron": flat_megatron,
    "flatshard-torchao": functools.partial(by_torchao, ours=True),
}
# Arguments of these, by what may follow their names.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"formats": name} for name in FORMATS},
    "rows": {"rows": True},
    "finer": {"finer": True},
    "ahead": {"finer": True, "ahead": AHEAD},
    "kept": {"kept": True},
    "hsdp": {"hybrid": "no_shard"},
    "hfsdp": {"hybrid": "optim"},
    "in-backward": {"in_backward": True},
    "offload-state": {"in_backward": True, "offload_state": True},
    "device-grads": {"device_grads": True},
    "clipped": {"clipped": True},
    "8bit": {"optimizer": "8bit"},
    "unfused": {"optimizer": "unfused"},
    # one knob of `SchedulePolicy` each (docs/decisions/032-knobs.md)
    "no-prefetch": {"prefetch": False},
    "no-overlap": {"async_reduce": False},
    "one-gathered": {"max_gathered": 1},
    "one-reducing": {"max_reducing": 1},
    "shared-groups": {"separate_groups": False},
}
CAPTURED = "-captured"


def get_system(name: str) -> Callable[[Setup], Step]:
    """A builder by name: one of `BASES`, any of `OPTIONS` that it takes, perhaps `CAPTURED`, with hyphens between."""
    rest = name.removesuffix(CAPTURED) + "-"
    base = max((each for each in BASES if rest.startswith(f"{each}-")), key=len, default="")
    rest, chosen = rest[len(base) :], dict[str, Any]()
    while base and rest != "-":
        option = max((each for each in OPTIONS if rest.startswith(f"-{each}-")), key=len, default="")
        if not option:
            break
        rest, chosen = rest[len(option) + 1 :], chosen | OPTIONS[option]
    if rest != "-":
        raise ValueError(f"no system is called {name}; names are put together from {[*BASES]}, {[*OPTIONS]}, captured")
    if not name.endswith(CAPTURED):
        return functools.partial(BASES[base], **chosen)
    if base == "fsdp2":
        return functools.partial(fsdp2_captured, **chosen)
    return lambda setup: flatshard.capture(BASES[base](setup, **chosen))


def on_meta(setup: Setup) -> Llama:
    with torch.device("meta"):
        model = mixture(setup.model) if isinstance(setup.model, MixtureConfig) else Llama(setup.model)
    for block in model.blocks if setup.compiled else ():
        # What sends tokens to experts depends on their number: no one graph.
        (block.attention if setup.ep > 1 else block).compile(fullgraph=True)
    return model


def sharded_model(setup: Setup, fully_shard: Callable[..., object], policy: object, **units: Any) -> Llama:
    if setup.offload:
        host = torch.distributed.fsdp.CPUOffloadPolicy()
        if is_ours(fully_shard):
            host = flatshard.CPUOffloadPolicy(device_grad_bytes=setup.device_grad_bytes)
        fully_shard = functools.partial(fully_shard, offload_policy=host)
    return initialised(setup, on_meta(setup), fully_shard, policy, **units)


def initialised(setup: Setup, model: Llama, fully_shard: Callable[..., object], policy: object, **units: Any) -> Llama:
    """A model that has no values yet, sharded, and with some. ``units``: as of `shard_units`."""
    if setup.ep > 1:
        fully_shard = around_experts(setup, model, fully_shard, policy)
    if units.get("hybrid") == "optim":
        model.to_empty(device=setup.device).init_weights()
    shard_units(setup, model, fully_shard, policy, **units)
    if setup.ep > 1 and not is_ours(fully_shard):
        prefetch_explicitly(model)
    if units.get("hybrid") != "optim":
        model.to_empty(device="cpu" if setup.offload else setup.device)
        for name, buffer in model.named_buffers(recurse=False):
            setattr(model, name, buffer.to(setup.device))
        model.init_weights()
    return model


def is_ours(fully_shard: Callable[..., object]) -> bool:
    return getattr(fully_shard, "func", fully_shard) is flatshard.fully_shard


def around_experts(
    setup: Setup, model: Llama, fully_shard: Callable[..., object], policy: object
) -> Callable[..., object]:
    """What shards the units of a mixture, whose experts live on a mesh of their own.

    Ours: experts belong to their block's unit, and have their mesh by parameter. FSDP2 as torchtitan sets it up: a unit
    for the experts of each block, and a factor, since their gradients are of the data of all ranks.
    """
    edp, ep = setup.expert_meshes()
    connect(model, ep.get_group())
    if is_ours(fully_shard):
        experts = {parameter for name, parameter in model.named_parameters() if is_expert(name)}
        sharding = flatshard.Sharding(mesh=edp, apart=ep)
        return functools.partial(fully_shard, shard_placement_fn=lambda p: sharding if p in experts else None)
    # Fewer experts than ranks, or as many: cut across, as torchtitan does.
    across = edp.size() > setup.model.experts // setup.ep
    for block in model.blocks:
        unit = block.ffn.experts
        choose = {"shard_placement_fn": lambda parameter: Shard(1)} if across else {}
        fully_shard(unit, mesh=edp, mp_policy=policy, **choose)
        unit.set_gradient_divide_factor(setup.world)
    return fully_shard


def prefetch_explicitly(model: Llama) -> None:
    """Without it, FSDP2 gathers the next block when the host comes to it, after it has waited for counts of tokens."""
    units = [[model.embed], *([block, block.ffn.experts] for block in model.blocks), [model.head]]
    for before, after in pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def shard_units(
    setup: Setup,
    model: Llama,
    fully_shard: Callable[..., object],
    policy: object,
    finer: bool = False,
    rows: bool = False,
    kept: bool = False,
    hybrid: str | None = None,
) -> None:
    """Embedding, blocks and head are the units; the head stays gathered until its backward, and with ``kept`` all do.

    ``finer``: so is the feed-forward part of the first block. The reduces of that block are the last but one of a step,
    and nothing is left to hide them; most of them can then begin while its attention is in backward.
    ``rows``: the embedding is looked up where its rows are. ``hybrid``: the mesh is `hybrid_mesh`.
    """
    mesh = init_device_mesh(setup.device, (setup.world,)) if hybrid is None else hybrid_mesh(setup)
    if finer:
        fully_shard(model.blocks[0].ffn, mesh=mesh, reshard_after_forward=not kept, mp_policy=policy)
    for unit in (model.embed, *model.blocks, model.head):
        chosen = {"rows": rows} if rows and unit is model.embed else {}
        reshard = not kept and unit is not model.head
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, **chosen)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def trainer(
    setup: Setup,
    model: nn.Module,
    wrap: Wrap | None = None,
    around: Around | None = None,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip: Callable[..., object] | None = None,
) -> Step:
    parameters = list(model.parameters())
    optimizer = (make or adamw)(parameters)
    if wrap is not None:
        optimizer = wrap(optimizer)
    accumulate = accumulation(setup, model, around)

    def step() -> Tensor:
        loss = accumulate()
        if clip is not None:
            clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accumulation(setup: Setup, model: nn.Module, around: Around | None = None) -> Step:
    """Forward and backward over the micro-batches of a step, each inside ``around`` of its number."""
    seed = 1 + (dist.get_rank() if dist.is_initialized() else 0)
    generator = torch.Generator().manual_seed(seed)
    shape = (setup.microbatches, setup.batch, setup.seq + 1)
    tokens = torch.randint(setup.model.vocab, shape, generator=generator).to(setup.device)

    def run() -> Tensor:
        total = torch.zeros((), device=setup.device)
        for number, row in enumerate(tokens):
            with nullcontext() if around is None else around(number):
                loss = model(row[:, :-1], row[:, 1:]) / setup.microbatches
                loss.backward()
            total += loss.detach()
        return total

    return run


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # A step that counts on the device can be captured; fused ones do in any case.
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=parameters[0].is_cuda)


OPTIMIZERS = {
    "fused": adamw,
    "unfused": functools.partial(torch.optim.AdamW, lr=1e-4),
    "8bit": functools.partial(flatshard.optim.AdamW8bit, lr=1e-4),
}
