"""AdamW with state in 8 bits, the same bits on any number of ranks and in any layout.

Blocks of 256 elements share a scale. Every row (a slice of dim 0) starts a new block, and shards consist of whole rows,
so a block is never split, and its elements do not depend on the rank that holds it. A first moment is stored as the
square root of its ratio to the largest of its block, in 127 steps to either side of zero; a second moment as the fourth
root, in 255 steps. This resolves the largest to under one percent, and spans more than four and nine orders of
magnitude.

Every operation rounds once and separately. There are no fused multiply-adds, which some machines would use for some
elements of a tensor and not for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from flatshard import _arguments, _torch
from flatshard.buffer import kernels
from flatshard.buffer.ragged import RaggedDTensor
from flatshard.optim import adamw8bit_kernel
from flatshard.optim.combined import run_closure

BLOCK = 256
_LEAST_ROW = 64  # elements: below it, scales would take more than they are worth


ROWWISE = ("exp_avg_scale", "exp_avg_sq_scale")  # entries with as many rows as the parameter


class _Code(NamedTuple):
    """How a moment is stored: ``encode`` of its ratio to the largest of its block, as a multiple of 1 / ``steps``."""

    dtype: torch.dtype
    steps: int
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


_CODES = {
    "exp_avg": _Code(torch.int8, 127, lambda x: x.abs().sqrt_().mul_(x.sign()), lambda x: x * x.abs()),
    "exp_avg_sq": _Code(torch.uint8, 255, lambda x: x.sqrt_().sqrt_(), lambda x: x.square_().square_()),
}


class AdamW8bit(Optimizer):
    """torch's AdamW with moments in 8 bits: 2 + 8/256 bytes per parameter where torch's takes 8.

    Works on plain and on sharded parameters, as it is: the bits of weights and state do not depend on the number of
    ranks, the layout or the strategy. Moments of parameters whose rows have fewer than 64 elements, norms and biases
    above all, are float32. In the state of others, ``exp_avg`` and ``exp_avg_sq`` are codes of the shape of the
    parameter, and ``exp_avg_scale`` and ``exp_avg_sq_scale`` have a row of scales for each of its rows.

    Parameters must be cut into rows: what tensor parallelism has cut on another dim can be stepped whole
    (``fully_shard_optimizer(..., whole=True)``).
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, torch.Tensor) and _arguments.real(name, value) < 0:
                raise ValueError(f"{name}={value!r}: must not be negative")
        if len(betas) != 2 or not all(0 <= _arguments.real("betas", beta) < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: must be two numbers, each at least 0 and less than 1")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, self.state[parameter])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`, which would make floats of all that is loaded."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters):
            for key, value in state_dict["state"].get(number, {}).items():
                if key != "step":
                    self.state[parameter][key] = value.to(self.state[parameter][key].device)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            require_rows(parameter)
            _begin(parameter, state)
        state["step"] += 1
        step = float(state["step"])
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        unbias1, unbias2 = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
        decay, eps = 1 - lr * group["weight_decay"], group["eps"]
        weight, gradient = _torch.held_of(parameter), _torch.held_of(parameter.grad)  # type: ignore[arg-type]
        if "exp_avg_scale" in state and kernels.usable(weight):
            codes = [_held(parameter, state, name, code.dtype) for name, code in _CODES.items()]
            scales = [_held(parameter, state, name, torch.float32) for name in ROWWISE]
            if all(tensor.is_contiguous() for tensor in (weight, gradient, *codes, *scales)):
                factors = (decay, beta1, 1 - beta1, beta2, 1 - beta2, unbias1, unbias2, eps, lr)
                adamw8bit_kernel.step(weight, gradient, codes, scales, BLOCK, factors)
                return
        gradient = gradient.float()
        first = _read(parameter, state, "exp_avg")
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second = _read(parameter, state, "exp_avg_sq")
        second.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        _write(state, "exp_avg", first)
        _write(state, "exp_avg_sq", second)
        # The update is that of the moments before they were rounded.
        second.mul_(unbias2).sqrt_().add_(eps)
        update = first.mul_(unbias1).div_(second).mul_(lr)
        new = weight.float() if weight.dtype != torch.float32 else weight
        new.mul_(decay).sub_(update)
        if new is not weight:
            weight.copy_(new)


def is_quantized(shape: Sequence[int]) -> bool:
    """Whether the moments of a parameter are in 8 bits; by its rows, so that it is so on every rank."""
    return len(shape) > 1 and math.prod(shape[1:]) >= _LEAST_ROW


