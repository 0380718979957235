"""Full names of parameters, for errors."""

from __future__ import annotations

from torch import nn

from flatshard.engine.groups.param_group import ParamGroup


class Names:
    """The names of a group's params: from ``root`` down if it is known, otherwise from the unit's own modules.

    Computed one by one, because the search for a module is slow.
    """

    def __init__(self, group: ParamGroup, root: nn.Module | None) -> None:
        self._params = group.params
        self._root = root

    def __getitem__(self, index: int) -> str:
        param = self._params[index]
        if not param.sites:  # other parameters have taken its place
            return param.name
        holder = param.sites[0].module()
        for prefix, module in self._root.named_modules() if self._root is not None else ():
            if module is holder:
                return f"{prefix}.{param.sites[0].name}" if prefix else param.sites[0].name
        # A unit of several modules may have several of one name.
        alike = sum(other.name == param.name for other in self._params) > 1
        return f"{type(holder).__name__}.{param.name}" if alike else param.name
