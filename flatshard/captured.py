"""`capture`: a whole training step as one CUDA graph, so that the host's work is the same few calls for any model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard import _epochs, _torch
from flatshard.buffer import Lane, record_replay
from flatshard.engine import steps
from flatshard.engine.gradients.main_grads import MainGrads
from flatshard.engine.schedule.root import Root, roots_that_ran
from flatshard.optim.combined import CombinedOptimizer
from flatshard.optim.step import is_settled, state_places, state_tensors
from flatshard.recomputed import Generators, Segments
from flatshard.trust.record import record

OtherShapes = Literal["raise", "eager", "capture"]


def capture(step: Callable[..., Any], *, warmup: int = 3, other_shapes: OtherShapes = "raise") -> Captured:
    """A function that does what ``step`` does, from its call number ``warmup + 1`` on by replaying one CUDA graph.

    ``step`` takes tensors on a GPU (in any nesting of lists, tuples and dicts) and runs a whole training step: forwards
    and backwards of all micro-batches, clipping, the optimizer's step and ``zero_grad``. Every call is one real step:
    the first ``warmup`` run it as it is, the next one captures and replays it, the others copy their arguments into
    those of the graph and replay. What it returns is overwritten by the next replay: clone what you keep.

    A micro-batch alone can be captured too, if gradients stay where they are: ``zero_grad(set_to_none=False)``.

    What a graph cannot hold is refused before anything is captured: CPU offload, process groups without a GPU (Gloo),
    optional units, optimizers that are not ``capturable=True``. Numbers of an optimizer are captured as they are; a
    learning rate that is to change must be a tensor (``lr=torch.tensor(1e-3, device="cuda")``, then ``lr.fill_(...)``).
    A step that reads a value from the GPU (``loss.item()``) cannot be captured; return the loss and read it outside.

    ``other_shapes``: what a call with other shapes than before does: ``"raise"``, run the step as it is (``"eager"``),
    or capture it for these shapes too (``"capture"``; its memory comes on top).
    Between replays everything works as without graphs: evaluation, checkpoints, loading, other steps. What makes a
    graph stale (parameters that were moved, cast or replaced, another policy, numbers of the optimizer) raises at the
    next call; `renew` lets it be captured again.
    """
    if not callable(step):
        raise TypeError(f"step={step!r}: must be a function of tensors")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 2:
        raise ValueError(f"warmup={warmup!r}: must be 2 or more; the engine knows the order of a step after two")
    if other_shapes not in ("raise", "eager", "capture"):
        raise ValueError(f"other_shapes={other_shapes!r}: must be one of raise, eager, capture")
    return Captured(step, warmup, other_shapes)


class Captured:
    """See `capture`."""

    def __init__(self, step: Callable[..., Any], warmup: int, other_shapes: OtherShapes) -> None:
        self._step, self._warmup, self._other_shapes = step, warmup, other_shapes
        self._graphs: dict[object, _Graph] = {}
        self._calls = 0
        self._roots: list[weakref.ref[Root]] = []
        self._optimizers: list[Optimizer] = []
        self._segments = Segments()  # that are recomputed in a step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = _torch.tree_flatten((args, kwargs))
        _check_arguments(leaves)
        if self._calls < self._warmup:
            self._calls += 1
            return self._run(args, kwargs)
        kind = tree, tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)
        graph = self._graphs.get(kind)
        if graph is None:
            if self._graphs and self._other_shapes == "raise":
                raise ValueError(
                    f"the step was captured for {_shapes(next(iter(self._graphs)))}, and this is {_shapes(kind)}; pad "
                    "to one shape, or call flatshard.capture with other_shapes='eager' or 'capture'"
                )
            if self._graphs and self._other_shapes == "eager":
                return self._run(args, kwargs)
            if not all(is_settled(optimizer) for optimizer in self._optimizers):
                return self._run(args, kwargs)  # its state has been changed, which takes a step to take over
            graph = self._graphs[kind] = self._capture(leaves, tree)
        graph.check()
        return graph.replay(leaves)

    @property
    def captures_next(self) -> bool:
        """Whether the next call is to make the first graph. On all ranks or on none."""
        return not self._graphs and self._calls >= self._warmup

    def renew(self) -> None:
        """Forget all graphs, and their memory: the next calls run, and capture, the step anew."""
        self._graphs.clear()
        self._calls = 0

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as it is, and see which models and optimizers are in it."""
        with roots_that_ran() as roots, _optimizers_that_step() as optimizers, self._segments.counted():
            found = self._step(*args, **kwargs)
        self._roots, self._optimizers = [weakref.ref(root) for root in roots], optimizers
        return found

    def _capture(self, leaves: list[Any], tree: Any) -> _Graph:
        roots = [root for ref in self._roots if (root := ref()) is not None]
        for root in roots:
            _check_capturable(root)
            root.agree()  # of a policy that was set since the last step; no graph could hold it
        _check_optimizers(self._optimizers)
        before = _gradients(roots)
        static = [leaf.clone() for leaf in leaves]
        args, kwargs = _torch.tree_unflatten(static, tree)
        fixed = {
            id(optimizer) for graph in _graphs for optimizer in graph.optimizers
        }  # graphs know where their state is
        movable = [optimizer for optimizer in self._optimizers if id(optimizer) not in fixed]
        pools = {id(pool): pool for root in roots for pool in (root.gather_pool, root.reduce_pool)}
        with _quiet(roots) as lasting, ExitStack() as stack:
            memory = [stack.enter_context(pool.remembering()) for pool in pools.values()]  # also what they get within
            _move_apart([tensor for optimizer in movable for tensor in state_tensors(optimizer)])
            graph, output, generators = _captured(lambda: self._step(*args, **kwargs), roots, lasting, self._segments)
        if _gradients(roots) != before:
            raise RuntimeError(
                "the step leaves other gradients behind than it found: a captured step ends with "
                "optimizer.zero_grad(), or adds to gradients that stay (zero_grad(set_to_none=False))"
            )
        return _Graph(graph, static, output, roots, self._optimizers, generators, memory)


