"""Autograd, transforms and compilers: may touch autograd's engine, hooks and gradients of tensors, and `torch._C`."""

from __future__ import annotations

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

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # what autograd runs on this thread, by number


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recompute."""
    return graph_task() != -1


def will_be_executed(node: Any) -> bool:
    """Within a backward: whether it goes, or went, through a node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward that is running on this thread has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def keeping_versions(tensors: Sequence[torch.Tensor]) -> Any:
    """A context in which writing to the tensors does not count as a change that autograd must not overlook."""
    return _unsafe_preserve_version_counter(tuple(tensors))


# Gradients

PlainAttributes = torch._C.DisableTorchFunctionSubclass  # within, those of DTensors cost no more than a tensor's
_GRAD: Any = torch.Tensor.grad


def grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its ``.grad`` as it is, whoever wants to know of reads."""
    with PlainAttributes():
        found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def on_grad_read(action: Callable[[], None] | None) -> None:
    """Call ``action`` before somebody reads the ``.grad`` of a DTensor; not within `PlainAttributes`. None: no longer.

    Only while there is something to do: a property in Python, in the place of the one of C++, costs every read.
    """
    if action is None:
        if "grad" in DTensor.__dict__:
            del DTensor.grad
        return

    def read(parameter: torch.Tensor) -> torch.Tensor | None:
        if torch._C._is_torch_function_enabled():
            action()
        return grad_of(parameter)

    DTensor.grad = property(read, _GRAD.__set__, _GRAD.__delete__)  # type: ignore[assignment]


def allow_grad_of(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``tensor`` have a gradient of another dtype than its own. Drops one of a third dtype."""
    if tensor.grad_dtype != dtype:
        if tensor.grad is not None and tensor.grad.dtype != dtype:
            tensor.grad = None  # autograd refuses the change while a gradient is there
        tensor.grad_dtype = dtype


# Hooks


def grads_and_hooks(parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Which have a gradient; which have tensor hooks; which have post-accumulate hooks."""
    had_grad: list[int] = []
    changed: list[int] = []
    finished: list[int] = []
    with PlainAttributes():
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                had_grad.append(index)
            if parameter._backward_hooks:
                changed.append(index)
            if parameter._post_accumulate_grad_hooks:
                finished.append(index)
    return had_grad, changed, finished


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """``register_hook``, before all that there are, and without a handle to remove it by."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    before = list(hooks)
    hooks[RemovableHandle.next_id] = hook
    RemovableHandle.next_id += 1
    for number in before:  # torch calls them in the order in which they were put in
        hooks[number] = hooks.pop(number)


def hooks_of(parameter: torch.Tensor, post_accumulate: bool) -> list[Callable[[torch.Tensor], Any]]:
    """The functions given to ``register_hook``, or to ``register_post_accumulate_grad_hook``, in that order."""
    hooks = parameter._post_accumulate_grad_hooks if post_accumulate else parameter._backward_hooks
    return list((hooks or {}).values())


# Transforms, compilers, the profiler

Untransformed = torch._C._DisableFuncTorch  # within, operations are outside of the transforms of torch.func
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def transforming() -> bool:
    """Whether a transform of torch.func (jvp, vmap ...) or forward-mode differentiation is going on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def uncompiled(function: F) -> F:
    """Let torch.compile leave a function alone, with all that it calls: one graph ends before it, another begins after.

    torch.compiler.disable does the same with a wrapper, which costs microseconds a call and imports the compiler.
    """
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, "hooks of flatshard are not compiled"
    set_code_exec_strategy(marks.__code__, _SKIP)
    return function


def profiling() -> bool:
    """Whether the torch profiler is recording."""
    return torch.autograd.profiler._is_profiler_enabled
