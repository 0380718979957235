"""One optimizer step that consists of several calls, each with some of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from flatshard.optim.flat_params import are_equal

_NUMBERS = (int, float, bool)  # what optimizers count with, on themselves


class SplitStep:
    """One optimizer step as several calls, which all start with the same options and counters."""

    def __init__(self, optimizer: Optimizer, base: Callable[[], Any]) -> None:
        self.groups = optimizer.param_groups
        self.options_after: dict[int, dict[str, Any]] = {}  # the options of groups that have been stepped, by number
        self.result: Any = None
        self._optimizer, self._base = optimizer, base
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        self._counters = {k: v for k, v in optimizer.__dict__.items() if type(v) in _NUMBERS}

    @contextmanager
    def with_params(
        self, params: Iterable[tuple[int, torch.Tensor]], empty: Iterable[int] = ()
    ) -> Iterator[Callable[[], Any]]:
        """Within it, the optimizer has these parameters, given with the numbers of their groups.

        Groups without any are left out, except those in ``empty``.
        """
        members: dict[int, list[torch.Tensor]] = {number: [] for number in empty}
        for number, tensor in params:
            members.setdefault(number, []).append(tensor)
        numbers = sorted(members)
        # Tensors are copied: some optimizers count in them, too.
        copies = {n: {k: v.clone() for k, v in self._options[n].items() if torch.is_tensor(v)} for n in numbers}
        lent = [{**self._options[n], **copies[n], "params": members[n]} for n in numbers]
        self._optimizer.__dict__.update(self._counters)
        self._optimizer.param_groups = lent
        try:
            yield self._base
        finally:
            self._optimizer.param_groups = self.groups
        for number, group in zip(numbers, lent):
            group.pop("params")
            for key, value in copies[number].items():
                if group.get(key) is value and value._version == 0:  # has not been written to
                    group[key] = self._options[number][key]
            before = self.options_after.setdefault(number, group)
            both = before.keys() & group.keys()
            odd = next((k for k in {**before, **group} if k not in both or not are_equal(before[k], group[k])), None)
            if odd is not None:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} changes '{odd}' of its parameter group differently for "
                    "different matrices: it accumulates over all parameters, and no rank has all of them; use another "
                    "optimizer"
                )

    def close(self) -> None:
        """Give the parameter groups the options that the calls have left."""
        for number, options in self.options_after.items():
            for key, value in options.items():
                known = self.groups[number].get(key)
                if torch.is_tensor(known) and torch.is_tensor(value) and known is not value:
                    known.copy_(value)
                else:
                    self.groups[number][key] = value
