"""What a user chooses: precision, offloading, and how weights, gradients and optimizer state are placed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flatshard.layout import Flat, Partial, Placement, Replicate


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit. ``None`` keeps what is there.

    ``param_dtype``: what the forward multiplies with, and what travels in a gather (compute).
    ``reduce_dtype``: what travels in a reduce; default: ``param_dtype``.
    ``output_dtype``: floating-point outputs of the unit's forward are cast to it.
    ``cast_forward_inputs``: floating-point inputs of the forward are cast to ``param_dtype``.
    ``main_dtype``: what the optimizer updates and checkpoints hold; default: the dtype of the parameter.
    ``grad_dtype``: what gradients rest in; default: ``main_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"MixedPrecisionPolicy({name}={value!r}): must be a floating-point torch.dtype or None")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where main weights, gradients and optimizer state rest: on the device of the mesh."""


@dataclass(frozen=True)
class Placements:
    """How the three buffers of a group rest, one placement per axis of the mesh.

    ``parameter``: compute weights between their uses. ``gradient``: gradients between a backward and the optimizer
    step. ``optimizer``: main weights, and with them the optimizer's state.
    """

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]


def fully_sharded(axes: int) -> Placements:
    """Everything sharded over the last axis of the mesh; on a mesh of two axes, replicated over the first."""
    rest: tuple[Placement, ...] = (*(Replicate() for _ in range(axes - 1)), Flat())
    return Placements(rest, rest, rest)


def replicated(axes: int) -> Placements:
    """A copy on every rank."""
    rest = tuple(Replicate() for _ in range(axes))
    return Placements(rest, rest, rest)


def unreduced(axes: int) -> tuple[Placement, ...]:
    """Gradients as autograd leaves them: every rank has its own, and their mean is wanted."""
    return tuple(Partial("avg") for _ in range(axes))


@dataclass(frozen=True)
class SchedulePolicy:
    """How far communication runs ahead, for all units below the root that is given it.

    ``prefetch``: gather the units that come next, by the recorded order. Off: each unit is gathered when it is needed.
    ``async_reduce``: let reduces overlap what follows. Off: each is waited for where it is launched.
    ``max_gathered``: units gathered at a time beyond those kept (the one in use and those ahead of it); at least 1.
    ``max_reducing``: reduces in flight, and with them the full-size gradients they read; at least 1.
    ``separate_groups``: give reduces process groups of their own, so that they can overlap gathers on the wire.
    """

    prefetch: bool = True
    async_reduce: bool = True
    max_gathered: int = 2
    max_reducing: int = 2
    separate_groups: bool = True

    def __post_init__(self) -> None:
        if self.max_gathered < 1 or self.max_reducing < 1:
            raise ValueError("SchedulePolicy: max_gathered and max_reducing must be at least 1")
