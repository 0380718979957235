"""`capture`: a whole training step as one CUDA graph, so that the host launches one graph instead of every kernel."""

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
from flatshard.optim.optimizer_state import is_settled, state_places, state_tensors
from flatshard.recomputed import Generators, Segments
from flatshard.trust.record import record

OtherShapes = Literal["raise", "eager", "capture"]


def capture(step: Callable[..., Any], *, warmup: int = 3, other_shapes: OtherShapes = "raise") -> Captured:
    """A function that runs ``step`` eagerly ``warmup`` times, and from then on replays it as one CUDA graph.

    ``step`` takes tensors on a GPU (in any nesting of lists, tuples and dicts) and runs a whole training step: forwards
    and backwards of all micro-batches, clipping, the optimizer's step and ``zero_grad``. Every call is one real step:
    the first ``warmup`` calls run it eagerly, the next one captures and replays it, and later calls copy their
    arguments into those of the graph and replay it. A replay overwrites the last one's results: clone what you keep.

    One micro-batch can be captured too, if the memory of gradients is kept: ``zero_grad(set_to_none=False)``.

    These cannot be captured and raise before the capture: CPU offload, Gloo, optional units, check mode, and optimizers
    without ``capturable=True``. Hyperparameters are captured with their values; a learning rate that changes must be a
    tensor (``lr=torch.tensor(1e-3, device="cuda")``, then ``lr.fill_(...)``). A step that reads a value from the GPU
    (``loss.item()``) cannot be captured; return the loss and read it outside.

    ``other_shapes``: what a call with new shapes does: ``"raise"`` an error, run the step eagerly (``"eager"``), or
    capture it for these shapes too (``"capture"``, which takes memory for another graph).
    Between replays everything works as without graphs: evaluation, checkpoints, loading, other steps. A call raises if
    the graph is stale, because parameters were moved, cast or replaced, or a policy or hyperparameter was changed;
    `renew` captures the step again.
    """
    if not callable(step):
        raise TypeError(f"step={step!r}: must be a function of tensors")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 2:
        raise ValueError(f"warmup={warmup!r}: must be an int of 2 or more; two steps record the order of launches")
    if other_shapes not in ("raise", "eager", "capture"):
        raise ValueError(f"other_shapes={other_shapes!r}: must be one of raise, eager, capture")
    return Captured(step, warmup, other_shapes)


