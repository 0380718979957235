"""One rank of `tests.megatron.gpt`: Megatron-Core's GPTModel, trained by Megatron-Core's own loop."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import types
import typing
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

import flatshard.megatron

STEPS, MICRO, ROWS, LENGTH, VOCAB, CLIP = 4, 2, 8, 16, 64, 0.5
WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 64, 2
LR, DECAY, EPS = 1e-2, 0.01, 1e-5

# By name: how many ranks, and what is other than ZeRO 3 in float32.
CASES: dict[str, dict] = {
    "no_shard": {"ranks": 2, "strategy": "no_shard"},
    "optim": {"ranks": 2, "strategy": "optim"},
    "optim_grads": {"ranks": 2, "strategy": "optim_grads"},
    "optim_grads_params": {"ranks": 2},
    "arguments": {"ranks": 2, "arguments": True},
    "gated, bf16, checkpoint": {"ranks": 2, "gated": True, "bf16": True, "checkpoint": True},
    "second version": {"ranks": 2, "version": 2},
    "4 ranks": {"ranks": 4},
    "experts": {"ranks": 4, "experts": 4},
    "TP 2": {"ranks": 4, "tp": 2},
    "TP 2, gated, bf16, checkpoint": {"ranks": 4, "tp": 2, "gated": True, "bf16": True, "checkpoint": True},
    "EP 2": {"ranks": 4, "experts": 4, "ep": 2},
    "HSDP": {"ranks": 4, "instances": 2},
    "HFSDP": {"ranks": 4, "instances": 2, "outer": "optim"},
}


def layout_of(case):
    """Cases of one layout can share processes: Megatron-Core's process groups are made once."""
    return case["ranks"], case.get("tp", 1), case.get("ep", 1), case.get("instances", 1)


class _Stream:
    """What Megatron-Core asks of a CUDA stream or event: there is nothing to wait for."""

    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class _Absent(types.ModuleType):
    """Triton, where it is not installed: kernels that nobody calls here can be written down."""

    __path__: typing.ClassVar = []
    __version__ = "3.0.0"

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else self


