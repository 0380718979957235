"""The comparison in the README: what it says of FSDP2 is so, and every note names a test or a file that is there."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn

import flatshard
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference
from scripts import figures

_ROOT = Path(__file__).parents[1]
TEXT = (_ROOT / "README.md").read_text().partition("## Beside FSDP2")[2].partition("What works, line by line")[0]
NOTES = dict(re.findall(r"^\[(\d+)\] ([^\n]*)", TEXT, re.M))


def test_every_cell_names_a_note_and_every_note_a_test_or_a_measurement():
    rows = [
        line.strip("|").split("|")[1:]
        for line in TEXT.splitlines()
        if line.startswith("| ") and "flatshard" not in line
    ]
    assert len(rows) == 11
    for cell in (cell.strip() for row in rows for cell in row):
        number = re.fullmatch(r".*\[(\d+)\]", cell)
        assert number, cell
        assert number[1] in NOTES, cell
    assert set(re.findall(r"\[(\d+)\]", TEXT)) == NOTES.keys()
    for note in NOTES.values():
        text, file, _, heading = re.findall(r"\[([^\]]+)\]\(([^)#]+)(#([^)]+))?\)", note)[0]
        source = (_ROOT / file).read_text()
        if heading:
            assert f"\n## {text}\n" in source, note
        elif text != file:
            assert text in {node.name for node in ast.walk(ast.parse(source)) if hasattr(node, "name")}, note


def test_the_figures_are_those_of_the_results():
    cases = figures.newest(figures.RESULTS)
    assert sorted(cases) == ["a", "b", "c", "d", "f"]
    for path, write in ((_ROOT / "README.md", figures.readme), (figures.RESULTS / "README.md", figures.table)):
        text = path.read_text()
        assert write(text, cases) == text, "run scripts/figures.py"
        cases["c"]["flatshard"]["peak"] += 1e9
        assert write(text, cases) != text  # the figures are those of the runs
        cases["c"]["flatshard"]["peak"] -= 1e9


def test_fsdp2_has_one_strategy():
    arguments = inspect.signature(fsdp2.fully_shard).parameters
    assert not {"strategy", "placements", "optional", "values"} & set(arguments)
    assert not [name for name in dir(fsdp2.FSDPModule) if "graph" in name or "capture" in name]
    assert not {"rows", "formats"} & set(arguments)
    assert not [field.name for field in fields(fsdp2.MixedPrecisionPolicy) if "format" in field.name]


def test_muon_launches():
    """On whole matrices one exchange in and one out; on DTensors, what each operation of it needs."""
    told = [int(number) for number in re.findall(r"takes (\d+)\s+collectives\s+instead\s+of\s+(\d+) \[14\]", TEXT)[0]]
    whole = functools.partial(flatshard.fully_shard_optimizer, whole=True)
    for number, shard, wrap in zip(told, (flatshard.fully_shard, fsdp2.fully_shard), (whole, lambda it: it)):
        with rehearse(2, "free") as rehearsal:
            model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False))
            shard(model)
            optimizer = wrap(torch.optim.Muon(model.parameters()))
            for _ in range(2):  # in the first step ranks compare what they have
                model(torch.ones(4, 16)).square().sum().backward()
                before = rehearsal.medium.traffic.snapshot()
                optimizer.step()
            launched = difference(rehearsal.medium.traffic.snapshot(), before)
            assert sum(entry.launches for entry in launched.values()) == number


def test_fsdp2_launches_what_each_rank_runs():
    """So ranks that run different units wait for each other, and nothing has told them apart."""
    launched = []
    for used in (2, 1):
        with rehearse(2, "free") as rehearsal:
            model = [nn.Linear(4, 4), nn.Linear(4, 4)]
            for layer in model:
                fsdp2.fully_shard(layer)
            x = torch.ones(2, 4)
            for layer in model[:used]:
                x = layer(x)
            launched.append({kind: entry.launches for kind, entry in rehearsal.medium.traffic.entries.items()})
    assert launched == [{"all_gather": 2}, {"all_gather": 1}]  # nothing else was said between ranks


def test_fsdp2_refuses_weights_that_two_units_share():
    with rehearse(2, "free"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        fsdp2.fully_shard(first)
        fsdp2.fully_shard(second)
        model = fsdp2.fully_shard(nn.Sequential(first, second))
        with pytest.raises(ValueError, match="already managed by another FSDP group"):
            model(torch.ones(2, 4))