def state_bytes(shape: Sequence[int]) -> float:
    """Bytes of state for each element of a parameter of this shape."""
    row = math.prod(shape[1:])
    return 2 + 8 * -(-row // BLOCK) / row if is_quantized(shape) else 8.0


def require_rows(parameter: torch.Tensor) -> None:
    if isinstance(parameter, DTensor) and is_quantized(parameter.shape):
        dims = {getattr(p, "dim", 0) for p in parameter.placements if not isinstance(p, Replicate)}
        if dims - {0}:
            raise ValueError(
                f"AdamW8bit: a parameter of shape {tuple(parameter.shape)} is sharded on dim {max(dims)}, which splits "
                "the blocks that share a scale; shard it on dim 0, or call fully_shard_optimizer with whole=True"
            )


def _begin(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    local, quantized = _torch.held_of(parameter), is_quantized(parameter.shape)
    state["step"] = torch.tensor(0.0)
    for name, code in _CODES.items():
        codes = torch.zeros_like(local, dtype=code.dtype if quantized else torch.float32)
        state[name] = with_rows_of(parameter, codes)
        if quantized:
            blocks = -(-parameter.shape[1:].numel() // BLOCK)
            scales = torch.zeros(local.shape[0], blocks, dtype=torch.float32, device=local.device)
            state[f"{name}_scale"] = with_rows_of(parameter, scales)


def with_rows_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows are sharded as those of a parameter. ``local``: this rank's rows."""
    if not isinstance(parameter, DTensor):
        return local
    if local.shape == _torch.local_of(parameter).shape:
        return _torch.like_dtensor(parameter, local)
    shape, spec = torch.Size((parameter.shape[0], *local.shape[1:])), _torch.spec_of(parameter)
    made = _torch.make_dtensor(local, parameter.device_mesh, spec.placements, shape)
    return RaggedDTensor.make(local, made, parameter._cut) if isinstance(parameter, RaggedDTensor) else made


def _blocks(local: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of blocks; a view of it if its rows are of whole blocks."""
    rows = local.flatten(1)
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(rows.shape[0], rows.shape[1] // BLOCK, BLOCK)


def _held(parameter: torch.Tensor, state: dict[str, Any], name: str, dtype: torch.dtype) -> torch.Tensor:
    """This rank's shard of a state entry. An entry that was loaded in full is sharded first, as the parameter is."""
    value = state[name]
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        local = _torch.held_of(parameter)
        if value.shape == parameter.shape:
            part = _torch.part_of(value, parameter).to(local.device, copy=True)
            value = state[name] = _torch.like_dtensor(parameter, part)
        else:
            first = next((offsets[0] for offsets, _ in _torch.boxes_of(parameter)), 0)
            part = value[first : first + local.shape[0]].to(local.device, copy=True)
            value = state[name] = with_rows_of(parameter, part)
    if value.dtype != dtype:
        value = state[name] = value.to(dtype)
    return _torch.held_of(value)


def cut_entries(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Shard entries that were loaded in full, as the parameter is sharded."""
    for name in [name for name in state if name != "step"]:
        _held(parameter, state, name, state[name].dtype)


def _read(parameter: torch.Tensor, state: dict[str, Any], name: str) -> torch.Tensor:
    """A moment in float32, in new memory."""
    if f"{name}_scale" not in state:
        return _held(parameter, state, name, torch.float32).clone()
    code = _CODES[name]
    codes = _held(parameter, state, name, code.dtype)
    scales = _held(parameter, state, f"{name}_scale", torch.float32)
    values = code.decode(_blocks(codes).float().mul_(1 / code.steps)).mul_(scales.unsqueeze(-1)).flatten(1)
    width = codes.shape[1:].numel()
    return (values if values.shape[1] == width else values[:, :width].contiguous()).view(codes.shape)


def _write(state: dict[str, Any], name: str, values: torch.Tensor) -> None:
    codes = _torch.held_of(state[name])
    if f"{name}_scale" not in state:
        codes.copy_(values)
        return
    blocks, steps = _blocks(values), _CODES[name].steps
    scales = blocks.abs().amax(-1)
    _torch.held_of(state[f"{name}_scale"]).copy_(scales)
    parts = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    coded = _CODES[name].encode(parts).mul_(steps).round_().clamp_(-steps, steps).flatten(1)
    codes.copy_(coded[:, : codes.shape[1:].numel()].reshape(codes.shape))
