"""docs/from-fsdp2.md goes through all of PyTorch's composable API, and names tests that exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import _fully_shard

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-fsdp2.md"
VERDICTS = {"same", "more", "different", "refused"}


def rows() -> list[tuple[str, str, str, str]]:
    """Name, verdict, remark and test of every row of every table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 4 for row in cells), [row for row in cells if len(row) != 4]
    return [(row[0], row[1], row[2], row[3]) for row in cells if row[3] != "test"]


ROWS = rows()
NAMES = {name: row for row in ROWS for name in re.findall(r"`(\w[\w.]*)", row[0])}


def public(kind: type) -> dict[str, inspect.Signature | None]:
    """The public attributes of a class; of methods, the signature."""
    return {
        name: inspect.signature(inspect.unwrap(value)) if callable(value) else None
        for name, value in vars(kind).items()
        if not name.startswith("_")
    }


def test_every_name_is_in_the_tables():
    assert set(_fully_shard.__all__) <= set(NAMES)
    assert set(inspect.signature(inspect.unwrap(torch_fsdp.fully_shard)).parameters) <= set(NAMES)


def test_every_method_is_in_the_tables_with_its_arguments():
    for name, signature in public(torch_fsdp.FSDPModule).items():
        assert name in NAMES, name
        said = re.findall(r"\w+", NAMES[name][0].partition("(")[2])
        assert said == [each for each in signature.parameters if each != "self"], name


@pytest.mark.parametrize("kind", ["MixedPrecisionPolicy", "CPUOffloadPolicy", "DataParallelMeshDims", "UnshardHandle"])
def test_every_field_of_the_policies_is_in_the_tables(kind):
    given = getattr(torch_fsdp, kind, None) or pytest.skip("this torch has no such class")
    fields = {field.name for field in dataclasses.fields(given)} if dataclasses.is_dataclass(given) else set()
    said = " ".join(row[0] for row in ROWS if f"`{kind}." in row[0])
    for name in fields | set(public(given)):
        assert re.search(rf"\b{name}\b", said), name


def test_every_row_has_a_verdict_and_a_test_that_exists():
    for name, verdict, _, named in ROWS:
        assert verdict in VERDICTS, name
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
        assert match, f"{name}: {named}"
        path = ROOT / match[1]
        assert path.exists(), f"{name}: {path}"
        found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert match[2] in found, f"{name}: {named}"
