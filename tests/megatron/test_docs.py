"""docs/from-megatron-fsdp.md goes through all of the surface, and names tests that exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from flatshard import megatron
from flatshard.megatron import experimental, uneven_dtensor, v2

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-megatron-fsdp.md").read_text()
LINES = [line for line in PAGE[PAGE.index("## Functions") :].splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if not line.startswith("| name |")]
NAMES = set(re.findall(r"\w+", " ".join(row[0] for row in ROWS)))


def arguments(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs", "inputs", "unused"}


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_every_name_and_argument_is_in_the_tables():
    wanted = {*megatron.__all__, *experimental.__all__}
    wanted |= {name for name in v2.__all__ if not hasattr(uneven_dtensor, name)}
    for function in (megatron.fully_shard_model, megatron.MegatronFSDP, megatron.fully_shard_optimizer):
        wanted |= arguments(function)
    for function in (
        megatron.FullyShardedDataParallel,
        megatron.DistributedOptimizer,
        experimental.fully_shard_context,
    ):
        wanted |= arguments(function)
    wanted |= public(megatron.MegatronFSDP) | public(experimental.DBuffer) | public(megatron.DistributedOptimizer)
    wanted |= {field.name for field in dataclasses.fields(megatron.DistributedDataParallelConfig)}
    own = {name for name, value in vars(uneven_dtensor).items() if inspect.isfunction(value) and name[0] != "_"}
    wanted |= {name for name in own if getattr(uneven_dtensor, name).__module__ == uneven_dtensor.__name__}
    assert not wanted - NAMES


def test_every_row_has_a_verdict_and_a_test_that_exists():
    for row in ROWS:
        assert len(row) == 4, row
        assert row[1] in {"same", "more", "different", "refused"}, row
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[3])
        assert match, row
        found = {
            node.name for node in ast.parse((ROOT / match[1]).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert match[2] in found, row
