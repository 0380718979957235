"""Calls: hooks on the inputs and outputs of a unit's forwards notify the unit of the progress of a backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from flatshard import _torch
from flatshard.engine.gradients.collecting import refuse_orphan
from flatshard.engine.watch.trees import map_tensors, tensors_in, tensors_with_grad


class Watcher(Protocol):
    """The members of `Unit` that its calls use."""

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached an output of a call."""

    def post_backward(self) -> None:
        """The gradients of one call's inputs are complete."""


Owner: TypeAlias = Callable[[], Watcher | None]  # a weak reference to a unit


class Call:
    """One forward of a unit, from the start of its first module to the end of its last.

    Invariant: the unit expects the backward of those calls that exist and are not `passed`, and of no others. The unit
    owns a call while it runs. Afterwards only hooks on its outputs, in the autograd graph, own it. So freeing a graph
    frees its calls.

        output --(hook: owns the call)--> ... --> input --(hook: weak reference to the call)--> ...

    In a list of modules, the input of one module may be computed from the output of another, which owns the call. So
    the call does not own the graph nodes of inputs: the hooks on the outputs of the same module own them.
    """

    __slots__ = (
        "__weakref__", "_all", "_watched", "backward", "forward", "in_recompute", "inner", "left", "outer", "passed",
        "running", "unit", "unwatched", "unwatched_readers", "watches",
    )  # fmt: skip

    def __init__(
        self, unit: Owner, modules: frozenset[int], forward: int, before: Call | None, recompute: bool
    ) -> None:
        """``modules``: the ids of the unit's modules. ``before``: the last call of the unit."""
        self.unit = unit
        self.forward = forward  # the number of the root's forward
        self.outer = before if before is not None and before.running else None  # the call around this one
        self.left = set(modules)  # modules whose forward has not ended
        self._all = modules
        self.running: dict[int, ModuleForward] = {}  # modules whose forward is running, by id
        self.inner: int | None = None  # in `call_as_forward`: the depth of forwards within the method
        self.in_recompute = recompute  # it was created within a backward
        self.watches = True  # a backward will go through its graph
        self.backward = 0  # the number of the last backward that has reached an output
        # The runs whose inputs need gradients, and whether a backward has completed those.
        self._watched: dict[weakref.ref[ModuleForward], bool] = {}
        self.unwatched = 0  # runs without such inputs: the end of their backward cannot be detected
        self.unwatched_readers = 0  # those of them whose backward reads weights: all but embeddings
        self.passed = False  # its backward has ended, or will never come

    def goes_on_with(self, module: nn.Module) -> bool:
        """Whether a forward of one of the unit's modules that starts now is part of this call."""
        if self.left != self._all:
            return True  # some modules of a list have run, others have not
        return bool(self.running) and id(module) not in self.running

    def restart(self) -> None:
        """Another backward runs through the retained graph."""
        self.passed = False
        self._watched = dict.fromkeys(self._watched, False)

    def is_running(self, run: weakref.ref[ModuleForward]) -> bool:
        """Whether the forward of the module has not ended: it computes the gradient of its input itself."""
        return any(each is run() for each in self.running.values())

    @property
    def has_read(self) -> bool:
        """Whether the backward has read all weights that it needs."""
        return not self.unwatched_readers and False not in self._watched.values()

    def is_ahead(self, backward: int, nested: bool) -> bool:
        """Whether the running backward, number ``backward``, will go through this call, as far as can be known.

        ``nested``: reentrant checkpointing runs through a separate graph now, which hides the outer one.
        """
        if self.passed:
            return False
        if nested or self.backward == backward:
            return True
        for ref, is_over in self._watched.items():
            run = None if is_over else ref()
            if run is not None and _torch.will_be_executed(run.node):
                return True
        return not self._watched

    def watch_inputs(self, run: ModuleForward, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        """Arguments for a module, hooked so that `Unit.post_backward` runs; and whether any needs a gradient."""
        inputs = args if args[1:] or not args else args[0]
        wanted = tensors_with_grad((inputs, kwargs) if kwargs else inputs)
        if not wanted:
            return args, kwargs, False
        which = weakref.ref(run)
        who = self.unit, weakref.ref(self), which
        first = wanted[0]
        if not wanted[1:] and type(first) is torch.Tensor and first.layout is torch.strided:
            # The hook is on a view, because other code may use the tensor too. A function costs several times more.
            passed = (first.view_as(first),)
            _torch.hook_first(passed[0], functools.partial(_post_backward_hook, *who))
        else:
            wanted = list({id(t): t for t in wanted}.values())
            passed = _PostBackward.apply(who, *wanted)  # type: ignore[no-untyped-call]
        run.node, self._watched[which] = passed[0].grad_fn, False
        if args and args[0] is first and not args[1:] and not wanted[1:]:
            return passed, kwargs, True
        instead = {id(tensor): view for tensor, view in zip(wanted, passed)}
        args, kwargs = (map_tensors(lambda t: instead.get(id(t), t), given) for given in (args, kwargs))
        return args, kwargs, True

    def watch_outputs(self, run: ModuleForward, output: Any) -> bool:
        """Call `Unit.pre_backward` when a gradient reaches the output. Returns whether this can happen.

        The hook comes before other hooks of the tensor, which may also be an output of a nested unit, or an input: on
        all ranks, the backward must reach this unit first.
        """
        hook = functools.partial(pre_backward_hook, self, run)
        wanted = tensors_with_grad(output)
        if not wanted and not isinstance(output, torch.Tensor):
            # The output is an object, for example a distribution. One beside other outputs may be a cache of all units.
            wanted = [tensor for tensor in tensors_in(output, of_objects=True) if tensor.requires_grad]
        for tensor in wanted:
            _torch.hook_first(tensor, hook)
        return bool(wanted)


class Passes(Protocol):
    """The members of a root that `Calls` uses."""

    backwards: int

    @property
    def is_nested(self) -> bool:
        """Whether reentrant checkpointing runs through a separate graph."""


class Calls:
    """The calls of a unit whose backward is expected. A call leaves them when it has passed, or with its graph."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Call]] = []

    def __iter__(self) -> Iterator[Call]:
        return iter([call for ref in self._refs if (call := ref()) is not None and not call.passed])

    def expect(self, call: Call) -> None:
        """A backward of this call may follow."""
        refs = [weakref.ref(call)]
        for ref in self._refs:
            other = ref()
            if other is not None and other is not call and not other.passed:
                refs.append(ref)
        self._refs = refs

    def are_awaited(self) -> bool:
        """Whether a backward of a forward is expected."""
        for ref in self._refs:
            call = ref()
            if call is not None and not call.passed:
                return True
        return False

    def any_ahead(self, root: Passes) -> bool:
        """Within a backward: whether it will go through one of these calls."""
        for ref in self._refs:
            call = ref()
            if call is not None and not call.passed and call.is_ahead(root.backwards, root.is_nested):
                return True
        return False

    def have_graph(self) -> bool:
        """Within a recompute: whether an earlier forward has the graph, and so the hooks, of its backward.

        Otherwise checkpointing is reentrant, and the recompute creates a graph. If a unit is used both ways, the end of
        its backward cannot be detected, so it is reduced at the end of the whole backward.
        """
        return any(not call.in_recompute for call in self)


class ModuleForward:
    """The forward of one module, within a call."""

    __slots__ = ("__weakref__", "is_recompute", "is_transformed", "node")

    def __init__(self, is_recompute: bool, is_transformed: bool) -> None:
        self.is_recompute, self.is_transformed = is_recompute, is_transformed  # in a backward; by torch.func
        self.node: Any = None  # the graph node where the gradients of its inputs are complete, if watched


class StoredTensors:
    """Tensors that forwards store on the modules of a unit, such as an auxiliary loss: hooked like outputs.

    Only the modules after the first forward are searched.
    """

    def __init__(self) -> None:
        self.places: list[tuple[weakref.ref[nn.Module], str]] | None = None  # None: before the first forward

    def watch(self, call: Call, run: ModuleForward, modules: Sequence[nn.Module], nests: bool) -> None:
        """Called after a forward of one of ``modules``.

        ``nests``: there are nested units, which hook the tensors below themselves.
        """
        if self.places is None:
            self.places = []
            for below in (below for each in modules for below in ((each,) if nests else each.modules())):
                for name, value in below.__dict__.items():
                    looked_at = not name.startswith("_") and isinstance(value, (torch.Tensor, list, tuple, dict))
                    if looked_at and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                        self.places.append((weakref.ref(below), name))
        for ref, name in self.places:
            module = ref()
            if module is not None:
                call.watch_outputs(run, [t for t in tensors_in(module.__dict__.get(name)) if t.grad_fn is not None])


def anchored(output: Any, once: bool = False) -> Any:
    """The same values, on a graph, so that a backward goes through them although nothing in them needs a gradient.

    ``once``: only the first floating-point tensor; the others (masks, for example) stay as they are.
    """
    anchor = torch.empty(0, requires_grad=True)
    found = [id(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()]
    chosen = set(found[:1] if once else found)
    return map_tensors(lambda t: _Anchor.apply(anchor, t) if id(t) in chosen else t, output)  # type: ignore[no-untyped-call]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None


class _PostBackward(torch.autograd.Function):
    """Identity; its backward runs when the gradients of its inputs are complete."""

    @staticmethod
    def forward(ctx: Any, who: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.who = who
        return tensors

    @staticmethod
    @_torch.uncompiled
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _post_backward_hook(*ctx.who)
        return (None, *grads)


@_torch.uncompiled
def _post_backward_hook(
    unit: Owner, call: weakref.ref[Call], run: weakref.ref[ModuleForward], grad: torch.Tensor | None = None
) -> None:
    watcher, known = unit(), call()
    if watcher is None:
        refuse_orphan()
    elif known is not None and not (known.running and known.is_running(run)):
        known._watched[run] = True
        known.passed = not known.unwatched and False not in known._watched.values()
        watcher.post_backward()


@_torch.uncompiled
def pre_backward_hook(call: Call, run: ModuleForward, grad: torch.Tensor | None = None) -> None:
    """The hook on an output, which owns the call and the run of its module."""
    unit = call.unit()
    if unit is None:
        return
    if not _torch.transforming():
        unit.pre_backward(call)
        return
    with _torch.Untransformed():
        unit.pre_backward(call)


class _OutputReached(torch.autograd.Function):
    """Identity of an output and of its tangent; ``reached`` is called when a gradient reaches either.

    Transforms (`jvp`, `vjp`, `vmap`) apply to modules, not to flatshard's hooks. Inside a transform tensors
    are wrapped, and ``requires_grad`` may be False on a tensor that an outer backward will reach. So all-gathers and
    releases run outside of it (`_torch.Untransformed`), and this function, which supports transforms, watches all
    outputs. Inputs are not watched: a forward then has gradients on several paths (primal and tangent), and only the
    hooks of the parameters show when all of them are complete.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(reached: Callable[[], None], output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reached = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.reached()
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> Any:
        return _OutputReached.apply(ctx.reached, tangent)  # type: ignore[no-untyped-call]


def watch_transformed(reached: Callable[[], None], output: Any) -> tuple[Any, bool]:
    """``output`` with every tensor that may get a gradient watched, and whether there is one."""
    if not torch.is_grad_enabled():
        return output, False
    wanted = {id(t) for t in tensors_in(output) if t.is_floating_point() or t.is_complex()}
    watched = map_tensors(lambda t: _OutputReached.apply(reached, t) if id(t) in wanted else t, output)  # type: ignore[no-untyped-call]
    return watched, bool(wanted)
