"""What a user chooses: precision, offloading, and how weights, gradients and optimizer state are placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _arguments
from flatshard.layout import Block, Flat, Partial, Placement, Replicate, Whole, is_sharded


class Refusal(ValueError, AssertionError):
    """A mistake in a call, for which PyTorch's FSDP2 raises AssertionError: caught by code that was written for it."""


class Unsupported(ValueError, NotImplementedError):
    """As `Refusal`, where PyTorch raises NotImplementedError."""


GatherFormat: TypeAlias = Literal["int8", "float8"]
ReduceFormat: TypeAlias = Literal["int8", "bf16_fp32"]


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """The dtypes of a unit. ``None`` keeps what is there. It is one of PyTorch's, too, for those who ask.

    ``param_dtype``: what the forward multiplies with, and what travels in a gather (compute).
    ``reduce_dtype``: what travels in a reduce; default: ``param_dtype``.
    ``output_dtype``: floating-point outputs of the unit's forward are cast to it.
    ``cast_forward_inputs``: floating-point inputs of the forward are cast to ``param_dtype``.
    ``main_dtype``: what the optimizer updates and checkpoints hold; default: the dtype of the parameter.
    ``grad_dtype``: what gradients rest in; default: ``main_dtype``.

    Formats on the wire, with fewer bytes than dtypes have (docs/formats.md); by default there are none:

    ``gather_format``: weights travel as one byte each, ``"int8"`` or ``"float8"`` (e4m3), and a scale per block. They
    are encoded once per optimizer step, from main weights, and multiplied with in ``param_dtype``.
    ``reduce_format``: gradients travel as ``"int8"`` with a scale per block, or as ``"bf16_fp32"``: in bfloat16. Either
    way they are added in float32, in the order of ranks, and rounded no more. A pair is of the two axes of a mesh,
    (outer, inner); one alone is of the axis that shards.
    ``block``: elements of a row that share a scale: a power of two.
    ``stochastic``: round gradients in int8 up or down at random, so that their mean is right.
    ``encodes``: called with the name of a parameter, from its unit down, and the parameter: whether it is to travel in
    one byte. Default: matrices do, apart from embeddings, heads, routers and small ones.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    gather_format: GatherFormat | None = None
    reduce_format: ReduceFormat | tuple[ReduceFormat | None, ReduceFormat | None] | None = None
    block: int = 128
    stochastic: bool = False
    # Not shown: it would look different on every rank, which are asked what it has chosen instead.
    encodes: Callable[[str, nn.Parameter], bool] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"MixedPrecisionPolicy({name}={value!r}): must be a floating-point torch.dtype or None")
        _arguments.flag("cast_forward_inputs", self.cast_forward_inputs)
        self._check_formats()

    def _check_formats(self) -> None:
        gathers, reduces = (get_args(kind) for kind in (GatherFormat, ReduceFormat))
        if self.gather_format is not None and self.gather_format not in gathers:
            raise ValueError(f"gather_format={self.gather_format!r}: must be one of {', '.join(gathers)} or None")
        given = self.reduce_format
        for each in given if isinstance(given, tuple) else (given,):
            if each is not None and each not in reduces:
                raise ValueError(f"reduce_format={given!r}: must be one of {', '.join(reduces)}, None, or two of these")
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"reduce_format={given!r}: a pair is of the two axes of a mesh, (outer, inner)")
        _arguments.whole_number("block", self.block, 16)
        if self.block & (self.block - 1) or self.block > 1024:
            raise ValueError(f"block={self.block}: must be a power of two, 16 to 1024")
        _arguments.flag("stochastic", self.stochastic)
        if self.encodes is not None and not callable(self.encodes):
            raise TypeError(f"encodes={self.encodes!r}: must be a function of a name and a parameter, or None")

    def reduce_formats(self, axes: int) -> tuple[ReduceFormat | None, ...]:
        """Of each axis of a mesh of so many."""
        given = self.reduce_format if isinstance(self.reduce_format, tuple) else (None, self.reduce_format)
        return (None,) * (axes - 2) + given[-axes:] if axes else ()

    @property
    def has_formats(self) -> bool:
        return self.gather_format is not None or self.reduce_format not in (None, (None, None))

    # What the dtypes of one group are. The parameters that were sharded had dtype ``own``.

    def compute_of(self, own: torch.dtype) -> torch.dtype:
        """What the forward multiplies with."""
        return self.param_dtype if self.param_dtype is not None and own.is_floating_point else own

    def grad_of(self, main: torch.dtype, compute: torch.dtype) -> torch.dtype:
        """What gradients rest in."""
        return self.grad_dtype or main

    def reduce_of(self, compute: torch.dtype, grad: torch.dtype) -> torch.dtype:
        """What travels in a reduce."""
        return self.reduce_dtype or compute


@dataclass(frozen=True)
class OffloadPolicy:
    """Where main weights, gradients and optimizer state rest: on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights, gradients and optimizer state rest in host memory, and the optimizer steps there.

    Weights are copied to the device for each gather; gradients are reduced there and copied back, and are complete when
    the backward returns. ``pin_memory``: page-locked memory, from and to which copies overlap compute. On a mesh of
    CPUs everything is in host memory anyway.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _arguments.flag("pin_memory", self.pin_memory)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of the mesh of all parallelism are data-parallel, by their names.

    ``shard``: those that parameters are sharded over. ``replicate``: those that keep copies. Several of a kind count as
    one. With ``replicate`` alone nothing is sharded, and gradients are averaged.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("shard", "replicate"):
            given = getattr(self, name)
            named = given if isinstance(given, (tuple, list)) else (given,)
            if given is not None and not all(isinstance(each, str) for each in named):
                raise TypeError(
                    f"DataParallelMeshDims({name}={given!r}): must be the name of an axis, or a tuple of some"
                )
        twice = set(self.shard_names) & set(self.replicate_names)
        if twice:
            raise ValueError(f"DataParallelMeshDims: {min(twice)!r} is named twice; an axis shards or replicates")
        if not self.shard_names and not self.replicate_names:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


