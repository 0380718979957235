"""Checks that all ranks have the same model, with the same values, and launch the same collectives.

Ranks compare digests, with the same number of small all-reduces on every rank, so that every rank learns of a
difference. Only then do they exchange texts. So all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import Lane
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.parameters.values import Checksum, scrambled
from flatshard.engine.program import Program
from flatshard.engine.units.unit import Unit
from flatshard.policy import SchedulePolicy
from flatshard.trust.alarm import GRACE
from flatshard.trust.record import record

_TEXT_BYTES = 768
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
        raise ValueError(f"FLATSHARD_CHECK={given!r}: must be 0 (off), 1 (on) or a time limit in seconds")
    return timedelta(seconds=max(seconds - GRACE, 1.0))  # the alarm then takes GRACE to find the missing ranks


class Agreement:
    """Comparisons among all ranks of some meshes. All of these ranks call every method."""

    def __init__(self, lane: Lane, meshes: Sequence[DeviceMesh]) -> None:
        self._lane, self._meshes = lane, list(meshes)

    def differs(self, number: int, about: str) -> bool:
        """Whether the ranks have different numbers."""
        lowest, highest = self._lane.max_over_ranks(self._meshes, [-number, number], about)
        return -lowest != highest

    def check(self, lines: Sequence[str], about: str) -> str | None:
        """None if all ranks have the same lines. Otherwise the first difference, and which ranks differ."""
        if not self.differs(digest(lines), about):
            return None
        mine = [*lines, *["nothing more"] * (self._most(len(lines), about) - len(lines))]
        digests = [digest(line) for line in mine]
        at = self.different_values([Checksum(each, has_part=True, is_changed=False) for each in digests], about)[0]
        first, other = self.odd_one(digests[at], about)
        texts = [self._text_of(rank, mine[at], about) for rank in (first, other)]
        return f"rank {first}: {texts[0]}; rank {other}: {texts[1]}"

    def different_values(self, held: Sequence[Checksum], about: str) -> list[int]:
        """The indices of values that differ between ranks that hold parts, except those that some rank has changed."""
        numbers = []
        for each in held:
            numbers += [each.sum, -each.sum] if each.has_part else [_NONE, _NONE]
            numbers.append(int(each.is_changed))
        highest = self._lane.max_over_ranks(self._meshes, numbers, about)
        places = zip(highest[::3], highest[1::3], highest[2::3])
        return [at for at, (most, least, changed) in enumerate(places) if not changed and _NONE < most != -least]

    def odd_one(self, value: int, about: str) -> tuple[int, int]:
        """The first rank, and the first rank with another number."""
        rank = dist.get_rank()
        first = -self._most(-rank, about)
        theirs = self._most(value if rank == first else _NONE, about)
        return first, -self._most(-rank if value != theirs else _NONE, about)

    def _most(self, number: int, about: str) -> int:
        return self._lane.max_over_ranks(self._meshes, [number], about)[0]

    def _text_of(self, rank: int, text: str, about: str) -> str:
        """The text of one rank, on all of them."""
        data = (text if dist.get_rank() == rank else "").encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        return bytes(self._lane.max_over_ranks(self._meshes, list(data), about)).rstrip(b"\0").decode(errors="replace")


class Announcer:
    """Compares the launches of a root between ranks: in the first pass of each kind and, in check mode, in every pass.

    Other passes follow the recorded order. With optional units, ranks wait for each other at different places, so a
    launch must not wait for a comparison: they use the order of the program from the start.
    """

    def __init__(self, program: Program, lane: Lane) -> None:
        self.agreement: Agreement | None = None  # once the ranks have compared their models
        self.lane = lane
        self._program = program

    def announce(self, what: str, unit: Unit, group: int = 0) -> None:
        """Raise on all ranks unless all are about to do this. Only called if the program ``announces``."""
        if unit.root is not None and not unit.root.has_optional:
            self._compare(what, unit, f" (group {group})" if group else "")

    def end_pass(self, root: Unit, gathers: Lane, reduces: Lane) -> None:
        """At the end of the first pass of a kind that communicates: adopt its order, if all ranks agree."""
        program = self._program
        if not (program.has_launched or program.checks):
            return
        if program.announces:
            after = f", after {gathers.launched} gathers and {reduces.launched} reduces" if program.checks else ""
            self._compare("end the pass of", root, after=after)
        if program.is_first and self.agreement is not None:
            proposal = program.proposal()
            if not self.agreement.differs(digest(proposal), "the order of launches"):
                program.adopt(proposal)

    def _compare(self, what: str, unit: Unit, of: str = "", after: str = "") -> None:
        if self.agreement is None:
            return
        running = self._program.running
        place = "" if running is None else f" in a {running.value}"
        if self._program.checks:
            assert unit.root is not None
            mode = "training" if unit.root.units[0].modules[0].training else "evaluation"
            place += f" of step {record.step}, in {mode} mode"
        launch = f"about to {what} unit '{unit.name}'{of}{place}{after}"
        difference = self.agreement.check([launch], f"before {what} {unit.name}")
        if difference is not None:
            raise RuntimeError(
                f"ranks differ in what they do next: {difference}. All ranks must run the same units in the same "
                "order. If their batches use different parameters, call set_reduce_scatter_unused_params(True) on the "
                "model; if some do not use a unit, call fully_shard on it with optional=True"
            )


def digest(value: object) -> int:
    """A number that is the same for equal objects, and almost surely differs for others."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def check_model(units: Sequence[Unit], policy: SchedulePolicy, lane: Lane, meshes: Sequence[DeviceMesh]) -> None:
    """Before the first launch of a root: raise on all ranks if their models differ, in structure or in values.

    The ranks of each mesh compare what is sharded over that mesh: experts may differ between ranks of different meshes.
    """
    described = f"meshes {[tuple(mesh.shape) for mesh in meshes]}, {policy}"
    difference = _difference(units, lane, meshes[0], [described]) if meshes else None
    if difference is None:  # otherwise the ranks may have no other mesh in common
        differences = [_difference(units, lane, mesh, []) for mesh in meshes[1:]]
        difference = next((each for each in differences if each is not None), None)
        about = "the comparison of models"
        if len(meshes) > 1 and Agreement(lane, meshes).differs(int(difference is not None), about):
            difference = difference or "The difference is on ranks of another mesh; see their errors"
    if difference is not None:
        raise RuntimeError(f"ranks differ in their models. {difference}")