def _move_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Take tensors out of the memory that the cache holds for the activations of eager steps, so that it can be freed.

    An optimizer makes its state in the first step, wherever there is room; a graph has other memory for activations.
    """
    large = [t.untyped_storage() for t in tensors if t.is_cuda and t.untyped_storage().nbytes() >= _LARGE]
    apart = [(storage, storage.cpu()) for storage in {storage._cdata: storage for storage in large}.values()]
    for storage, _ in apart:
        storage.resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
    for storage, values in apart:
        storage.resize_(values.nbytes())
        storage.copy_(values)


_LARGE = 1 << 20  # bytes: smaller tensors have segments of their own kind


def _captured(
    step: Callable[[], Any], roots: Sequence[Root], lasting: Sequence[MainGrads], segments: Segments
) -> tuple[torch.cuda.CUDAGraph, Any, Generators]:
    """A graph of a step, what it returned, and what it draws from. If it cannot be captured, all is as it was before.

    ``lasting`` get their memory first, not amid that of activations. torch's own context leaves a capture that failed
    half open.
    """
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    random: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    state, generators = random.clone_state(), Generators(graph, segments.count)
    error: BaseException | None = None
    _torch.clear_workspaces()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        # Threads of NCCL and of the flight record may look at events meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for grads in lasting:
                grads.prepare()
            with generators.used():
                output = step()
            for root in roots:
                _join_lanes(root)
        except BaseException as raised:
            error = raised
        try:
            graph.capture_end()
        except RuntimeError as raised:
            error = error or raised
            _torch.end_allocating(torch.cuda.current_device(), pool)
            random.graphsafe_set_state(state)  # else torch's generator is left as if the capture went on
    if error is None:
        return graph, output, generators
    _epochs.begin()
    for root in roots:
        root.reset()
    if not isinstance(error, RuntimeError):
        raise error
    told = str(error).partition("\n")[0]
    raise RuntimeError(
        f"the step cannot be captured: {told}. It must not read values from the GPU (.item(), .cpu(), print, a Python "
        "condition on a tensor), make the host wait, or read a random state; the model has been reset"
    ) from error


class _Graph:
    """A captured step: its arguments and results, and what it has taken for granted."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        static: Sequence[torch.Tensor],
        output: Any,
        roots: Sequence[Root],
        optimizers: Sequence[Optimizer],
        generators: Generators,
        memory: Sequence[object],
    ) -> None:
        """``memory``: what keeps that of the models' pools."""
        self._generators, self._memory = generators, memory
        self._graph, self._static, self._output = graph, static, output
        self._roots = [weakref.ref(root) for root in roots]
        # NCCL cannot destroy a communicator that a graph uses: process groups of lanes that exist are not destroyed.
        self._lanes = [(*_lanes(root), root.rows_lane) for root in roots]
        self.optimizers = list(optimizers)
        self._ranks = sorted({rank for root in roots for mesh in root.meshes for rank in mesh.mesh.flatten().tolist()})
        self._places, self._gradients = _places(roots), _gradients(roots)
        self._numbers, self._states = _numbers(optimizers), [state_places(optimizer) for optimizer in optimizers]
        _graphs.add(self)

    def check(self) -> None:
        """RuntimeError if a replay would not be the step."""
        roots = [root for ref in self._roots if (root := ref()) is not None]
        if len(roots) != len(self._roots) or _places(roots) != self._places:
            raise RuntimeError(
                "the captured step is stale: parameters have been moved, cast, replaced, sharded anew or given "
                "another policy since; call renew() on it"
            )
        if any(root.program.running is not None for root in roots):
            raise RuntimeError("a captured step cannot run within a forward or backward of its model")
        if _gradients(roots) != self._gradients:
            raise RuntimeError(
                "a captured step must find gradients as it found them when it was captured, there or set to None; call "
                "optimizer.zero_grad() before it, or renew()"
            )
        if not all(is_settled(optimizer) for optimizer in self.optimizers) or self._states != [
            state_places(optimizer) for optimizer in self.optimizers
        ]:
            raise RuntimeError(
                "the captured step is stale: the optimizer's state has been replaced (load_state_dict) since; call "
                "renew()"
            )
        if _numbers(self.optimizers) != self._numbers:
            raise RuntimeError(
                "the captured step is stale: numbers of the optimizer (lr, betas, weight_decay) have changed since; "
                "make the learning rate a tensor and fill_ it, or call renew()"
            )

    def replay(self, leaves: Sequence[torch.Tensor]) -> Any:
        roots = [root for ref in self._roots if (root := ref()) is not None]
        for root in roots:
            _join_lanes(root)
            root.count_step()
        if leaves:
            torch._foreach_copy_(list(self._static), list(leaves))
        self._generators.align()
        self._graph.replay()
        if len(self._ranks) > 1:
            record_replay(roots[0].gather_lane, "the captured step", self._ranks)
        if self.optimizers:
            steps.note()
        for root in roots:
            root.refresh_order()
        return self._output


_graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()


def _places(roots: Sequence[Root]) -> list[tuple[object, ...]]:
    """Of each group, where it is, where its full weights come from, what is trained of it, and in which dtypes."""
    groups = [group for root in roots for unit in root.units for group in unit.groups]
    trains = [tuple([member.sharded.requires_grad for member in group.params]) for group in groups]
    return [(g.main.local.data_ptr(), id(g.source), trained, g.policy) for g, trained in zip(groups, trains)]


def _gradients(roots: Sequence[Root]) -> list[int | None]:
    """Where gradients are; None where there is none."""
    members = [m for root in roots for unit in root.units for group in unit.groups for m in group.params]
    grads = [member.sharded.grad for member in members]
    return [None if grad is None else grad.to_local().data_ptr() for grad in grads]  # type: ignore[attr-defined]


def _numbers(optimizers: Sequence[Optimizer]) -> list[tuple[tuple[str, object], ...]]:
    return [
        tuple(
            (key, value.data_ptr() if isinstance(value, torch.Tensor) else value)
            for key, value in group.items()
            if isinstance(value, (int, float, tuple, str, torch.Tensor))
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _check_capturable(root: Root) -> None:
    """ValueError if a graph cannot hold a step of this model, and what to change."""
    if root.device.type != "cuda":
        raise ValueError(f"a step on {root.device} cannot be captured: CUDA graphs are for NVIDIA GPUs")
    if any(unit.intent.is_optional for unit in root.units):
        raise ValueError("a step with optional units cannot be captured: what a rank launches depends on its data")
    if root.program.checks:
        raise ValueError("a step cannot be captured in check mode, in which ranks talk before every launch")
    for unit in root.units:
        if any(group.home.host for group in unit.groups):
            raise ValueError(f"unit '{unit.name}' has weights in host memory, which a graph cannot step")
    for lane in (root.gather_lane, root.reduce_lane):
        for mesh in root.meshes:
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1 and lane.backend_in(lane.group(mesh, axis)) == "gloo":
                    raise ValueError("a step over Gloo cannot be captured: it communicates on the host; use NCCL")


def _lanes(root: Root) -> tuple[Lane, ...]:
    return root.gather_lane, root.gather_pool.refresh_lane, root.reduce_lane


def _join_lanes(root: Root) -> None:
    """Order the current stream after all that the lanes have been given."""
    for lane in _lanes(root):
        lane.join()


def _start_anew(root: Root) -> list[MainGrads]:
    """Give back what is gathered, also what was to stay, and the memory of gradients that are hidden: which.

    A graph must derive all from main itself, and must not write to memory that others may get later.
    """
    groups = [group for unit in root.units for group in unit.groups]
    for unit in root.units:
        unit.release(always=True)
    for group in groups:
        group.source.mark_stale()
    lasting = [group.gradients.main_grads for group in groups if group.gradients.main_grads.buffer is not None]
    root.rest_gradients(always=True)
    return [grads for grads in lasting if grads.buffer is None]


def _check_arguments(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cuda":
            told = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(f"a captured step takes tensors on a GPU, not {told}; put the rest into the function")


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") is False:
                name = type(optimizer).__name__
                raise ValueError(f"{name} counts steps on the host; make it with {name}(..., capturable=True)")


def _shapes(kind: Any) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in kind[1])


@contextmanager
def _optimizers_that_step() -> Iterator[list[Optimizer]]:
    found: list[Optimizer] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The parts of a combined one step, too.
        if not isinstance(optimizer, CombinedOptimizer) and not any(optimizer is each for each in found):
            found.append(optimizer)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _quiet(roots: Sequence[Root]) -> Iterator[list[MainGrads]]:
    """All that was launched before has ended, and nobody waits for it within; nor afterwards for what is captured.

    Yields gradients whose memory, hidden between steps, has been given back.
    """
    lasting = [grads for root in roots for grads in _start_anew(root)]
    torch.cuda.synchronize()
    _epochs.begin()
    record.captures = True
    try:
        yield lasting
    finally:
        for root in roots:
            root.count_no_step()
        record.captures = False
        _epochs.begin()
