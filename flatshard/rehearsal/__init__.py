"""Rehearsal: be one rank of W on a single device, over a modelled network.  See docs/rehearsal.md for what is real.

with rehearse(world=512, network="h100-ib400") as rehearsal:
    train()                          # unchanged: any process group, FSDP2, DDP, DeviceMesh, flatshard
print(rehearsal.report().table())
"""

from flatshard.rehearsal.network import PRESETS, Link, Network
from flatshard.rehearsal.report import Report
from flatshard.rehearsal.session import Rehearsal, current, rehearse

__all__ = ["PRESETS", "Link", "Network", "Rehearsal", "Report", "current", "rehearse"]
