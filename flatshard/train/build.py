"""Build the model, the mesh and the optimizer of a run."""

from __future__ import annotations

import functools
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard.api import fully_shard
from flatshard.optim.adamw8bit import AdamW8bit
from flatshard.optim.combined import CombinedOptimizer
from flatshard.optim.step import fully_shard_optimizer, whole_optimizer
from flatshard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from flatshard.train.model import Llama, mean_loss
from flatshard.train.settings import Mistake, TrainSettings
from flatshard.wrapping import is_large


class Causal(nn.Module):
    """A causal language model of Transformers with the interface of `Llama`: it computes its loss in chunks."""

    def __init__(self, inner: Any, chunk: int) -> None:
        super().__init__()
        self.inner, self.chunk = inner, chunk

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        if targets is None:
            return self._logits(hidden)
        return mean_loss(self._logits, hidden, targets, self.chunk)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.inner.get_output_embeddings()(hidden)
        cap = getattr(self.inner.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def build_model(settings: TrainSettings, vocab: int) -> tuple[nn.Module, list[nn.Module], float]:
    """The unsharded model, its blocks, and its FLOPs per token. The weights are the same on all ranks."""
    torch.manual_seed(settings.seed)
    if settings.model is None:
        shape = settings.shape(vocab)
        model = Llama(shape)
        return model, list(model.blocks), shape.flops_per_token(settings.context)
    inner = _from_transformers(settings.model, vocab, settings.context)
    if settings.recompute:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    names = set(inner._no_split_modules or ())
    blocks = [module for module in inner.modules() if type(module).__name__ in names]
    used = sum(parameter.numel() for parameter in inner.parameters())
    used -= inner.get_input_embeddings().weight.numel() * (not inner.config.tie_word_embeddings)
    return Causal(inner, settings.loss_chunk), blocks, 6.0 * used


def _from_transformers(path: Path, vocab: int, context: int) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
    except ImportError as error:
        raise Mistake("--model: transformers is not installed: pip install 'flatshard[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(str(path))
        known = getattr(config.get_text_config(), "vocab_size", vocab)
        if known < vocab:
            raise Mistake(f"--model {path}: has a vocabulary of {known} tokens; that of the data, {vocab}, is larger")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < context:
            raise Mistake(f"--context {context}: --model {path} has {positions} positions; give at most that")
        if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
            logging.disable_progress_bar()  # otherwise every rank shows one
            return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if _looks_ahead(model):
            raise Mistake(f'--model {path}: is not causal: tokens attend to later ones; is "is_decoder": true missing?')
        return model
    except Mistake:
        raise
    except Exception as error:  # of any type: models check their configurations, and may need other packages
        raise Mistake(f"--model {path}: {shorten(str(error), 300)}") from error


@torch.no_grad()
def _looks_ahead(model: Any) -> bool:
    """Whether the output for a token depends on the next token. Transformers loads some encoders as causal models."""
    tokens = torch.tensor([[0, 0], [0, 1]])
    first = model.eval().base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, 0]
    model.train()
    return not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-4)


def build_mesh(settings: TrainSettings, kind: str, world: int, nodes: int) -> DeviceMesh:
    """A mesh of one axis ``dp`` or, for HSDP and HFSDP, of two axes ``replicas`` and ``shard``."""
    if settings.strategy not in ("hsdp", "hfsdp"):
        return init_device_mesh(kind, (world,), mesh_dim_names=("dp",))
    outer = settings.replicas or nodes
    if world % outer:  # nodes have different numbers of processes
        raise Mistake(f"{world} processes on {nodes} nodes: nodes have different numbers of them; give --replicas N")
    return init_device_mesh(kind, (outer, world // outer), mesh_dim_names=("replicas", "shard"))


def shard(model: nn.Module, blocks: list[nn.Module], settings: TrainSettings, mesh: DeviceMesh) -> None:
    """Shard the model. Units are the blocks, the model itself and, with --rows or if it is large, the embedding."""
    half = settings.precision == "bfloat16"
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.float32 if half and settings.reduce_format == "none" else None,
        gather_format=None if settings.gather_format == "none" else settings.gather_format,
        reduce_format=None if settings.reduce_format == "none" else settings.reduce_format,
    )
    strategy = 3 if mesh.ndim > 1 else int(settings.strategy[-1])
    table = _table(model)
    if settings.rows and table is None:
        raise Mistake("--rows: the embedding of --model is tied to its head, which needs all rows; leave --rows out")
    on_host = CPUOffloadPolicy(device_grad_bytes=int(1e9 * settings.device_grads))
    tables = [table] if table is not None and (settings.rows or is_large(table, blocks)) else []
    for module in (*tables, *blocks, model):
        fully_shard(
            module,
            rows=settings.rows and module is table,
            mesh=mesh,
            mp_policy=precision,
            strategy=strategy,
            outer_strategy="optim" if settings.strategy == "hfsdp" else None,
            layout=settings.layout,
            reshard_after_forward=None if settings.reshard else False,
            offload_policy=on_host if settings.offload else OffloadPolicy(),
        )


def _table(model: nn.Module) -> nn.Module | None:
    """The embedding of a model; None if it is tied to the head."""
    if isinstance(model, Llama):
        return model.embed
    assert isinstance(model, Causal)
    table: nn.Module = model.inner.get_input_embeddings()
    return None if model.inner.config.tie_word_embeddings else table


def build_optimizer(model: nn.Module, blocks: list[nn.Module], settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only; or Muon for the matrices of blocks, and AdamW for the rest."""
    kind = AdamW8bit if settings.optimizer == "adamw8bit" else functools.partial(torch.optim.AdamW, fused=True)
    inside = {parameter for block in blocks for parameter in block.parameters() if parameter.dim() >= 2}
    muon = settings.optimizer == "muon"
    parameters = [parameter for parameter in model.parameters() if not (muon and parameter in inside)]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = kind(groups, lr=settings.lr, betas=(0.9, 0.95))
    adamw = fully_shard_optimizer(made, in_backward=settings.in_backward)
    if not muon:
        return adamw

    def make(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        # Scale Muon's updates to the size of AdamW's, so that both can have the same learning rate.
        options: Any = {"lr": settings.lr, "weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        return torch.optim.Muon(matrices, **options)

    return CombinedOptimizer([whole_optimizer(make, model, lambda name, parameter: parameter in inside), adamw])


def set_capturable(optimizer: torch.optim.Optimizer, lr: Tensor | None) -> None:
    """Let a captured step read its learning rate from ``lr``; None: undo this, as a checkpoint may have set it."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = lr is not None
        if lr is not None:
            group["lr"] = lr
