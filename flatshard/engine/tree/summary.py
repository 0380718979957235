"""A table of a sharded model, and a check of its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from flatshard import _arguments, _torch
from flatshard._sizes import format_bytes
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import Unit
from flatshard.engine.weights.formats import Formats
from flatshard.layout import is_sharded


@dataclass(frozen=True)
class GroupRow:
    """One group in a `Summary`. Bytes are of main weights on one rank.

    ``parameters``: elements that the ranks of ``mesh`` hold together; with expert parallelism, of these ranks' experts.
    """

    unit: str
    tensors: int
    parameters: int
    main: torch.dtype
    compute: torch.dtype
    trainable: bool
    placements: str
    bytes_per_rank: int
    waste: float
    kept: str
    mesh: str = ""
    formats: str = ""  # of gathers / reduces, and how many tensors are encoded
    is_offloaded: bool = False  # main weights are in host memory


_bytes = partial(format_bytes, binary=True)
_FORMATS = "gathers / reduces"
_COLUMNS: dict[str, Callable[[GroupRow], str]] = {
    "unit": lambda row: row.unit,
    "tensors": lambda row: str(row.tensors),
    "parameters": lambda row: f"{row.parameters:,}",
    "main": lambda row: f"{_short(row.main)}{' on host' if row.is_offloaded else ''}",
    "compute": lambda row: _short(row.compute),
    "grad": lambda row: "yes" if row.trainable else "no",
    "mesh": lambda row: row.mesh,
    "placement": lambda row: row.placements,
    "bytes/rank": lambda row: _bytes(row.bytes_per_rank),
    "padding": lambda row: f"{100 * row.waste:.2f}%",
    "kept": lambda row: row.kept,
    _FORMATS: lambda row: row.formats or "-",
}


@dataclass(frozen=True)
class Summary:
    """A table of units and groups; ``str`` formats it."""

    rows: tuple[GroupRow, ...]
    state: tuple[int, int] | None = None  # bytes of optimizer state on this rank, and for how many elements of it
    leases: tuple[str, ...] = ()  # units whose full weights are here now, and what for

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of main weights that this rank stores."""
        return sum(row.bytes_per_rank for row in self.rows)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        columns = [title for title in _COLUMNS if title != _FORMATS or any(row.formats for row in self.rows)]
        table = [columns, *([_COLUMNS[title](row) for title in columns] for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = sum(row.parameters for row in self.rows)
        lines.append(f"{total:,} parameters, {_bytes(self.bytes_per_rank)} of main weights on this rank")
        if self.state is not None:
            size, elements = self.state
            lines.append(f"{_bytes(size)} of optimizer state on this rank, {size / max(elements, 1):.2f} per parameter")
        if self.leases:
            lines.append(f"gathered now: {'; '.join(self.leases)}")
        return "\n".join(lines)


def summary(model: nn.Module, optimizer: Optimizer | None = None) -> Summary:
    """The units at and below ``model`` and their groups: how they are sharded, and their memory.

    ``optimizer``: include its state, as far as it exists: its bytes on this rank, and the bytes per element of the
    parameters that the rank holds and that need gradients.
    """
    _arguments.module("summary", model)
    _arguments.optimizer(optimizer)
    rows, leases = [], []
    for name, unit in units_below(model):
        keeps = name == "" if unit.reshard_after_forward is None else not unit.reshard_after_forward
        for group in unit.groups:
            main = group.main
            rows.append(
                GroupRow(
                    unit=name or "(root)",
                    tensors=len(group.params),
                    parameters=group.layout.payload,
                    main=main.dtype,
                    compute=group.codec.dtype,
                    trainable=any(param.sharded.requires_grad for param in group.params),
                    placements=", ".join(type(placement).__name__ for placement in main.placements),
                    bytes_per_rank=main.local.numel() * main.local.element_size(),
                    waste=group.layout.waste if any(is_sharded(p) for p in main.placements) else 0.0,
                    kept=_kept(unit, group, keeps),
                    mesh=_mesh(group.mesh),
                    formats=_formats(group.formats),
                    is_offloaded=group.home.host,
                )
            )
        rows.extend(_plain_rows(name or "(root)", unit))
        if unit.leases:
            leases.append(f"{name or '(root)'} for {' and '.join(lease.value for lease in unit.leases)}")
    return Summary(tuple(rows), None if optimizer is None else _state_of(model, optimizer), tuple(leases))


def _state_of(model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    leaves = _torch.pytree_leaves([list(state.values()) for state in optimizer.state.values()])
    held = [_torch.held_of(each) for each in leaves]
    size = sum(each.nbytes for each in held if isinstance(each, torch.Tensor))
    return size, sum(_torch.held_of(each).numel() for each in model.parameters() if each.requires_grad)


def _mesh(mesh: DeviceMesh) -> str:
    """The sizes of its axes, with their names if they have any."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return " x ".join(f"{name} {mesh.size(axis)}".strip() for axis, name in enumerate(names))


def _formats(formats: Formats) -> str:
    counts = formats.gather is not None or "int8" in formats.reduces
    return f"{formats} ({sum(formats.encoded)} of {len(formats.encoded)})" if counts else str(formats)


def _kept(unit: Unit, group: ParamGroup, keeps: bool) -> str:
    if group.source.is_resident:
        return "always"
    if unit.rows is not None:
        return "by rows"
    moments = ["until backward"] * keeps + ["between micro-batches"] * unit.keeps_for_next
    return ", ".join(moments) or "no"


def _plain_rows(name: str, unit: Unit) -> list[GroupRow]:
    """The frozen parameters that `no_shard` keeps whole, one row per child of the unit and dtype."""
    kept: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
    for plain in unit.plain:
        kept.setdefault((plain.name.partition(".")[0], plain.parameter.dtype), []).append(plain.parameter)
    rows = []
    for (child, dtype), parameters in kept.items():
        count = sum(parameter.numel() for parameter in parameters)
        label, size = f"{name}: {child}", count * dtype.itemsize
        rows.append(GroupRow(label, len(parameters), count, dtype, dtype, False, "no_shard", size, 0.0, "always"))
    return rows


def check_buffers(model: nn.Module) -> None:
    """Verify that every parameter's memory lies where its layout says, and that no two overlap; AssertionError if not.

    Costs no communication. For use in tests, and when something outside has touched parameters.
    """
    _arguments.module("check_buffers", model)
    for name, unit in units_below(model):
        for group in unit.groups:
            _check_group(group, name or "(root)")


def _check_group(group: ParamGroup, unit: str) -> None:
    if group.main.device.type == "meta":
        return  # nothing is there yet, or the parameter lies elsewhere
    taken: list[tuple[int, int, str]] = []
    base = group.main.local.data_ptr()
    for index, param in enumerate(group.params):
        local, view = _torch.local_of(param.sharded), group.main.local_view(index)
        where = f"parameter '{param.name}' of unit '{unit}'"
        assert local.shape == view.shape, (
            f"{where} has local shape {tuple(local.shape)}; its layout: {tuple(view.shape)}"
        )
        assert local.numel() == 0 or local.data_ptr() == view.data_ptr(), f"{where} does not lie in its main buffer"
        shown = param.full if group.is_full else param.sharded
        assert all(site.look() is shown for site in param.sites), f"{where} was replaced in its module"
        if local.numel():
            start = (local.data_ptr() - base) // local.element_size()
            taken.append((start, start + local.numel(), param.name))
        if group.is_full and param.full is not None and param.full.numel():
            expected = group.source.full(index)
            assert param.full.data_ptr() == expected.data_ptr(), f"{where} does not lie in its gathered buffer"
    taken.sort()
    for (_, stop, before), (start, _, after) in pairwise(taken):
        assert stop <= start, f"parameters '{before}' and '{after}' of unit '{unit}' overlap"
    assert not taken or taken[-1][1] <= group.main.local.numel(), f"unit '{unit}' reaches beyond its main buffer"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