def _difference(units: Sequence[Unit], lane: Lane, mesh: DeviceMesh, lines: Sequence[str]) -> str | None:
    """How the ranks of a mesh differ in these lines, in what they shard over the mesh, or in its values."""
    agreement, about = Agreement(lane, [mesh]), "the comparison of models, before the first launch"
    difference = agreement.check([*lines, *_described(units, mesh)], about)
    if difference is not None:
        return f"The first difference: {difference}"
    groups = [(unit, group) for unit in units for group in unit.groups if group.mesh == mesh]
    names = [_full_name(unit, param) for unit, group in groups for param in group.params]
    warns = any(group.initial is not None and group.initial.warns for _, group in groups)
    held = [values for _, group in groups for values in _held(group)]
    different = agreement.different_values(held, about) if held else []
    if not different:
        return None
    at, more = different[0], len(different) - 1
    ranks = agreement.odd_one(held[at].sum, about)
    difference = (
        f"Parameter '{names[at]}' was sharded with other values on rank {ranks[1]} than on rank {ranks[0]}"
        + (f", and so were {more} more" if more else "")
        + ". Initialise all ranks alike (a seed, a checkpoint), or use the values of the first rank with "
        "fully_shard(..., values='first') or FLATSHARD_VALUES=first, or each rank's own shard with values='own'"
    )
    if warns:
        warnings.warn(f"ranks differ in their models, and training mixes their values. {difference}", stacklevel=2)
    return None if warns else difference


def _described(units: Sequence[Unit], mesh: DeviceMesh) -> list[str]:
    """What must be the same on all ranks of a mesh, in the order of registration."""
    lines: list[str] = []
    for unit in units:
        groups = [group for group in unit.groups if group.mesh == mesh]
        if unit.mesh == mesh or groups:
            lines.append(
                f"unit '{unit.name}', {unit.policy}, reshard_after_forward={unit.reshard_after_forward}, "
                f"optional={unit.is_optional}, rows={unit.rows is not None}"
            )
        for group in groups:
            layout, rests = group.main.layout, group.placements
            where = f"{rests.parameter} {rests.gradient} {rests.optimizer}, in one of {len(layout.segments)} segments"
            formats = str(group.formats)
            for param, slot, encoded in zip(group.params, layout.slots, group.formats.encoded):
                lines.append(
                    f"parameter '{_full_name(unit, param)}' of shape {tuple(slot.shape)}, {group.main.dtype}, "
                    f"computed in {group.codec.dtype}, requires_grad={param.sharded.requires_grad}, "
                    f"cut on dim {slot.dim} at {slot.offset}, {where}"
                    + (f", {'encoded' if encoded else 'not encoded'} by {formats}" if formats else "")
                )
    return lines


def _full_name(unit: Unit, param: ShardedParam) -> str:
    return f"{unit.name}.{param.name}" if unit.index else param.name


def _held(group: ParamGroup) -> list[Checksum]:
    """Per parameter. ``initial`` is given up: what is written from now on was not sharded."""
    initial, group.initial = group.initial, None
    if initial is None:  # on this rank; others may have had values
        return [Checksum(0, False, True)] * len(group.params)
    device = initial.full[0].device
    sums = [*initial.full, *initial.parts, *initial.of_parts(group.main)]
    full, before, now = torch.stack([each.to(device) for each in sums]).view(3, -1)
    has_part = [group.main.local_view(index).numel() > 0 for index in range(len(group.params))]
    return [Checksum(*each) for each in zip(scrambled(full).tolist(), has_part, (before != now).tolist())]
