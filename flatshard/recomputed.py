"""Random numbers of checkpointed segments in a CUDA graph: the same in forward and recompute, new ones in each replay.

`torch.utils.checkpoint` reads the generator's state before a segment and sets it again before its recompute. A captured
step cannot read it: a replay sets the offsets of the generators that are registered with the graph. So each segment has
two generators, one for its forward and one for its recompute, and before a replay both get the same offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint as checkpointing

_STEP = 0x9E3779B97F4A7C15  # difference between the seeds of two segments
_SEEDS = 1 << 63


class Segments:
    """The number of segments that a step recomputes, as `counted` counts them."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the segments of the body that preserve the random state for their recompute."""
        read, self.count = checkpointing.get_device_states, 0

        def get(*args: Any) -> Any:
            self.count += 1
            return read(*args)

        with patch.object(checkpointing, "get_device_states", get):
            yield


class Generators:
    """Two generators for each segment of a graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, count: int) -> None:
        self._default: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        self._pairs: list[tuple[Any, Any]] = []
        for number in range(1, count + 1):
            pair = self._default.clone_state(), self._default.clone_state()
            for generator in pair:
                generator.manual_seed((self._default.initial_seed() + number * _STEP) % _SEEDS)
                graph.register_generator_state(generator)
            self._pairs.append(pair)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let segments in the body, which is captured, use them. Code after a segment continues with its generator."""
        own, begun = self._default.graphsafe_get_state(), iter(range(len(self._pairs)))

        def get(*args: Any) -> Any:
            number = next(begun, None)
            if number is None:
                raise RuntimeError("it recomputes more checkpointed segments than the last eager step")
            self._default.graphsafe_set_state(self._pairs[number][0])
            return [], [number]

        def set_(devices: Any, states: Any, *, device_type: Any = None) -> None:
            self._default.graphsafe_set_state(self._pairs[states[0]][1])

        fork = torch.random.fork_rng

        @contextmanager
        def forked(*args: Any, **kwargs: Any) -> Iterator[None]:
            before = self._default.graphsafe_get_state()
            try:
                with fork(*args, **kwargs):
                    yield
            finally:
                self._default.graphsafe_set_state(before)

        try:
            with (
                patch.multiple(checkpointing, get_device_states=get, set_device_states=set_),
                patch.object(torch.random, "fork_rng", forked),
            ):
                yield
        finally:
            self._default.graphsafe_set_state(own)

    def align(self) -> None:
        """Before a replay: let the recompute of each segment draw the same numbers as its forward."""
        for first, again in self._pairs:
            again.set_offset(first.get_offset())
