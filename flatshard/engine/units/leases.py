"""The full weights of a unit: why they stay gathered, and when the modules hold them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from flatshard.engine.groups.param_group import ParamGroup


class Lease(Enum):
    """A reason to keep the full weights of a unit. Modules have full parameters under the first two.

    A unit without any is resharded.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function

    PASS = "a pass"  # is running through the unit, or has recomputed it for its backward
    USER = "gathered()"  # its block is running
    PREFETCH = "prefetch"  # until the running pass reaches or skips the unit, or ends
    NEXT = "the next pass"  # uses them if main has not changed by then
    GRAPH = "a graph of gradients"  # of a backward with create_graph=True; its own backward reads the weights


class FullWeights:
    """The part of `Unit` that gathers, shows and releases full weights.

    Invariant: a group is gathered as long as a unit that needs it has a lease, and modules hold full parameters as long
    as one of these units has a lease of a pass or of the user.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.groups = list(groups)
        self.needs = list(groups)  # and groups of other units with parameters that are tied to its own
        self.leases: dict[Lease, Any] = {}  # the value of `USER` is the number of blocks
        self.is_first = True  # of the micro-batches of an optimizer step
        self.keeps_for_next = False  # gathered between the micro-batches of a step

    @property
    def is_gathered(self) -> bool:
        for group in self.needs:
            if group.ticket is None:
                return False
        return True

    def keep(self) -> None:
        """Keep the gathered weights for the next pass, which uses them if main has not changed."""
        self.leases[Lease.NEXT] = True
        self.record_main_state()

    def record_main_state(self) -> None:
        """Record the state of main from which the weights are gathered: hooks may write main during a pass."""
        for group in self.needs:
            if group.gathered_from is None:
                group.gathered_from, group.gathered_after = group.state, group.writes

    @property
    def is_outdated(self) -> bool:
        """Whether main has changed, on all ranks, since weights were gathered that no pass uses yet."""
        for group in self.needs:
            waits = group.ticket is not None and not group.is_full and not group.is_held
            if waits and group.gathered_after != group.writes:
                return True
        return False

    def keeps(self) -> bool:
        """Whether the forward that starts can use the gathered weights: they have the values of main."""
        if Lease.NEXT not in self.leases and Lease.USER not in self.leases:
            return False
        if self.keeps_for_next and self.is_first and Lease.GRAPH not in self.leases:
            return False
        if any(group.gathered_from != group.state for group in self.needs):
            return False
        return not any(group.snapshot.has_changed() for group in self.groups if not group.is_full)

    @property
    def shows_full(self) -> bool:
        """Whether the modules hold full parameters."""
        for group in self.needs:
            if not group.is_full:
                return False
        return True

    def swap_in(self) -> None:
        """Wait for the all-gathers and put the full parameters into the modules, for `gathered` or for a pass."""
        if Lease.USER not in self.leases:
            self.leases[Lease.PASS] = True
        for group in self.needs:
            group.swap(to_full=True)

    def release(self, always: bool = False) -> None:
        """Release the gathered weights, unless another unit needs them. A running `gathered` block keeps them.

        Weights that a graph of second order reads are only hidden, unless ``always``.
        """
        if Lease.GRAPH in self.leases and not always:
            self.hide()
            return
        self.leases = {Lease.USER: self.leases[Lease.USER]} if Lease.USER in self.leases else {}
        for group in self.needs:
            leases = self._leases_of_others(group) if group.borrowers else ()
            if not leases:
                if group.ticket is not None:
                    group.release()
            elif Lease.PASS not in leases and Lease.USER not in leases:
                group.swap(to_full=False)

    def free(self) -> None:
        """`release`, and free memory that is kept while nothing is gathered: the unit gets another pool."""
        self.release()
        for group in self.needs:
            group.free()

    def hide(self) -> None:
        """Put the sharded parameters back after a pass, but keep the full weights gathered."""
        self.leases.pop(Lease.PASS, None)
        if Lease.USER in self.leases:
            return
        for group in self.needs:
            leases = self._leases_of_others(group) if group.borrowers else ()
            if Lease.PASS not in leases and Lease.USER not in leases:
                group.swap(to_full=False)

    def _leases_of_others(self, group: ParamGroup) -> set[Lease]:
        """The leases of other units that share a group with this one."""
        return {lease for other in group.units if other is not self for lease in other.leases}
