"""The state of a group's parameters when it last put them into its modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flatshard import _torch
from flatshard.engine.parameters.sharded_param import ShardedParam, Site

Slots = dict[str, nn.Parameter | None]


class Snapshot:
    """Detects that a parameter of a module, its memory, or its `.data` has been replaced.

    A unit is not notified of such changes: parameters, and modules below the unit's own, do not refer to a unit. So
    every forward checks every parameter, with as few function calls as possible.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._parameters = [param.sharded for param in params]
        self.locals = [_torch.local_of(parameter) for parameter in self._parameters]
        self._storages = list(map(_torch.storage_id, self._parameters))
        self._alive = list(map(_torch.storage_of, self._parameters))  # so that no other gets the number of one
        self._local_ids = list(map(id, self.locals))
        self._places: list[tuple[Slots, str, nn.Parameter]] = []
        self._others: list[tuple[Site, nn.Parameter]] = []
        for param in params:
            for site in param.sites:
                self.add(site, param.sharded)

    def add(self, site: Site, parameter: nn.Parameter) -> None:
        """Check one more site too."""
        if site.slots is None:
            self._others.append((site, parameter))
        else:
            self._places.append((site.slots, site.name, parameter))

    def has_changed(self) -> bool:
        """Whether a parameter in a module, or its memory, has been replaced. Called once per forward."""
        try:
            for slots, name, parameter in self._places:
                if slots[name] is not parameter:
                    return True
        except KeyError:
            return True
        for site, parameter in self._others:
            if site.look() is not parameter:
                return True
        if list(map(id, map(_torch.local_part, self._parameters))) != self._local_ids:
            return True
        return list(map(_torch.storage_id, self._parameters)) != self._storages

    def is_moved(self, index: int) -> bool:
        """Whether a parameter, wherever it is, has other memory."""
        return _torch.local_of(self._parameters[index]) is not self.locals[index]

    def accept_data(self, index: int) -> None:
        """Accept the current `.data` of all parameters."""
        parameter = self._parameters[index]
        self._storages[index], self._alive[index] = _torch.storage_id(parameter), _torch.storage_of(parameter)

    def other_data(self) -> list[int]:
        """The parameters that were given another `.data`, and keep their memory."""
        return [
            index
            for index, parameter in enumerate(self._parameters)
            if not self.is_moved(index) and _torch.storage_id(parameter) != self._storages[index]
        ]
