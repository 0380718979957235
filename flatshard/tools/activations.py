"""The memory of activations: the model runs on the meta device, and the tensors that autograd saves are counted.

Every saved storage counts once; parameters do not count. Attention counts as a fused kernel, which saves its inputs,
its result and one number per row and head. With recompute, each block saves only its inputs, and the largest block
counts once in full, for the time when it is recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from flatshard import _torch


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch. ``blocks``: what each block saves. ``inputs``: the inputs of each block."""

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    rest: int  # what is saved outside of blocks: embeddings, head, loss

    @property
    def saved(self) -> int:
        """Bytes without recompute."""
        return sum(self.blocks) + self.rest

    @property
    def recomputed(self) -> int:
        """Bytes if every block is recomputed."""
        return sum(self.inputs) + max(self.blocks, default=0) + self.rest


class _Fused(torch.autograd.Function):
    """Attention on the meta device that saves what a fused kernel saves."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Rows before heads in memory, as in the results of kernels, so that the next operation need not copy.
        out = q.transpose(-3, -2).new_empty(*q.transpose(-3, -2).shape[:-1], v.shape[-1]).transpose(-3, -2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = _Fused.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def _counting(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[list[int], list[int]]]:
    """Count the bytes of storages that the body saves, each once, by the block that is running, and of blocks' inputs.

    Yields both. The last entry of the first is for what is outside of blocks.
    """
    saved, inputs, running = [0] * (len(blocks) + 1), [0] * len(blocks), -1
    numbers = {block: number for number, block in enumerate(blocks)}
    # Keeps storages alive, so that no other storage gets the same key.
    seen: dict[int, Any] = {_torch.storage_id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _torch.storage_id(tensor) not in seen:
            seen[_torch.storage_id(tensor)] = tensor
            saved[running] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal running
        running = numbers[block]
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        inputs[running] = sum(each.untyped_storage().nbytes() for each in given if each.requires_grad)

    def leave(block: nn.Module, args: Any, out: Any) -> None:
        nonlocal running
        running = -1

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        yield saved, inputs


def activations_of(
    model: nn.Module, blocks: Sequence[nn.Module], batch: int, length: int, dtype: torch.dtype | None
) -> Activations:
    """The activations of a language model on the meta device, for tokens (batch, length) and compute in ``dtype``.

    A model of Transformers also computes its loss, with the logits of the whole batch.
    """
    kinds = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    if dtype is not None:
        model.to(dtype)
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    is_transformers = hasattr(model, "config") and hasattr(model, "get_output_embeddings")
    try:
        attention = patch.object(nn.functional, "scaled_dot_product_attention", _attention)
        with attention, _counting(model, blocks) as (saved, inputs):
            if is_transformers:
                # With this mask the model does not read values of tokens; the fused kernel ignores it.
                mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device="meta")
                masks = {"attention_mask": mask}
                if getattr(model.config, "is_encoder_decoder", False):  # the decoder has as many tokens as the encoder
                    masks["decoder_attention_mask"] = mask
                model(input_ids=tokens, labels=tokens, use_cache=False, **masks)
            else:
                model(tokens)
    except Exception as error:
        raise ValueError(
            f"--batch {batch} --length {length}: activations are unknown, because {type(model).__name__} does not run "
            f"on the meta device: {type(error).__name__}: {error}; give --activations SIZE instead"
        ) from error
    finally:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.data = value.data.to(kinds[name])
    return Activations(tuple(saved[:-1]), tuple(inputs), saved[-1])
