"""One parameter group under a strategy: its bytes on one rank, and its collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import torch

from flatshard.engine.gradients.staging import sole_owners
from flatshard.engine.weights.formats import Formats
from flatshard.layout import Layout, Placement, Replicate, is_sharded, least_padded_dim, plan
from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Placements, SchedulePolicy, replicated
from flatshard.rehearsal.network import Network, Reach
from flatshard.tools.model_shapes import ModelShape, ParamShape

CollectiveKind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
StateOf: TypeAlias = Callable[[tuple[int, ...], int], float]


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    ``mesh``: the sizes of the mesh axes, (shard) or (outer, inner).
    ``state``: the number of tensors of a parameter's size in the optimizer state, in the dtype of main weights (2 for
    AdamW); or a function of a parameter's shape and of the bytes of a main weight that returns bytes per element.
    ``microbatches``: micro-batches per optimizer step, each inside `flatshard.microbatch`.
    ``expert_parts``: size of expert parallelism: this many neighbours along the last axis have different experts.
    ``stride``: the distance, in ranks, of neighbours along the last axis.
    """

    mesh: tuple[int, ...]
    placements: Placements
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    layout: LayoutName = "tensor"
    schedule: SchedulePolicy = field(default_factory=SchedulePolicy)
    state: int | StateOf = 2
    microbatches: int = 1
    expert_parts: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        assert len(self.placements.parameter) == len(self.mesh)
        if any(size < 1 for size in self.mesh) or self.microbatches < 1 or self.state_of((1,), 1) < 0:
            given = f"mesh {self.mesh}, microbatches {self.microbatches}, state {self.state}"
            raise ValueError(f"{given}: sizes of axes and microbatches must be at least 1, and state at least 0")

    def of_experts(self) -> TrainingSetup:
        """The setup of experts: each part is sharded over the ranks that hold the same experts."""
        *outer, last = self.mesh
        return replace(self, mesh=(*outer, last // self.expert_parts), stride=self.expert_parts)

    def state_of(self, shape: tuple[int, ...], size: int) -> float:
        """Bytes of optimizer state per element of a parameter. ``size``: bytes per element of main weights."""
        return self.state(shape, size) if callable(self.state) else float(self.state * size)


@dataclass(frozen=True)
class PlannedCollective:
    """A collective that runs ``times`` times per step, with a full message of ``size`` bytes, along one mesh axis.

    ``ranks``: the number of ranks that take part, which are ``stride`` ranks apart. ``reduces``: it belongs to the
    reduce of gradients, whatever its kind.
    """

    kind: CollectiveKind
    axis: int
    ranks: int
    size: int
    segments: int
    times: int
    reduces: bool = False
    stride: int = 1

    def reach(self, network: Network) -> Reach:
        return _reach(network, self.ranks, self.stride)

    def seconds(self, network: Network) -> float:
        """The wire time of one such collective."""
        return network.seconds(self.kind, self.size, self.reach(network), self.segments)


@lru_cache(maxsize=1 << 10)  # many units have the same groups
def _reach(network: Network, ranks: int, stride: int) -> Reach:
    return network.reach(range(0, ranks * stride, stride))


class GroupBytes:
    """The tensors of one parameter group, and their memory on one rank, in bytes.

    ``main``, ``compute`` (if there is a persistent copy of compute weights) and ``state``: always.
    ``gathered``: while the unit is unsharded; tensors that are sharded on another dim than 0 count twice.
    ``passing``: encoded weights, from their all-gather until the unit is used and they are decoded.
    ``arriving``: full gradients, as autograd leaves them. ``main_grad``: reduced gradients, until `zero_grad`.
    ``reducing``: memory of a reduce beyond these two, until the reduce has ended.
    ``accumulated``: gradients of earlier micro-batches; ``ends``: they are freed after the last reduce.
    """

    def __init__(self, tensors: Sequence[ParamShape], setup: TrainingSetup) -> None:
        first, precision = tensors[0], setup.precision
        self.tensors, self.setup = tensors, setup
        axes = len(setup.mesh)
        self.placements = setup.placements if first.shape else replicated(axes)
        shards = self._ranks_of(self.placements.optimizer)
        self.layout = self._planned(shards)
        floating = first.dtype.is_floating_point
        self.trainable = first.trainable
        main = precision.main_dtype if precision.main_dtype and floating and self.trainable else first.dtype
        self.compute_dtype = precision.compute_of(first.dtype)
        grad = precision.grad_of(main, self.compute_dtype)
        self.reduce_dtype = precision.reduce_of(self.compute_dtype, grad)
        self.formats = Formats.of(self.layout, self._encoded_tensors, precision, setup.mesh, self.placements.optimizer)
        encoded = self.formats.gather is not None
        # Bytes of an encoded shard.
        self.piece = self.formats.gather_coder(self.compute_dtype).wire.piece if encoded else 0

        full, held = self.layout.buffer_numel(shards), self.layout.shard_numel
        turned = sum(self.layout.slots[index].numel for index in self.layout.turned)
        everywhere = all(isinstance(p, Replicate) for p in self.placements.parameter)
        as_main = self.placements.parameter == self.placements.optimizer
        self.is_resident = everywhere and (encoded or not as_main or main == self.compute_dtype)
        self.main = held * main.itemsize
        self.compute = self.passing = 0
        if encoded and not everywhere:
            self.compute = self.piece * self._pieces(self.placements.parameter)
            self.passing = self.piece * shards
        elif encoded or not as_main:
            self.compute = self._numel(self.placements.parameter) * self.compute_dtype.itemsize
        self.compute += turned * self.compute_dtype.itemsize if self.is_resident else 0
        states = [setup.state_of(tensor.shape, main.itemsize) for tensor in tensors]
        share = sum(each * math.prod(t.shape) for each, t in zip(states, tensors)) / max(self.layout.payload, 1)
        self.state = round(share * held) if self.trainable else 0
        self.gathered = 0 if self.is_resident else (full + turned) * self.compute_dtype.itemsize

        if not self.trainable:
            self.arriving = self.main_grad = self.reducing = self.accumulated = 0
            self.ends = False
            return
        self.arriving = self.layout.payload * self.compute_dtype.itemsize
        self.main_grad = held * grad.itemsize
        self.ends = self.placements.gradient != self.placements.optimizer
        several = setup.microbatches > 1
        self._rests_unsharded = self.ends and not is_sharded(self.placements.gradient[-1])
        resting = full if self._rests_unsharded else self._numel(self.placements.gradient)
        rests_in = setup.precision.resting_of(grad, self.reduce_dtype)
        self.accumulated = resting * rests_in.itemsize if several else 0
        self.reducing = self._staged(several, rests_in) * self.reduce_dtype.itemsize
        inner, outer = self.formats.reduces[-1], self.formats.reduces[0]
        result = torch.float32 if outer is not None else self.reduce_dtype
        if grad != result or (several and not self.ends):
            self.reducing += held * result.itemsize  # reduced into a temporary buffer, then added or cast
        if axes > 1:
            halfway = torch.float32 if inner is not None and outer is not None else self.reduce_dtype
            self.reducing += self._numel(self._halfway) * halfway.itemsize
        for launch in self._reduces(True):
            if launch.kind == "all_to_all":
                self.reducing += 2 * launch.size  # the encoded gradients that are sent, and those that are received
            elif launch.kind == "all_gather":
                self.reducing += launch.size + launch.size // launch.ranks

    def _planned(self, shards: int) -> Layout:
        """The layout of `flatshard.shard_model`: unless it is flat, each tensor is sharded on the least padded dim."""
        shapes = [tensor.shape for tensor in self.tensors]
        layout = self.setup.layout
        dims = None if layout == "flat" else [least_padded_dim(shape, shards) for shape in shapes]
        return plan(shapes, shards, layout=layout, dims=dims, apart=self._encoded_tensors)

    @property
    def _encoded_tensors(self) -> list[bool]:
        return [self.setup.precision.has_formats and tensor.encoded for tensor in self.tensors]

    @property
    def _halfway(self) -> tuple[Placement, ...]:
        """The placements after the last axis has been reduced, and before the first one."""
        return (Replicate(), self.placements.optimizer[-1])

    def _ranks_of(self, placements: Sequence[Placement]) -> int:
        """The number of ranks that a buffer with these placements is sharded over."""
        return math.prod(size for size, p in zip(self.setup.mesh, placements) if is_sharded(p))

    def _pieces(self, placements: Sequence[Placement]) -> int:
        return self.layout.num_shards // self._ranks_of(placements)

    def _numel(self, placements: Sequence[Placement]) -> int:
        return self.layout.buffer_numel(self._pieces(placements))

    def _staged(self, several: bool, rests_in: torch.dtype) -> int:
        """Elements of the staging buffer. A gradient in the reduce dtype that fills its segment needs none."""
        shards = self.layout.num_shards
        if several and self._rests_unsharded:
            as_it_is = rests_in == self.reduce_dtype or self.formats.reduces[-1] is not None
            return 0 if as_it_is else self.layout.buffer_numel(shards)
        is_cast = self.compute_dtype != self.reduce_dtype
        pairs = zip(self.layout.segments, sole_owners(self.layout))
        return sum(shards * segment.piece for segment, sole in pairs if sole is None or is_cast)

    def arriving_after(self, position: int) -> int:
        """Bytes of the gradients that arrive at this position: when backward has this many inner units left."""
        numel = sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.after == position)
        return numel * self.compute_dtype.itemsize

    # Collectives of a step

    def launches(self, gathers: int) -> list[PlannedCollective]:
        """The collectives of a step. ``gathers``: how often each micro-batch gathers the weights."""
        return [*self.refreshes(), *self.gathers(self.setup.microbatches * gathers), *self.reduces()]

    def refreshes(self) -> list[PlannedCollective]:
        """The collectives that refresh a persistent copy of compute weights from main weights, once per step."""
        return self._gathers(self.placements.optimizer, self.placements.parameter, 1)

    def gathers(self, times: int = 1) -> list[PlannedCollective]:
        """The all-gathers of full weights."""
        return self._gathers(self.placements.parameter, replicated(len(self.setup.mesh)).parameter, times)

    def reduces(self, is_last: bool | None = None) -> list[PlannedCollective]:
        """The reduces of all micro-batches or, with ``is_last``, of one: the last one, or another."""
        if is_last is not None:
            return _with_traffic(self._reduces(is_last))
        earlier = self.setup.microbatches - 1
        return _with_traffic([*self._reduces(True), *(replace(x, times=earlier) for x in self._reduces(False))])

    def encoding(self, is_last: bool) -> int:
        """Bytes that one reduce reads and writes to encode and decode gradients."""
        moved, inner = 0, len(self.setup.mesh) - 1
        for launch in self.reduces(is_last):
            if launch.kind in ("all_to_all", "all_gather"):
                halfway = self._numel(self._halfway) * self.reduce_dtype.itemsize
                sent = launch.size if launch.kind == "all_to_all" else launch.size // launch.ranks
                moved += (self.arriving if launch.axis == inner else halfway) + sent + launch.size
        return moved

    @property
    def _segments(self) -> int:
        return sum(segment.piece > 0 for segment in self.layout.segments)

    def _gathers(self, source: Sequence[Placement], target: Sequence[Placement], times: int) -> list[PlannedCollective]:
        launches, current = [], list(source)
        piece = self.piece or self.layout.run_numel * self.compute_dtype.itemsize
        segments = 1 if self.piece else self._segments
        for axis, placement in enumerate(target):
            if current[axis] != placement:
                current[axis] = placement
                size = piece * self._pieces(current)
                launches.append(self._collective("all_gather", axis, size, times, segments, reduces=False))
        return _with_traffic(launches)

    def _reduces(self, is_last: bool) -> list[PlannedCollective]:
        """The reduces of the last micro-batch, or of one before, after which axes may rest unreduced."""
        if not self.trainable:
            return []
        rests = [given != final for given, final in zip(self.placements.gradient, self.placements.optimizer)]
        # When gradients become final, a reduce has elements that say which parameters this rank has used.
        flags = len(self.tensors) if len(self.tensors) > 1 and (is_last or not any(rests)) else 0
        launches: list[PlannedCollective] = []
        held: list[Placement] = list(replicated(len(self.setup.mesh)).parameter)
        for axis in reversed(range(len(held))):
            final = self.placements.optimizer[axis]
            if rests[axis] and not is_last:
                break
            if self.formats.reduces[axis] is not None:
                size = self.formats.reduce_coder(axis, self.reduce_dtype).wire.piece * self._pieces(held)
                if is_sharded(final):
                    launches.append(self._collective("all_to_all", axis, size))
                else:
                    launches.append(self._collective("all_gather", axis, self.setup.mesh[axis] * size))
            elif is_sharded(final):
                elements = self.layout.run_numel * self._pieces(held) + self.setup.mesh[axis] * flags
                size, segments = elements * self.reduce_dtype.itemsize, self._segments + bool(flags)
                launches.append(self._collective("reduce_scatter", axis, size, segments=segments))
            else:
                size = (self._numel(held) + flags) * self.reduce_dtype.itemsize
                launches.append(self._collective("all_reduce", axis, size))
            held[axis] = final if is_sharded(final) else held[axis]
        return launches

    def _collective(
        self, kind: CollectiveKind, axis: int, size: int, times: int = 1, segments: int = 1, reduces: bool = True
    ) -> PlannedCollective:
        """A collective among all ranks of an axis."""
        stride = self.setup.stride * math.prod(self.setup.mesh[axis + 1 :])
        return PlannedCollective(kind, axis, self.setup.mesh[axis], size, segments, times, reduces, stride)


def _with_traffic(launches: list[PlannedCollective]) -> list[PlannedCollective]:
    return [launch for launch in launches if launch.times and launch.ranks > 1]


def groups_of(model: ModelShape, setup: TrainingSetup) -> list[list[GroupBytes]]:
    """The groups of each unit. Units with the same tensors have the same groups."""
    alike = {tensors: _split(tensors, setup) for tensors in {unit.tensors for unit in model.units}}
    return [alike[unit.tensors] for unit in model.units]


def _split(unit: Sequence[ParamShape], setup: TrainingSetup) -> list[GroupBytes]:
    """The groups of a unit's tensors: same dtype, ``requires_grad`` and mesh; scalars are separate."""
    by_kind: dict[tuple[object, ...], list[ParamShape]] = {}
    parts = setup.expert_parts
    for tensor in unit:
        is_divided = parts > 1 and tensor.is_expert
        if is_divided:  # this rank has 1 of ``parts`` experts, which get the tokens of all neighbours
            count, *rest = tensor.shape
            tensor = replace(tensor, shape=(count // parts, *rest), used=tensor.used * parts)
        by_kind.setdefault((tensor.dtype, tensor.trainable, len(tensor.shape) > 0, is_divided), []).append(tensor)
    return [GroupBytes(tensors, setup.of_experts() if kind[3] else setup) for kind, tensors in by_kind.items()]