class Captured:
    """What `capture` returns."""

    def __init__(self, step: Callable[..., Any], warmup: int, other_shapes: OtherShapes) -> None:
        self._step, self._warmup, self._other_shapes = step, warmup, other_shapes
        self._graphs: dict[object, _Graph] = {}
        self._calls = 0
        self._roots: list[weakref.ref[Root]] = []
        self._optimizers: list[Optimizer] = []
        self._segments = Segments()  # the checkpointed segments of a step

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
                    f"the step was captured for {_shapes(next(iter(self._graphs)))} but was called with {_shapes(kind)}"
                    "; pad to one shape, or call flatshard.capture with other_shapes='eager' or 'capture'"
                )
            if self._graphs and self._other_shapes == "eager":
                return self._run(args, kwargs)
            if not all(is_settled(optimizer) for optimizer in self._optimizers):
                return self._run(args, kwargs)  # state was loaded; an eager step adopts it
            graph = self._graphs[kind] = self._capture(leaves, tree)
        graph.check()
        return graph.replay(leaves)

    @property
    def captures_next(self) -> bool:
        """Whether the next call captures the first graph. The same on all ranks."""
        return not self._graphs and self._calls >= self._warmup

    def renew(self) -> None:
        """Free all graphs and their memory. The next ``warmup`` calls run eagerly, and the one after captures again."""
        self._graphs.clear()
        self._calls = 0

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step eagerly, and record which models and optimizers it uses."""
        with roots_that_ran() as roots, _optimizers_that_step() as optimizers, self._segments.counted():
            found = self._step(*args, **kwargs)
        self._roots, self._optimizers = [weakref.ref(root) for root in roots], optimizers
        return found

    def _capture(self, leaves: list[Any], tree: Any) -> _Graph:
        roots = [root for ref in self._roots if (root := ref()) is not None]
        for root in roots:
            _check_capturable(root)
            if not root.choose_formats():
                raise ValueError('gather_format="auto" needs three eager steps before a capture: use warmup=3 or more')
            root.agree()  # ranks compare a policy that was set since the last step, which a graph cannot do
        _check_optimizers(self._optimizers)
        before = _gradients(roots)
        static = [leaf.clone() for leaf in leaves]
        args, kwargs = _torch.tree_unflatten(static, tree)
        # The state of an optimizer in another graph cannot be moved.
        fixed = {id(optimizer) for graph in _graphs for optimizer in graph.optimizers}
        movable = [optimizer for optimizer in self._optimizers if id(optimizer) not in fixed]
        pools = {id(pool): pool for root in roots for pool in (root.gather_pool, root.reduce_pool)}
        with _idle_lanes(roots) as lasting, ExitStack() as stack:
            memory = [stack.enter_context(pool.keeping_memory()) for pool in pools.values()]
            _move_apart([tensor for optimizer in movable for tensor in state_tensors(optimizer)])
            graph, output, generators = _captured(lambda: self._step(*args, **kwargs), roots, lasting, self._segments)
        if _gradients(roots) != before:
            raise RuntimeError(
                "the step leaves different gradients than it found: end it with optimizer.zero_grad(), or keep the "
                "memory of gradients with zero_grad(set_to_none=False)"
            )
        return _Graph(graph, static, output, roots, self._optimizers, generators, memory)


def _move_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Move tensors out of the cached memory that activations of eager steps used, so that it can be freed.

    An optimizer allocates its state in the first step, between activations; a graph has its own memory for those.
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


_LARGE = 1 << 20  # bytes; the allocator puts smaller tensors into separate segments


def _captured(
    step: Callable[[], Any], roots: Sequence[Root], lasting: Sequence[MainGrads], segments: Segments
) -> tuple[torch.cuda.CUDAGraph, Any, Generators]:
    """A graph of a step, what the step returned, and its random generators. If it fails, the models are reset.

    ``lasting`` gradients are allocated first, so that they are not between activations. `torch.cuda.graph` is not used,
    because it does not clean up after a failed capture.
    """
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    random: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    state, generators = random.clone_state(), Generators(graph, segments.count)
    error: BaseException | None = None
    _torch.clear_workspaces()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        # Threads of NCCL and of the flight record may query events during the capture.
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
            random.graphsafe_set_state(state)  # else torch's generator stays in capture mode
    if error is None:
        return graph, output, generators
    _epochs.begin()
    for root in roots:
        root.reset()
    if not isinstance(error, RuntimeError):
        raise error
    cause = str(error).partition("\n")[0]
    raise RuntimeError(
        f"the step cannot be captured: {cause}. It must not read values from the GPU (.item(), .cpu(), print, a Python "
        "condition on a tensor), synchronize, or read a random state. The model has been reset"
    ) from error


class _Graph:
    """A captured step: its arguments and results, and the state that it depends on."""

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
        """``memory``: objects that keep the memory of the models' pools."""
        self._generators, self._memory = generators, memory
        self._graph, self._static, self._output = graph, static, output
        self._roots = [weakref.ref(root) for root in roots]
        # NCCL cannot destroy a communicator that a graph uses. Lanes keep their process groups alive.
        self._lanes = [(*_lanes(root), root.gathers.rows_lane) for root in roots]
        self.optimizers = list(optimizers)
        self._ranks = sorted({rank for root in roots for mesh in root.meshes for rank in mesh.mesh.flatten().tolist()})
        self._places, self._gradients = _places(roots), _gradients(roots)
        self._hyperparameters = _hyperparameters(optimizers)
        self._states = [state_places(optimizer) for optimizer in optimizers]
        _graphs.add(self)

    def check(self) -> None:
        """Raise RuntimeError if a replay would not do what the step does now."""
        roots = [root for ref in self._roots if (root := ref()) is not None]
        if len(roots) != len(self._roots) or _places(roots) != self._places:
            raise RuntimeError(
                "the captured step is stale: parameters were moved, cast, replaced or sharded again, or given another "
                "policy; call renew() on it"
            )
        if any(root.program.running is not None for root in roots):
            raise RuntimeError("a captured step was called within a forward or backward of its model; call it outside")
        if _gradients(roots) != self._gradients:
            raise RuntimeError(
                "the gradients differ from those at the capture (allocated, or None); call optimizer.zero_grad() "
                "before the captured step, or renew() on it"
            )
        if not all(is_settled(optimizer) for optimizer in self.optimizers) or self._states != [
            state_places(optimizer) for optimizer in self.optimizers
        ]:
            raise RuntimeError(
                "the captured step is stale: the optimizer's state was replaced (load_state_dict); call renew() on it"
            )
        if _hyperparameters(self.optimizers) != self._hyperparameters:
            raise RuntimeError(
                "the captured step is stale: a hyperparameter of the optimizer (lr, betas, weight_decay) was changed; "
                "make the learning rate a tensor and change it with fill_, or call renew() on it"
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
            root.gathers.refresh_order()
        return self._output


_graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()


def _places(roots: Sequence[Root]) -> list[tuple[object, ...]]:
    """Per group: the address of main, the source of its full weights, which parameters train, and the policy."""
    groups = [group for root in roots for unit in root.units for group in unit.groups]
    trains = [tuple([member.sharded.requires_grad for member in group.params]) for group in groups]
    return [(g.main.local.data_ptr(), id(g.source), trained, g.policy) for g, trained in zip(groups, trains)]


def _gradients(roots: Sequence[Root]) -> list[int | None]:
    """The addresses of gradients; None for a parameter without one."""
    members = [m for root in roots for unit in root.units for group in unit.groups for m in group.params]
    grads = [member.sharded.grad for member in members]
    return [None if grad is None else grad.to_local().data_ptr() for grad in grads]  # type: ignore[attr-defined]


def _hyperparameters(optimizers: Sequence[Optimizer]) -> list[tuple[tuple[str, object], ...]]:
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
    """Raise ValueError if a step of this model cannot be captured."""
    if root.device.type != "cuda":
        raise ValueError(f"a step on {root.device} cannot be captured: CUDA graphs need an NVIDIA GPU")
    if any(unit.intent.is_optional for unit in root.units):
        raise ValueError("a step with optional units cannot be captured; call fully_shard without optional=True")
    if root.program.checks:
        raise ValueError("a step cannot be captured in check mode; unset FLATSHARD_CHECK")
    for unit in root.units:
        if any(group.home.host for group in unit.groups):
            raise ValueError(f"unit '{unit.name}' has CPUOffloadPolicy, which cannot be captured; leave it out")
    for lane in (root.gather_lane, root.reduce_lane):
        for mesh in root.meshes:
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1 and lane.backend_in(lane.group(mesh, axis)) == "gloo":
                    raise ValueError("a step over Gloo cannot be captured: use the NCCL backend")


def _lanes(root: Root) -> tuple[Lane, ...]:
    return root.gather_lane, root.gather_pool.refresh_lane, root.reduce_lane


def _join_lanes(root: Root) -> None:
    """Order the current stream after all work of the lanes."""
    for lane in _lanes(root):
        lane.join()


def _free_memory(root: Root) -> list[MainGrads]:
    """Free all gathered weights and the memory of cleared gradients; returns those gradients.

    A graph must compute everything from the main weights, and must not write to memory that may be reused later.
    """
    groups = [group for unit in root.units for group in unit.groups]
    for unit in root.units:
        unit.release(always=True)
    for group in groups:
        group.source.mark_stale()
    lasting = [group.gradients.main_grads for group in groups if group.gradients.main_grads.buffer is not None]
    root.free_cleared_gradients(always=True)
    return [grads for grads in lasting if grads.buffer is None]


def _check_arguments(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cuda":
            found = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(
                f"a captured step takes tensors on a GPU, not {found}; let the function close over the rest"
            )


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("capturable") is False:
                name = type(optimizer).__name__
                raise ValueError(f"{name} cannot be captured as it is; build it with {name}(..., capturable=True)")


def _shapes(kind: Any) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in kind[1])


@contextmanager
def _optimizers_that_step() -> Iterator[list[Optimizer]]:
    found: list[Optimizer] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The optimizers in a CombinedOptimizer are found by their own steps.
        if not isinstance(optimizer, CombinedOptimizer) and not any(optimizer is each for each in found):
            found.append(optimizer)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _idle_lanes(roots: Sequence[Root]) -> Iterator[list[MainGrads]]:
    """Wait for all launches first, so that the capture does not; and forget captured launches afterwards.

    Yields the gradients whose memory has been freed.
    """
    lasting = [grads for root in roots for grads in _free_memory(root)]
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
