"""Faults at every point of a training step: count the points of a clean one, then fail at the k-th, for every k.

`Faults.watch()` puts itself around the hooks of units, the launches of lanes and the allocations of pools. Operators of
torch, the model's as well as the engine's, are counted where a `TorchDispatchMode` sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard.buffer.collectives import Gather
from flatshard.buffer.lanes import Lane
from flatshard.buffer.pools import Pool
from flatshard.engine.groups import param_group
from flatshard.engine.schedule import root
from flatshard.engine.units.unit import Unit
from flatshard.engine.watch import calls


class Fault(Exception):
    """Of no other cause."""


# kind -> whose, and under which name; both ends of a hook are points
POINTS: dict[str, list[tuple[Any, str]]] = {
    "hook": [
        (Unit, "_pre_forward"),
        (Unit, "_post_forward"),
        (calls, "pre_backward_hook"),
        (calls, "_post_backward_hook"),
        (param_group, "gradient_arrived"),
        (root, "_end_backward"),
    ],
    "launch": [
        (Gather, "launch"),
        (Lane, "reduce_scatter"),
        (Lane, "all_reduce"),
        (Lane, "max_over_ranks"),
        (Lane, "group"),
    ],
    "memory": [
        (Pool, "empty"),
        (Pool, "allocate"),
        (Pool, "_make"),
        (Pool, "temporary"),
        (torch.UntypedStorage, "resize_"),
    ],
}
KINDS = (*POINTS, "operator")


class Faults:
    """``count`` points have been passed since `begin`; at number ``at`` it raises."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names: list[str] = []  # of the points that have been passed
        self._at: int | None = None
        self._on = False

    def point(self, name: str) -> None:
        if not self._on:
            return
        self.names.append(name)
        if len(self.names) - 1 == self._at:
            self._on = False  # what cleans up afterwards is not broken too
            raise torch.OutOfMemoryError(f"at {name}") if self.kind in ("memory", "operator") else Fault(f"at {name}")

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within, points are seen. Models must be built within, since units take their hooks along."""
        with ExitStack() as stack:
            for owner, name in POINTS.get(self.kind, ()):
                known = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, self._around(known, f"{owner.__name__}.{name}")))
            yield

    def _around(self, known: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(known)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not (name.endswith("resize_") and args[-1] == 0):  # giving storage back does not fail
                self.point(name)
            result = known(*args, **kwargs)
            if self.kind == "hook":
                self.point(f"the end of {name}")
            return result

        return watched

    @contextmanager
    def counting(self, at: int | None = None) -> Iterator[None]:
        """Within, count, and raise at a point."""
        self.names, self._at, self._on = [], at, True
        try:
            with _Operators(self) if self.kind == "operator" else ExitStack():
                yield
        finally:
            self._on = False


class _Operators(TorchDispatchMode):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._faults.point(str(func))
        return func(*args, **(kwargs or {}))