def on_cpu():
    """Let Megatron-Core find a CPU wherever it asks for the GPU by name."""

    def here(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            device = kwargs.get("device")
            if "cuda" in str(device) or (isinstance(device, int) and not isinstance(device, bool)):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    made, kind = DeviceMesh.from_group, torch.Tensor.type
    DeviceMesh.from_group = staticmethod(lambda group, device_type, *args, **kw: made(group, "cpu", *args, **kw))
    for owner, names in (
        (torch, ("tensor", "zeros", "ones", "empty", "full", "arange")),
        (torch.Tensor, ("to", "new_empty", "new_zeros")),
    ):
        for name in names:
            setattr(owner, name, here(getattr(owner, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = lambda self, *args: kind(self, *args) if args else kind(self).replace("torch.F", "torch.cuda.F")
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_rng_state = lambda *args: torch.zeros(1, dtype=torch.uint8)
    for name in ("set_rng_state", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.utils")  # which must not find what stands in
        sys.modules.update({name: _Absent(name) for name in ("triton", "triton.language")})


class Rank:
    """A process with its device, and the groups of one layout."""

    def __init__(self, device, case, system):
        from megatron.core import parallel_state, tensor_parallel

        self.device, self.system = device, system
        self.state = parallel_state
        _, tp, ep, instances = layout_of(case)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            num_distributed_optimizer_instances=instances,
        )
        # No dropout here, so nothing asks the generators of tensor parallelism for anything.
        tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()

    # The model

    def config_of(self, case):
        from megatron.core.transformer.transformer_config import TransformerConfig

        further = {}
        if case.get("gated"):
            further = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
        if case.get("experts"):
            further = {
                "num_moe_experts": case["experts"],
                "expert_model_parallel_size": case.get("ep", 1),
                "moe_token_dispatcher_type": "allgather",
                "moe_router_load_balancing_type": "none",
                "add_bias_linear": False,
            }
        return TransformerConfig(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            ffn_hidden_size=HIDDEN,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            tensor_model_parallel_size=case.get("tp", 1),
            bf16=bool(case.get("bf16")),
            params_dtype=torch.bfloat16 if case.get("bf16") else torch.float32,
            **further,
        )

    def model_of(self, case, config):
        """A model whose values follow from the names of its parameters, whoever holds which part of them."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.module import Float16Module

        spec = get_gpt_layer_local_spec(num_experts=case.get("experts"))
        model = GPTModel(config, spec, VOCAB, LENGTH, position_embedding_type="rope")
        tp, ep = self.state.get_tensor_model_parallel_world_size(), self.state.get_expert_model_parallel_world_size()
        first = self.state.get_expert_model_parallel_rank() * case.get("experts", 0) // ep
        for name, parameter in model.named_parameters():
            name = re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found[0]) + first), name)
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            dim = dim if tp > 1 and getattr(parameter, "allreduce", True) else None
            shape = [size * tp if axis == dim else size for axis, size in enumerate(parameter.shape)]
            whole = torch.randn(shape, generator=rng) * 0.1
            whole = 1 + whole if "layernorm" in name and name.endswith("weight") else whole
            if dim is not None:
                parts = whole.chunk(tp * parameter.partition_stride, dim)
                whole = torch.cat(parts[self.state.get_tensor_model_parallel_rank() :: tp], dim)
            parameter.data.copy_(whole)
        model.to(self.device)
        return Float16Module(config, model) if case.get("bf16") else model

    def loss_of(self, model, rows):
        tokens, labels = rows[:, :-1], rows[:, 1:]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=self.device).triu(1)[None, None]
        places = torch.arange(LENGTH, device=self.device).expand_as(tokens)
        return model(tokens, places, mask, labels=labels).float().mean()

    def data(self):
        rng = torch.Generator().manual_seed(3)
        return torch.randint(0, VOCAB, (STEPS, MICRO, ROWS, LENGTH + 1), generator=rng).to(self.device)

    # One process, with the whole batch

    def alone(self, case):
        case = {**case, "tp": 1, "ep": 1}
        model = self.model_of(case, self.config_of(case))
        mains = [parameter.detach().float() for parameter in model.parameters()]
        groups = [{"params": mains, "weight_decay": DECAY}]
        if case.get("arguments"):  # of which Megatron-LM's training makes groups
            plain = [main for main in mains if main.dim() == 1]
            groups = [
                {"params": plain, "weight_decay": 0.0},
                {**groups[0], "params": [m for m in mains if m.dim() > 1]},
            ]
        optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
        losses, norms = [], []
        for step in self.data():
            model.zero_grad()
            parts = [self.loss_of(model, rows) / MICRO for rows in step]
            for part in parts:
                part.backward()
            for main, parameter in zip(mains, model.parameters()):
                main.grad = parameter.grad.float()
            norms.append(torch.nn.utils.clip_grad_norm_(mains, CLIP).item())
            optimizer.step()
            with torch.no_grad():
                for main, parameter in zip(mains, model.parameters()):
                    parameter.copy_(main)
            losses.append(sum(part.item() for part in parts))
        return {"losses": losses, "norms": norms}

    # Sharded, by Megatron-Core

    def sharded(self, case):
        """As Megatron-Core's ``get_model`` and ``setup_model_and_optimizer`` do with ``--use-megatron-fsdp``."""
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        config, second = self.config_of(case), case.get("version") == 2
        ddp = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=not second,
            data_parallel_sharding_strategy=case.get("strategy", "optim_grads_params"),
            num_distributed_optimizer_instances=case.get("instances", 1),
            outer_dp_sharding_strategy=case.get("outer", "no_shard"),
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=self.device.type == "cuda",  # NVIDIA's asks Gloo for what only NCCL has
            **({"megatron_fsdp_version": 2} if second else {}),
        )
        groups = {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()} if second else {}
        # Contexts of NVIDIA's second version take nothing else.
        claimed = torch.device("cuda:0") if second and self.system == "NVIDIA" else self.device
        model = FullyShardedDataParallel(config, ddp, self.model_of(case, config), device=claimed, **groups)
        chosen = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=LR,
            weight_decay=DECAY,
            adam_eps=EPS,
            clip_grad=CLIP,
            use_distributed_optimizer=not second,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        )
        return config, model, get_megatron_optimizer(chosen, [model])

    def mine(self, rows):
        """This rank's share of a micro-batch."""
        group = self.state.get_data_parallel_group()
        return rows.chunk(group.size())[group.rank()]

    def forward_step(self, batches, model):
        loss = self.loss_of(model, self.mine(next(batches)))
        return loss, lambda output: (output, {"loss": output.detach().clone()})

    def mean(self, losses):
        """Over micro-batches and data-parallel ranks."""
        group, loss = self.state.get_data_parallel_group(), torch.stack([each["loss"] for each in losses]).mean()
        dist.all_reduce(loss, group=group)
        return loss.item() / group.size()

    def trained(self, case, made=None, steps=slice(None)):
        """By Megatron-Core's own schedule, `finalize_model_grads` and optimizer."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        config, model, optimizer = made or self.sharded(case)
        config.finalize_model_grads_func = finalize_model_grads
        if hasattr(model, "no_sync"):
            config.no_sync_func = model.no_sync
        losses, norms = [], []
        for step in self.data()[steps]:
            if case.get("version") != 2:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            told = get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=iter(step),
                model=[model],
                num_microbatches=MICRO,
                seq_length=LENGTH,
                micro_batch_size=len(self.mine(step[0])),
            )
            stepped, norm, _ = optimizer.step()
            assert stepped
            losses.append(self.mean(told))
            norms.append(float(norm))
        return {"losses": losses, "norms": norms}

    def saved_and_loaded(self, case):
        """By Megatron-Core's functions for its format ``fsdp_dtensor``, gated layers in halves; then trained on."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
            preprocess_state_dict_for_uneven_dtensor,
        )
        from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict

        def states(model, optimizer, is_loading=False):
            whole, state = model.state_dict(), optimizer.sharded_param_state_fsdp_dtensor(is_loading)
            parts, parts_of_state = handle_swiglu_in_state_dict(model, whole, state)
            return whole, state, preprocess_state_dict_for_uneven_dtensor({"model": parts, "optimizer": parts_of_state})

        made = self.sharded(case)
        before = self.trained(case, made, slice(0, 2))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(states(made[1].module, made[2])[2], checkpoint_id=folder[0])
        wanted = self.trained(case, made, slice(2, 4))
        made = self.sharded(case)
        with torch.no_grad():
            for parameter in made[1].parameters():
                getattr(parameter, "_local_tensor", parameter).zero_()
        whole, state, parts = states(made[1].module, made[2], is_loading=True)
        dcp.load(parts, checkpoint_id=folder[0])
        made[1].module.load_state_dict(whole, strict=False)  # it is loaded already, by names of Float16Module's own
        made[2].load_state_dict(state)
        found = self.trained(case, made, slice(2, 4))
        whole = {key: before[key] + wanted[key] for key in before}
        return {**whole, "reloaded": before["losses"] + found["losses"]}

    def by_arguments(self, case):
        """From the command line on: Megatron-LM's arguments, `get_model` and `train_step`."""
        typing.override = getattr(typing, "override", lambda function: function)  # of Python 3.12
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.training import arguments, global_vars, training

        told = f"""
            --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
            --overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion --transformer-impl local
            --num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {HEADS} --ffn-hidden-size {HIDDEN}
            --seq-length {LENGTH} --max-position-embeddings {LENGTH} --position-embedding-type rope
            --micro-batch-size {ROWS // case["ranks"]} --global-batch-size {ROWS * MICRO} --train-iters {STEPS}
            --lr {LR} --min-lr {LR} --lr-decay-style constant --weight-decay {DECAY} --adam-eps {EPS} --clip-grad {CLIP}
            --adam-beta2 0.999 --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion
            --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --no-persist-layer-norm
            --use-cpu-initialization --vocab-size {VOCAB} --tokenizer-type NullTokenizer
        """
        sys.argv = ["pretrain_gpt.py", *told.split()]
        args = arguments.validate_args(arguments.parse_args())
        args.gradient_reduce_div_fusion = self.device.type == "cuda"
        global_vars.set_args(args)
        global_vars._set_timers(args)
        init_num_microbatches_calculator(args.rank, None, args.global_batch_size, args.micro_batch_size, case["ranks"])
        config = arguments.core_transformer_config_from_args(args)
        if self.device.type == "cpu":
            training.megatron_FSDP = functools.partial(training.megatron_FSDP, device=self.device)
        model = training.get_model(lambda **asked: self.model_of(case, config))
        config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model[0].no_sync
        chosen, overrides = training.get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(chosen, model, config_overrides=overrides)
        scheduler = training.get_optimizer_param_scheduler(optimizer)
        losses, norms = [], []
        for number, step in enumerate(self.data()):
            found = training.train_step(
                self.forward_step,
                iter(step),
                model,
                optimizer,
                scheduler,
                config,
                get_forward_backward_func(),
                iteration=number,
            )
            losses.append(self.mean([found[0]]))
            norms.append(float(found[5]))
        return {"losses": losses, "norms": norms}

    def run(self, case):
        if self.system == "one process":
            return self.alone(case)
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter

        if case.get("version") == 2 and not hasattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2"):
            return {"skipped": "this Megatron-Core has no second version"}
        if case.get("arguments"):
            return self.by_arguments(case)
        return self.saved_and_loaded(case) if case.get("checkpoint") else self.trained(case)


def _with_streams():
    """Buffers of NVIDIA's second version insist on the stream that made them."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer

    made = DBuffer.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.allocation_stream = _Stream()

    DBuffer.__init__ = init


def _note(results, row):
    if dist.get_rank() == 0:
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main():
    """``SYSTEM DEVICE SECONDS RESULTS CASE...``: lines of JSON go to the file RESULTS, one when ready, one per case."""
    system, kind, seconds, results, *names = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device(kind if kind == "cpu" else "cuda:0")
    if kind == "cpu":
        on_cpu()
    else:
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl")
    import megatron.core

    if system == "flatshard":
        flatshard.megatron.install()
    elif kind == "cpu" and any(CASES[name].get("version") == 2 for name in names):
        _with_streams()
    alone = {"ranks": 1} if system == "one process" else CASES[names[0]]
    rank = Rank(device, alone, system)
    if system == "flatshard":
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter

        assert mcore_fsdp_adapter.MegatronFSDP is flatshard.megatron.MegatronFSDP
    note = functools.partial(_note, Path(results))
    note({"core": megatron.core.__version__})
    for name in names:
        faulthandler.dump_traceback_later(float(seconds))
        begin = time.monotonic()
        found = rank.run(CASES[name])
        note({"case": name, **found, "seconds": round(time.monotonic() - begin, 1)})
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups of three libraries: nothing here depends on the order in which they go


if __name__ == "__main__":
    main()
