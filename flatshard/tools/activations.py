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

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("this attention only counts what forward saves; it has no backward")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = _Fused.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Count:
    """Adds up the bytes of saved storages, each once, for the block that is running."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.saved = [0] * (len(blocks) + 1)  # the last entry is for what is outside of blocks
        self.inputs = [0] * len(blocks)
        self._number = -1
        self._seen = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._alive: list[Any] = []  # keeps storages alive, so that no other storage gets the same key

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(tensor)
            self.saved[self._number] += tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        numbers = {block: number for number, block in enumerate(blocks)}

        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._number = numbers[block]
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            hidden = [each for each in given if each.requires_grad]
            self.inputs[self._number] = sum(each.untyped_storage().nbytes() for each in hidden)

        def leave(block: nn.Module, args: Any, out: Any) -> None:
            self._number = -1

        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(leave).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor))
            yield


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # a storage on the meta device has no address


def activations_of(
    model: nn.Module, blocks: Sequence[nn.Module], batch: int, length: int, dtype: torch.dtype | None
) -> Activations:
    """The activations of a language model on the meta device, for tokens (batch, length) and compute in ``dtype``.

    A model of Transformers also computes its loss, with the logits of the whole batch.
    """
    kinds = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    if dtype is not None:
        model.to(dtype)
    count = _Count(model, blocks)
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    is_transformers = hasattr(model, "config") and hasattr(model, "get_output_embeddings")
    try:
        with patch.object(nn.functional, "scaled_dot_product_attention", _attention), count.watching(blocks):
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
    return Activations(tuple(count.saved[:-1]), tuple(count.inputs), count.saved[-1])