@dataclass(frozen=True)
class Sharding:
    """How one parameter is sharded, as a ``shard_placement_fn`` may return it.

    ``dim``: it is cut on this dim, as torch.chunk cuts it. None: on dim 0, or on another one where dim 0 would be
    padded much, as that of stacked experts ``(experts, in, out)`` is where there are fewer experts than ranks.
    ``mesh``: the ranks that hold it together, if they are not those of the unit's mesh. Its gradient is all the same
    the mean over the ranks of the unit's ``data_mesh``, whose data has reached it.
    ``apart``: a mesh of one axis along which ranks hold different tensors under this name: a plain ``(experts, ...)``
    of which each rank of expert parallelism has its own, all of one shape. The forward sees this rank's. For norms,
    state dicts and checkpoints they are one tensor, of which each rank has its part of dim 0.
    """

    dim: int | None = None
    mesh: DeviceMesh | None = None
    apart: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and (not isinstance(self.dim, int) or isinstance(self.dim, bool)):
            raise TypeError(f"Sharding(dim={self.dim!r}): must be a number or None")
        _check_meshes("Sharding", self.mesh, self.apart)


@dataclass(frozen=True)
class Experts:
    """Where the experts of a model are, for `shard_model`.

    ``modules``: classes, or their import paths, whose instances hold nothing but experts' parameters.
    ``mesh``: the ranks that hold the same experts, and shard them.
    ``apart``: where each rank along this mesh has experts of its own as plain tensors, as in `Sharding`. Not needed
    where they are DTensors that say so.
    """

    modules: Sequence[type[nn.Module] | str]
    mesh: DeviceMesh
    apart: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.modules, (list, tuple)) or not self.modules:
            raise ValueError(f"Experts(modules={self.modules!r}): must be a list of classes and import paths")
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(f"Experts(mesh={self.mesh!r}): must be a DeviceMesh")
        _check_meshes("Experts", self.mesh, self.apart)


def _check_meshes(what: str, mesh: Any, apart: Any) -> None:
    """Raise unless these can be the ``mesh`` and ``apart`` of a parameter."""
    for name, given in (("mesh", mesh), ("apart", apart)):
        if given is not None and not isinstance(given, DeviceMesh):
            raise TypeError(f"{what}({name}={given!r}): must be a DeviceMesh")
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(f"{what}: mesh has {mesh.ndim} axes; it must have one (shard) or two (outer, inner)")
    if apart is not None and apart.ndim != 1:
        raise ValueError(f"{what}: apart has {apart.ndim} axes; it must have one")


