"""Random numbers of recomputed segments in a CUDA graph: the same in forward and in the recompute, others each time.

`torch.utils.checkpoint` reads the state of the generator before a segment and sets it again before its recompute.
Within a graph nothing can be read: a replay tells the generators that the graph knows where to begin. So each segment
has two generators of its own, one for its forward and one for its recompute, and before a replay both are made to begin
at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint as checkpointing

_STEP = 0x9E3779B97F4A7C15  # between the seeds of segments
_SEEDS = 1 << 63


class Segments:
    """How many segments a step recomputes; `counted` counts them."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the segments in the body that are to be recomputed with the same random numbers."""
        read, self.count = checkpointing.get_device_states, 0

        def get(*args: Any) -> Any:
            self.count += 1
            return read(*args)

        with patch.object(checkpointing, "get_device_states", get):
            yield


class Generators:
    """Two for each segment of a graph that is to be captured."""

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
        """In the body, which is captured, segments use them. What follows a segment goes on with its generator."""
        own, begun = self._default.graphsafe_get_state(), iter(range(len(self._pairs)))

        def get(*args: Any) -> Any:
            number = next(begun, None)
            if number is None:
                raise RuntimeError("it recomputes more segments than the last step that was not captured")
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
        """Before a replay: the recompute of each segment is to draw what its forward will."""
        for first, again in self._pairs:
            again.set_offset(first.get_offset())
