"""`gather_format="auto"`: encode the all-gathers that compute waits for, and no others."""

from __future__ import annotations

import weakref
from dataclasses import replace

from flatshard import _recording
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import RootProtocol

_WARMUP = 2  # steps before the one that is measured: the first has no prefetch
# Seconds per step and weight. Encoding once and decoding twice read and write about 10 bytes of device memory.
_COST = 5e-12


class AutoFormats:
    """Measures how long compute waits for the all-gathers of each unit in one step, then chooses their formats.

    The longest wait of all ranks counts, so all ranks choose the same.
    """

    def __init__(self) -> None:
        self._recording: _recording.Recording | None = None
        self._stop: weakref.finalize[[], AutoFormats] | None = None  # stops the recording, unless it is the user's
        self._first = 0  # the first wait of the measured step
        self._step = _WARMUP + 1  # the measured step

    def begin_forward(self, root: RootProtocol, step: int, grads: bool) -> bool:
        """A forward of this optimizer step starts. Returns whether the formats have been chosen."""
        if self._recording is not None and step > self._step and grads:
            return self.choose(root)
        if self._recording is None and step >= self._step and grads:
            self._recording, self._step = _recording.active, step
            if self._recording is None:
                self._recording = _recording.Recording()
                self._stop = weakref.finalize(self, self._recording.stop)  # if the model is deleted before the choice
            self._first = len(self._recording.waits)
        if self._stop is not None and _recording.active in (None, self._recording):
            _recording.active = self._recording if grads else None  # evaluation does not count
        return False

    def choose(self, root: RootProtocol) -> bool:
        """Choose the formats by what has been measured. All ranks call it, between passes."""
        if self._recording is None:
            return False
        for unit in root.units:  # not while the weights are in use
            if Lease.USER in unit.leases or Lease.GRAPH in unit.leases or any(group.is_held for group in unit.groups):
                return False
        if self._stop is not None:
            self._stop()
        exposed = self._recording.gather_waits(self._first, root)
        mine = [int(1e9 * exposed.get(unit.name, 0.0)) for unit in root.units]
        longest = root.gathers.lane.max_over_ranks(root.meshes, mine, "the choice of gather formats")
        for unit, nanoseconds in zip(root.units, longest):
            if unit.policy.gather_format == "auto":
                weights = sum(group.layout.payload for group in unit.groups if any(group.formats.encoded))
                is_exposed = weights > 0 and 1e-9 * nanoseconds > _COST * weights
                root.set_precision([unit], replace(unit.policy, gather_format="int8" if is_exposed else None))
        return True