# PyTorch's policies say the same, so code that has one can pass it.
_OWN = {
    torch_fsdp.MixedPrecisionPolicy: MixedPrecisionPolicy,
    torch_fsdp.OffloadPolicy: OffloadPolicy,
    torch_fsdp.CPUOffloadPolicy: CPUOffloadPolicy,
    getattr(torch_fsdp, "DataParallelMeshDims", None): DataParallelMeshDims,  # since torch 2.13
}


def own_policy(given: Any) -> Any:
    """``given``, or the policy of ours that says what a policy of PyTorch's says."""
    kind = _OWN.get(type(given))
    return given if kind is None else kind(**{field.name: getattr(given, field.name) for field in fields(given)})


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class Placements:
    """How the three buffers of a group rest, one placement per axis of the mesh.

    ``parameter``: compute weights between their uses. ``gradient``: gradients between a backward and the optimizer
    step. ``optimizer``: main weights, and with them the optimizer's state.
    """

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for name in ("parameter", "gradient", "optimizer"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(p, get_args(Placement)) for p in given):
                raise TypeError(f"Placements({name}={given!r}): must be a tuple of flatshard.layout placements")
            wrong = [p for p in given if isinstance(p, (Block, Whole))]
            if wrong:
                raise ValueError(f"Placements({name}): {wrong[0]} is not supported here; use Flat() or Replicate()")
            cut = [is_sharded(p) for p in given]
            if cut != sorted(cut):
                raise ValueError(f"Placements({name}): a buffer is sharded over the last axes first, not over {cut}")
        axes = {len(self.parameter), len(self.gradient), len(self.optimizer)}
        if len(axes) != 1:
            raise ValueError(f"Placements: parameter, gradient and optimizer must name the same axes, not {axes}")
        for axis, (parameter, gradient, optimizer) in enumerate(zip(self.parameter, self.gradient, self.optimizer)):
            if isinstance(parameter, Partial) or isinstance(optimizer, Partial):
                raise ValueError(
                    f"Placements: on axis {axis} parameters or optimizer state are Partial; only gradients can be"
                )
            if not is_sharded(optimizer) and (is_sharded(parameter) or is_sharded(gradient)):
                raise ValueError(
                    f"Placements: axis {axis} shards parameters or gradients but not the optimizer state, which would "
                    "update parts that its rank does not hold; shard the optimizer state too"
                )
            if isinstance(gradient, Replicate) and is_sharded(optimizer):
                raise ValueError(f"Placements: on axis {axis} gradients rest Replicate; use Partial or Flat()")


Strategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

# What rests sharded on an axis, by the name and number of its strategy: parameter, gradient, optimizer.
_INNER: dict[str, tuple[bool, bool, bool]] = {
    "no_shard": (False, False, False),
    "optim": (False, False, True),
    "optim_grads": (False, True, True),
    "optim_grads_params": (True, True, True),
}
_OUTER = ("no_shard", "optim")


def placements_for(strategy: Strategy | int | Placements | None, outer: Strategy | int | None, axes: int) -> Placements:
    """The placements of a strategy on a mesh of one axis, or of two (outer, inner).

    ``strategy`` (default ``optim_grads_params``) is of the last axis, ``outer`` (default ``no_shard``) of the first.
    """
    if isinstance(strategy, Placements):
        if len(strategy.parameter) != axes:
            raise ValueError(f"strategy names {len(strategy.parameter)} axes; the mesh has {axes}")
        if outer is not None:
            raise ValueError("outer_strategy is part of Placements; give one or the other")
        return strategy
    if outer is not None and axes == 1:
        raise ValueError(f"outer_strategy={outer!r} needs a mesh of two axes (outer, inner)")
    name = "optim_grads_params" if strategy is None else strategy_name("strategy", strategy)
    inner = _INNER[name]
    kept, partial = Replicate(), Partial("avg")
    unsharded: tuple[Placement, ...] = (kept, partial, kept)
    last: list[Placement] = [Flat() if sharded else other for sharded, other in zip(inner, unsharded)]
    if axes == 1:
        return Placements((last[0],), (last[1],), (last[2],))
    outer_name = "no_shard" if outer is None else strategy_name("outer_strategy", outer, _OUTER)
    if outer_name == "optim" and name != "optim_grads_params":
        raise ValueError(f"outer_strategy='optim' needs strategy='optim_grads_params', not {name!r}")
    first = Flat() if outer_name == "optim" else kept
    return Placements((kept, last[0]), (partial, last[1]), (first, last[2]))


