"""What all ranks must have alike: what a model is made of, what it holds, and what is launched next.

Ranks compare numbers, by as many small exchanges on one as on all, and every rank comes to know of a difference; only
then do they ask each other for words. So all of them raise, and say the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import Lane
from flatshard.trust.alarm import GRACE

if TYPE_CHECKING:
    from flatshard.engine.parameters import Member
    from flatshard.engine.scope import Scope
    from flatshard.engine.unit import Unit
    from flatshard.engine.weights import Group

_WORDS = 768  # bytes of one text
_NONE = -(1 << 62)


def patience() -> timedelta | None:
    """How long the ranks wait for each other before every launch in check mode; None: it is off.

    ``FLATSHARD_CHECK``: 1 for ten seconds, or another number of seconds.
    """
    given = os.environ.get("FLATSHARD_CHECK", "").strip().lower()
    if given in ("", "0", "off", "false", "no"):
        return None
    try:
        seconds = 10.0 if given in ("1", "on", "true", "yes") else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"FLATSHARD_CHECK={given!r}: must be 1, or how many seconds ranks wait for each other, or 0")
    return timedelta(seconds=max(seconds - GRACE, 1.0))  # then they are asked who is there


class Agreement:
    """Among all ranks of some meshes. Every method is called by all of them."""

    def __init__(self, lane: Lane, meshes: Sequence[DeviceMesh]) -> None:
        self._lane, self._meshes = lane, list(meshes)

    def differs(self, number: int, about: str) -> bool:
        """Whether the ranks have different numbers."""
        lowest, highest = self._lane.most(self._meshes, [-number, number], about)
        return -lowest != highest

    def check(self, said: Sequence[str], about: str) -> str | None:
        """None if all ranks say the same. Else the first thing in which one differs from the first rank, and who."""
        if not self.differs(digest(said), about):
            return None
        same, longest = 0, max(self._lane.most(self._meshes, [len(said)], about))
        while same < longest:  # so many are known to be alike, and one of those up to `longest` is not
            middle = (same + longest) // 2
            if self.differs(digest(said[: middle + 1]) if middle < len(said) else -1 - len(said), about):
                longest = middle
            else:
                same = middle + 1
        mine = said[same] if same < len(said) else "nothing more"
        first, other = self.odd_one(digest(mine), about)
        words = [self._words(mine if self._lane.rank == rank else None, about) for rank in (first, other)]
        return f"rank {first}: {words[0]}; rank {other}: {words[1]}"

    def different_values(self, sums: Sequence[int], is_changed: Sequence[bool], about: str) -> list[int]:
        """Which of these numbers differ between ranks, apart from those that some rank has changed."""
        numbers = [n for value, changed in zip(sums, is_changed) for n in (value, -value, int(changed))]
        found = self._lane.most(self._meshes, numbers, about)
        return [at // 3 for at in range(0, len(found), 3) if not found[at + 2] and found[at] != -found[at + 1]]

    def odd_one(self, value: int, about: str) -> tuple[int, int]:
        """The first rank, and the first that has another number than that."""
        rank = self._lane.rank
        first = -self._most(-rank, about)
        theirs = self._most(value if rank == first else _NONE, about)
        return first, -self._most(-rank if value != theirs else _NONE, about)

    def _most(self, number: int, about: str) -> int:
        return self._lane.most(self._meshes, [number], about)[0]

    def _words(self, text: str | None, about: str) -> str:
        """The text of the one rank that has one."""
        data = (text or "").encode()[:_WORDS].ljust(_WORDS, b"\0")
        return bytes(self._lane.most(self._meshes, list(data), about)).rstrip(b"\0").decode(errors="replace")


def digest(said: object) -> int:
    """A number that two share if, and almost surely only if, what they say is the same."""
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7], "big")


def check_model(scope: Scope, lane: Lane, meshes: Sequence[DeviceMesh]) -> None:
    """Before the first launch of a root: raise on all ranks if their models differ, in structure or in values.

    Ranks of a mesh are asked about what is sharded over it: experts may differ between those of different meshes.
    """
    found = [_difference(scope, lane, mesh, first=number == 0) for number, mesh in enumerate(meshes)]
    told = next((difference for difference in found if difference is not None), None)
    if len(meshes) > 1 and Agreement(lane, meshes).differs(int(told is not None), "the comparison of models"):
        told = told or "ranks of another mesh; they say in what"
    if told is not None:
        raise RuntimeError(f"ranks differ in their models. {told}")


def _difference(scope: Scope, lane: Lane, mesh: DeviceMesh, first: bool) -> str | None:
    agreement, about = Agreement(lane, [mesh]), "the comparison of models, before the first launch"
    units = scope.units
    told = agreement.check(_described(scope, units, mesh, first), about)
    if told is not None:
        return f"The first difference is, {told}"
    groups = [(unit, group) for unit in units for group in unit.groups if group.mesh == mesh]
    checked = [(unit, group, group.initial) for unit, group in groups if group.initial is not None]
    names = [_full_name(unit, member) for unit, group, _ in checked for member in group.members]
    if not names:
        return None
    sums, is_changed = _sums(checked)
    different = agreement.different_values(sums, is_changed, about)
    for _, group, _ in checked:
        group.initial = None
    if not different:
        return None
    at, more = different[0], len(different) - 1
    ranks = agreement.odd_one(sums[at], about)
    return (
        f"Parameter '{names[at]}' was sharded with other values on rank {ranks[1]} than on rank {ranks[0]}"
        + (f", and so were {more} more" if more else "")
        + ". Give all ranks the same (a seed, a checkpoint), keep those of the first rank with "
        "fully_shard(..., values='first'), or mix what they have with values='own'"
    )


def _described(scope: Scope, units: Sequence[Unit], mesh: DeviceMesh, first: bool) -> list[str]:
    """What is the same on all ranks of a mesh, in the order of registration."""
    said = [f"meshes {[tuple(mesh.shape) for mesh in scope.meshes]}, {scope.policy}"] if first else []
    for unit in units:
        groups = [group for group in unit.groups if group.mesh == mesh]
        if unit.mesh == mesh or groups:
            told = unit.settings
            said.append(
                f"unit '{unit.name}', {unit.policy}, reshard_after_forward={told.reshard_after_forward}, "
                f"optional={told.is_optional}"
            )
        for group in groups:
            layout, rests = group.main.layout, group.placements
            where = f"{rests.parameter} {rests.gradient} {rests.optimizer}, in one of {len(layout.segments)} segments"
            for member, slot in zip(group.members, layout.slots):
                said.append(
                    f"parameter '{_full_name(unit, member)}' of shape {tuple(slot.shape)}, {group.main.dtype}, "
                    f"requires_grad={member.sharded.requires_grad}, cut on dim {slot.dim} at {slot.offset}, {where}"
                )
    return said


def _full_name(unit: Unit, member: Member) -> str:
    return f"{unit.name}.{member.name}" if unit.index else member.name


# Values


class Initial:
    """Sums over the values of a group when it was sharded: of its full parameters, and of this rank's parts."""

    def __init__(self, full: Sequence[torch.Tensor]) -> None:
        self.full = [_checksum(tensor) for tensor in full]
        self.parts: list[torch.Tensor] = []

    def of_parts(self, group: Group) -> list[torch.Tensor]:
        return [_checksum(group.main.local_view(index)) for index in range(len(group.members))]


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number over all bytes that changes with any of them, and with the order of rows."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    rows = (
        tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().reshape(1).view(torch.uint8)
    )
    rows = rows.reshape(tensor.shape[0] if tensor.dim() > 1 else tensor.numel(), -1)
    if rows.shape[1] % 8 == 0:
        summed = rows.view(torch.int64).sum(1)
    else:
        size = next(size for size in (4, 2, 1) if rows.shape[1] % size == 0)
        summed = rows.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]).sum(1, dtype=torch.int64)
    places = torch.arange(1, 2 * len(summed), 2, device=summed.device)
    return (summed * places).sum()


def _sums(checked: Sequence[tuple[Unit, Group, Initial]]) -> tuple[list[int], list[bool]]:
    """Per parameter: the sum that it was sharded with, and whether this rank has changed its part since."""
    full = [each for _, _, initial in checked for each in initial.full]
    before = [each for _, _, initial in checked for each in initial.parts]
    now = [each for _, group, initial in checked for each in initial.of_parts(group)]
    device = full[0].device
    table = torch.stack([each.to(device) for each in (*full, *before, *now)]).view(3, -1)
    # Sums that come to be negated, and of which the lowest number stands for none.
    sums, *parts = table.tolist()
    return [value >> 2 for value in sums], [a != b for a, b in zip(*parts)]
