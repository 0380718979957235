"""Bad input of every public function: a clear error, and nothing changed. The cases are in `table.py`."""

from __future__ import annotations

import argparse
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import flatshard
from flatshard import fully_shard, megatron
from flatshard.cli import main
from flatshard.trust.record import FlightRecord
from tests.checkpoint.mutations import harmed, hurt, lie
from tests.input.bench import Bench, loss_of, tiny
from tests.input.megatron_table import MEGATRON
from tests.input.table import CHECKPOINTS, COMMANDS, OPTIMIZERS, POLICIES, SHARDING, UNITS

TABLES = {
    "sharding": SHARDING,
    "units": UNITS,
    "policies": POLICIES,
    "optimizers": OPTIMIZERS,
    "checkpoints": CHECKPOINTS,
    "commands": COMMANDS,
    "megatron": MEGATRON,
}


def _tried(rank, world, table, folder):
    """What is wrong about the refusals in a table."""
    wrong = []
    bench = Bench(Path(folder))
    bench.step()
    for subject, cases in TABLES[table].items():
        for case in cases:
            found = bench.try_case(case)
            if found is not None:
                wrong.append(f"{subject}: {case.name}: {found}")
                bench = Bench(Path(folder))  # what one case has broken is not the next one's
                bench.step()
    return wrong


@pytest.mark.parametrize("table", TABLES)
def test_bad_input_is_refused_and_changes_nothing(ranks, tmp_path, table):
    (wrong,) = ranks(1, _tried, table, str(tmp_path))
    assert not wrong, "\n" + "\n".join(wrong)


def public_names() -> set[str]:
    """Everything that users are offered: names of the packages, methods of units, commands."""
    names = set(flatshard.__all__) - {"checkpoint"}
    names |= {f"checkpoint.{name}" for name in flatshard.checkpoint.__all__}
    names |= {f"megatron.{name}" for name in megatron.__all__}
    for cls in (flatshard.FSDPModule, flatshard.GradientReductionHandle, flatshard.UnshardHandle):
        members = inspect.getmembers(cls, inspect.isfunction)
        names |= {f"{cls.__name__}.{name}" for name, _ in members if not name.startswith("_")}
    return names | {f"flatshard {name}" for name in _commands()}


def _commands() -> list[str]:
    """The commands, as `flatshard --help` lists them."""
    found: list[str] = []
    add = argparse._SubParsersAction.add_parser

    def noted(self, name, **kwargs):
        found.append(name)
        return add(self, name, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse._SubParsersAction, "add_parser", noted)
        with pytest.raises(SystemExit):
            main([])
    return found


def test_every_public_name_has_a_case():
    cases = {name: listed for table in TABLES.values() for name, listed in table.items()}
    missing = public_names() - cases.keys()
    assert not missing, f"no bad input is tried on {sorted(missing)}"
    assert cases.keys() <= public_names() | {"flatshard"}, "cases of what there is no longer"
    assert all(cases.values())
    assert len([case for listed in cases.values() for case in listed if case.kind is not None]) >= 150


# Without a process group


def _alone(name: str, call: Callable[[], Any], words: str) -> Any:
    return pytest.param(call, words, id=name)


GROUPLESS = [
    _alone("fully_shard", lambda: fully_shard(tiny()), "start the script with torchrun"),
    _alone("shard_model", lambda: flatshard.shard_model(tiny()), "start the script with torchrun"),
    _alone("megatron", lambda: megatron.fully_shard_model(tiny()), "torchrun|init_process_group"),
]


@pytest.mark.parametrize(("call", "words"), GROUPLESS)
def test_without_a_process_group(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_rank_is_as_good_as_many(group, tmp_path):
    bench = Bench(tmp_path)
    bench.step()
    flatshard.checkpoint.save(tmp_path / "a", bench.model, bench.optimizer, progress=False)
    flatshard.checkpoint.load(tmp_path / "a", bench.model, bench.optimizer, progress=False)
    bench.step()


def test_a_destroyed_process_group_is_named(group, tmp_path):
    bench = Bench(tmp_path)
    bench.step()
    mesh = bench.mesh
    dist.destroy_process_group()
    plain = tiny()
    with pytest.raises(RuntimeError, match="torchrun"):
        fully_shard(plain)
    with pytest.raises(RuntimeError, match=r"process group.*destroyed"):
        fully_shard(plain, mesh=mesh)
    loss_of(plain).backward()  # it is as it was
    assert flatshard.summary(bench.model).rows
    flatshard.checkpoint.save(tmp_path / "a", bench.model, progress=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(plain)


def test_damaged_flight_records_are_read_as_far_as_they_go(tmp_path, capsys):
    """Whatever has become of them, `flatshard blame` says something, or that they are none."""
    good, bad, draw = tmp_path / "good", tmp_path / "bad", random.Random(4)
    for rank in range(2):
        record = FlightRecord()
        good.mkdir(exist_ok=True)
        record.keep_in(good, rank, world=2)
        launches_of = record.group("dp 0-1")
        for number in range(5 + rank):
            record.append(launches_of, 0, f"blocks.{number}", 64, Ended())
        if rank:
            record.dump()
    said = 0
    for number in range(200):
        harm = harmed(good, bad, [hurt, _forged_record], draw)
        status = main(["blame", str(bad), "--last", "2"])
        told = capsys.readouterr()
        assert status in (0, 2), harm
        assert (told.out if status == 0 else told.err).strip(), (number, harm)
        said += status == 0
    assert said > 50


class Ended:
    is_on_device = False

    def has_ended(self) -> bool:
        return True


def _forged_record(folder, draw):
    file = folder / "rank-1.json"
    record = json.loads(file.read_bytes())
    harm = lie(record, draw)
    file.write_text(json.dumps(record))
    return harm
