"""Full names of parameters, for errors."""

from __future__ import annotations

from torch import nn

from flatshard.engine.weights import Group


class Names:
    """The names of a group's members: from ``root`` down where it is known, else from the unit's own modules.

    Asked for one by one, since looking for a module takes long.
    """

    def __init__(self, group: Group, root: nn.Module | None) -> None:
        self._members = group.members
        self._root = root

    def __getitem__(self, index: int) -> str:
        member = self._members[index]
        if not member.sites:  # other parameters have taken its place
            return member.name
        holder = member.sites[0].module()
        for prefix, module in self._root.named_modules() if self._root is not None else ():
            if module is holder:
                return f"{prefix}.{member.sites[0].name}" if prefix else member.sites[0].name
        # A unit of several modules may have several of one name.
        alike = sum(other.name == member.name for other in self._members) > 1
        return f"{type(holder).__name__}.{member.name}" if alike else member.name
