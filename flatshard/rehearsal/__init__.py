"""Rehearsal: run one rank of W on a single device, over a modelled network.  docs/rehearsal.md says what is modelled.

with rehearse(world=512, network="h100-ib400") as rehearsal:
    train()                          # unchanged code: any process group, FSDP2, DDP, DeviceMesh, flatshard
print(rehearsal.report().table())
"""

from typing import TYPE_CHECKING

from flatshard._lazy import attach

if TYPE_CHECKING:
    from flatshard.rehearsal.network import PRESETS, Link, Network
    from flatshard.rehearsal.report import Report
    from flatshard.rehearsal.session import Rehearsal, current, rehearse

_HOMES = {
    "network": ("PRESETS", "Link", "Network"),
    "report": ("Report",),
    "session": ("Rehearsal", "current", "rehearse"),
}
__getattr__, __dir__ = attach(__name__, _HOMES)

__all__ = ["PRESETS", "Link", "Network", "Rehearsal", "Report", "current", "rehearse"]
