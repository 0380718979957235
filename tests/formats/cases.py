"""What one process makes of the formats: the reference of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import MixedPrecisionPolicy
from flatshard.buffer.blocks import decode_rows, encode_rows
from flatshard.engine.units.unit import unit_of
from tests.dist.models import Net

BLOCK = 16  # the rows of the small models have 12 and 20 elements: less than a block, and more


def matrices(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "." in name  # the embedding is a unit, and has no name in it


def policy(**fields: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**{"block": BLOCK, "encodes": matrices, **fields})


def through(values: torch.Tensor, code: Any, block: int = BLOCK) -> torch.Tensor:
    """Rows encoded and decoded, in float32."""
    rows = values.detach().reshape(values.shape[0], -1)
    return decode_rows(*encode_rows(rows, code, block), block).view(values.shape)


def mesh_of(sizes: Sequence[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("outer", "inner")[-len(sizes) :])


def units_of(net: Net) -> list[nn.Module]:
    return [net.embed, *net.blocks, net]


def is_encoded(name: str, parameter: torch.Tensor) -> bool:
    """In nets whose embedding, blocks and root are units; names are from the root down."""
    return parameter.dim() == 2 and not name.startswith("embed")


def sent(model: nn.Module, lane: str) -> dict[str, list[int]]:
    """The bytes of each collective of a lane so far, by kind."""
    unit = unit_of(model)
    assert unit is not None
    assert unit.root is not None
    found: dict[str, list[int]] = {}
    for operation in getattr(unit.root, f"{lane}_lane").history:
        found.setdefault(operation.kind, []).append(operation.numbytes)
    return found


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()