def on_another_mesh(
    strategy: Strategy | int | Placements | None, outer: Strategy | int | None, axes: int
) -> Placements:
    """The placements, on a mesh of so many axes, of a strategy that was chosen for a mesh of perhaps another number."""
    if isinstance(strategy, Placements) and axes < len(strategy.parameter):
        return Placements(strategy.parameter[-axes:], strategy.gradient[-axes:], strategy.optimizer[-axes:])
    return placements_for(strategy, outer if axes > 1 else None, axes)


def strategy_name(what: str, given: str | int, names: tuple[str, ...] = tuple(_INNER)) -> str:
    """The name of a strategy that was given by it, or by its number. ``what`` was given, for errors."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        return names[given]
    if given not in names:
        raise ValueError(f"{what}={given!r}: must be one of {', '.join(names)} or their numbers 0 to {len(names) - 1}")
    assert isinstance(given, str)
    return given


def resident(placements: Placements) -> Placements:
    """The same optimizer state with weights that rest whole on every rank: nothing is gathered during a pass."""
    return replace(replicated(len(placements.parameter)), optimizer=placements.optimizer)


def replicated(axes: int) -> Placements:
    """A copy on every rank; gradients are reduced on the last micro-batch."""
    rest = (Replicate(),) * axes
    return Placements(rest, (Partial("avg"),) * axes, rest)


SEPARATE_GROUPS = True  # whether reduces have process groups of their own where nobody says (decision 002)


@dataclass(frozen=True)
class SchedulePolicy:
    """How far communication runs ahead, for all units below the root that is given it.

    ``prefetch``: gather the units that come next, by the recorded order. Off: each unit is gathered when it is needed.
    ``async_reduce``: let reduces overlap what follows. Off: each is waited for where it is launched.
    ``max_gathered``: units gathered at a time beyond those kept (the one in use and those ahead of it); at least 1.
    Units on another mesh than the root's, experts within a block, do not count.
    ``max_gathered_bytes``: further ones are gathered ahead as long as all gathered weights, kept ones included, take no
    more than this. Where units differ in size, those before and after a large one can be several. Under a
    ``gather_format`` those ahead count with the bytes that travel.
    ``max_reducing``: reduces in flight, and with them the full-size gradients they read; at least 1.
    ``separate_groups``: give reduces process groups of their own where gathers use those of the mesh, so that they can
    overlap them on the wire. None: `SEPARATE_GROUPS`, and in any case for models with optional units, which need them.
    ``keep_for_backward``: bytes of gathered weights that units with ``reshard_after_forward="auto"`` may keep from
    their forward to their backward. What saves most time on the wire per byte is kept; `summary` shows what.
    ``keep_for_next``: bytes of gathered weights that may be kept from the backward of one micro-batch to the forward of
    the next, inside `microbatch(is_last=False)`, which says that the weights do not change in between; or gathered
    at the end of that backward, where it does not need them (embeddings). Activations take that memory again as the
    forward goes on, so it seldom adds to the peak.
    """

    prefetch: bool = True
    async_reduce: bool = True
    max_gathered: int = 2
    max_gathered_bytes: int = 0
    max_reducing: int = 2
    separate_groups: bool | None = None
    keep_for_backward: int = 0
    keep_for_next: int = 0

    def __post_init__(self) -> None:
        for name in ("max_gathered_bytes", "keep_for_backward", "keep_for_next"):  # bytes
            _arguments.whole_number(name, getattr(self, name), 0)
        for name in ("max_gathered", "max_reducing"):
            _arguments.whole_number(name, getattr(self, name), 1)
        for name in ("prefetch", "async_reduce"):
            _arguments.flag(name, getattr(self, name))
        if self.separate_groups is not None:
            _arguments.flag("separate_groups", self.separate_groups)

    def check(self, mesh: DeviceMesh) -> None:
        """Raise if units on a mesh cannot go by it."""

    def connect(self, lane: Any, pool: Any, meshes: Sequence[DeviceMesh]) -> None:
        """Prepare a lane and its pool for the process groups of these meshes, before the first pass. Collective."""
