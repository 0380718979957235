"""What a simulation of many ranks counts: nothing on one rank grows with their number but by a logarithm."""

from __future__ import annotations

import pytest

from benchmarks import scale
from flatshard.tools.model_shapes import load_model
from flatshard.trust import watch


def test_the_start_takes_as_many_launches_on_many_ranks_as_on_few():
    few, many = (scale.start(world) for world in (8, 512))
    counts = [name for name in few if name.startswith("flatshard") and not name.endswith("_s")]
    assert len(counts) == 4
    assert [few[name] for name in counts] == [many[name] for name in counts]


def test_an_error_is_one_message_for_each_and_an_end_one_of_each_neighbour(monkeypatch):
    monkeypatch.setattr(watch, "GRACE", watch.GRACE)  # the simulation changes it
    row = scale.alarm(40)
    assert row["store_requests_per_rank"] <= 8
    assert row["connections_per_rank"] == row["end_messages_per_rank"] + 1 == 9
    assert row["error_messages_per_rank"] == 1
    assert row["question_messages_per_rank"] == 39


def test_blame_of_many_records_is_short():
    row = scale.blame(12)
    assert row["bytes_per_rank"] == 147456
    assert row["said"] < 300


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_checkpoints_of_simulated_ranks_can_be_read(layout):
    row = scale.checkpoint(6, "llama-8b", layout)
    assert (row["flatshard_same_files"], row["flatshard_all_files"]) == (1, 6)


def test_padding_grows_with_ranks_and_not_where_rows_divide():
    model = load_model("llama-8b")
    assert scale.padding(model, 64) < 0.001
    assert scale.padding(model, 64) <= scale.padding(model, 4096) < 0.05
