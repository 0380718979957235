"""Hooks that users register on sharded parameters, called when autograd would call them on unsharded ones.

`register_hook`: called with the reduced gradient of a backward, before it is added to ``.grad``; its return value
replaces the gradient. `register_post_accumulate_grad_hook`: called with the parameter, when its `.grad` is final for
the current stream, or on CPU complete. Both are called once per backward that reduces to final gradients, and only for
parameters that it used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.parameters.sharded_param import ShardedParam


def change_gradients(
    params: Sequence[ShardedParam], hooked: Callable[[], Sequence[int]], reduced: DBuffer, factor: float
) -> None:
    """Scale the reduced gradients, and call the tensor hooks of the params ``hooked``, which may change theirs."""
    if factor != 1.0:
        reduced.local.mul_(factor)
    for index in hooked():
        param, view = params[index], reduced.local_view(index)
        for hook in _torch.hooks_of(param.sharded, post_accumulate=False):
            given = _torch.like_dtensor(param.sharded, view)
            changed, known = hook(given), weakref.ref(given)
            changed = None if changed is given else changed
            del given
            _torch.keep_values(known)
            if changed is None:
                continue
            if not isinstance(changed, DTensor) or not is_cut_alike(changed, param.sharded):
                raise TypeError(
                    f"a hook on parameter '{param.name}' returned a {type(changed).__name__} instead of a gradient "
                    "sharded like the parameter; compute the result from the gradient that the hook receives"
                )
            view.copy_(_torch.local_of(changed))


@torch.no_grad()
def call_finished(params: Sequence[ShardedParam], hooked: Callable[[], Sequence[int]]) -> None:
    """Call the post-accumulate hooks of the params ``hooked``, whose gradients are final."""
    for index in hooked():
        for hook in _torch.hooks_of(params[index].sharded, post_accumulate=True):
            hook(params[index].sharded)
