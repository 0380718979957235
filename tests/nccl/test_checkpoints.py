"""Checkpoints over NCCL, between two ranks and four: flatshard's own, those of torch, and those of Megatron-FSDP."""

from __future__ import annotations

import pytest

from tests.checkpoint import test_dcp, test_full, test_save_load
from tests.checkpoint.cases import PLACES
from tests.checkpoint.test_save_load import test_asynchronous  # noqa: F401
from tests.megatron import test_checkpoints as megatron

pytestmark = pytest.mark.limit(90)

PLAIN, REPLICATED, HYBRID, PARALLEL = PLACES[0], PLACES[3], PLACES[4], PLACES[9]
MOVES = [((2, PLAIN), (4, HYBRID)), ((4, PARALLEL), (2, REPLICATED)), ((4, HYBRID), (3, PLAIN))]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
def test_from_some_ranks_to_others(ranks, tmp_path, source, target):
    test_save_load.test_from_any_to_any(ranks, tmp_path, source, target)


@pytest.mark.parametrize(("source", "target"), MOVES[:2], ids=str)
def test_dcp_from_some_ranks_to_others(ranks, tmp_path, source, target):
    test_dcp.test_dcp_from_any_to_any(ranks, tmp_path, source, target)


def test_full_state_dicts(ranks):
    ranks(2, test_dcp._options, PLAIN, False)


def test_fsdp2_loads_ours_and_we_load_theirs(ranks, tmp_path):
    ranks(2, test_dcp._with_fsdp2, PLAIN, str(tmp_path))


def test_export_and_load(ranks, tmp_path):
    ranks(4, test_full._exported, HYBRID, str(tmp_path))


@pytest.mark.parametrize(("worlds", "loaded"), [((4, 2), "optim"), ((2, 4), "tensor")])
def test_megatron_from_some_ranks_to_others(ranks, tmp_path, worlds, loaded):
    megatron.test_from_some_ranks_to_others(ranks, tmp_path, "tensor", worlds, loaded)
