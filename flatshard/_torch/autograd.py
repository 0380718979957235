"""Autograd, transforms and compilers: uses autograd's engine, hooks and gradients of tensors, and `torch._C`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

F = TypeVar("F", bound=Callable[..., Any])

# Backwards

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # the number of the backward on this thread


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recompute."""
    return graph_task() != -1


def in_compiled_backward() -> bool:
    """Whether compiled autograd (`torch._dynamo.config.compiled_autograd`) runs a backward of this process."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)  # torch 2.11 and 2.13


def will_be_executed(node: Any) -> bool:
    """Within a backward: whether it executes, or has executed, a node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward that is running on this thread has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def keeping_versions(tensors: Sequence[torch.Tensor]) -> Any:
    """A context in which writes to the tensors do not increase their version counters."""
    return _unsafe_preserve_version_counter(tuple(tensors))


# Gradients

PlainAttributes = torch._C.DisableTorchFunctionSubclass  # makes attributes of DTensors fast
_GRAD: Any = torch.Tensor.grad


def grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The ``.grad`` of a parameter, without the action of `on_grad_read`."""
    with PlainAttributes():
        found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def on_grad_read(action: Callable[[bool], None] | None) -> None:
    """Call ``action`` before the ``.grad`` of a DTensor is read or set outside of `PlainAttributes`; None removes it.

    Its argument says whether values are used, which they are not if a gradient is set to None.

    Set only while there is something to do: the property in Python that replaces the one of C++ slows every read.
    """
    if action is None:
        if "grad" in DTensor.__dict__:
            del DTensor.grad
        return

    def read(parameter: torch.Tensor) -> torch.Tensor | None:
        if torch._C._is_torch_function_enabled():
            action(True)
        return grad_of(parameter)

    def write(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
        if torch._C._is_torch_function_enabled():
            action(grad is not None)
        _GRAD.__set__(parameter, grad)

    DTensor.grad = property(read, write, _GRAD.__delete__)  # type: ignore[assignment]


def accumulation(leaf: torch.Tensor) -> Any:
    """The node that adds to the ``.grad`` of a leaf. Autograd makes a new one if nothing holds it, as graphs do."""
    with torch.enable_grad():
        behind = _Behind.apply(leaf)  # type: ignore[no-untyped-call]  # torch 2.11 frees its node along with it
    return behind.grad_fn.next_functions[0][0]


def before_node(node: Any, action: Callable[[], None]) -> RemovableHandle:
    """Call ``action`` before autograd executes a node."""
    handle: RemovableHandle = node.register_prehook(lambda _: action())
    return handle


class _Behind(torch.autograd.Function):
    """Its node comes after that of its input. It calls no operator, of which some DTensors support few."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def allow_grad_of(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Allow ``tensor`` to have a gradient of ``dtype``. Drops a gradient of another dtype."""
    if tensor.grad_dtype != dtype:
        if tensor.grad is not None and tensor.grad.dtype != dtype:
            tensor.grad = None  # autograd refuses the change while a gradient is there
        tensor.grad_dtype = dtype


# Hooks


def grads_and_hooks(parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int], list[int], list[int]]:
    """The indices of parameters with a gradient, with tensor hooks, with post-accumulate hooks, and in graphs."""
    had_grad: list[int] = []
    changed: list[int] = []
    finished: list[int] = []
    in_graphs: list[int] = []
    with PlainAttributes():
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                had_grad.append(index)
            if parameter._backward_hooks:
                changed.append(index)
            if parameter._post_accumulate_grad_hooks:
                finished.append(index)
            # Python counts as one user, and a node that adds to `.grad` as another.
            if parameter._use_count() > 1:  # type: ignore[attr-defined]
                in_graphs.append(index)
    return had_grad, changed, finished, in_graphs


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """As ``register_hook``, but the hook is called before all existing ones and cannot be removed."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    before = list(hooks)
    hooks[RemovableHandle.next_id] = hook
    RemovableHandle.next_id += 1
    for number in before:  # torch calls them in the order of insertion
        hooks[number] = hooks.pop(number)


def hooks_of(parameter: torch.Tensor, post_accumulate: bool) -> list[Callable[[torch.Tensor], Any]]:
    """The functions given to ``register_hook``, or to ``register_post_accumulate_grad_hook``, in that order."""
    hooks = parameter._post_accumulate_grad_hooks if post_accumulate else parameter._backward_hooks
    return list((hooks or {}).values())


# Transforms, compilers, the profiler

Untransformed = torch._C._DisableFuncTorch  # a context outside of the transforms of torch.func
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def transforming() -> bool:
    """Whether a transform of torch.func (jvp, vmap ...) or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def uncompiled(function: F) -> F:
    """Exclude a function, and all that it calls, from torch.compile: graphs break before and after it.

    torch.compiler.disable does the same with a wrapper, which costs microseconds per call and imports the compiler.
    """
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, "hooks of flatshard are not compiled"
    set_code_exec_strategy(marks.__code__, _SKIP)
    return function


def profiling() -> bool:
    """Whether the torch profiler is recording."""
    return torch.autograd.profiler._is_profiler_enabled
