"""What the parameters of a group looked like when it last put them into its modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flatshard import _torch
from flatshard.engine.parameters.sharded_param import ShardedParam, Site

Slots = dict[str, nn.Parameter | None]


class Snapshot:
    """Tells whether somebody has replaced a parameter in a module, its memory, or its `.data`.

    Nothing that does so tells a unit: parameters, and modules below the unit's own, know of none. So every parameter is
    looked at in every forward, by code that calls nothing it need not call.
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
        """Look at one more place too."""
        if site.slots is None:
            self._others.append((site, parameter))
        else:
            self._places.append((site.slots, site.name, parameter))

    def has_changed(self) -> bool:
        """Whether somebody has replaced a parameter in its module, or its memory. Asked once per forward."""
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
        """Whatever `.data` a parameter has is its own."""
        parameter = self._parameters[index]
        self._storages[index], self._alive[index] = _torch.storage_id(parameter), _torch.storage_of(parameter)

    def other_data(self) -> list[int]:
        """Which parameters have been given other `.data`, and go on with the memory that they had."""
        return [
            index
            for index, parameter in enumerate(self._parameters)
            if not self.is_moved(index) and _torch.storage_id(parameter) != self._storages[index]
        ]
