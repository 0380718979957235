"""Units that hold embedding tables: an embedding's own backward does not read its weights, other uses of them do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatshard import fully_shard
from flatshard.engine.units.unit import unit_of
from tests.dist.test_engine import full

TOKENS = torch.arange(12).view(3, 4)


class Tied(nn.Module):
    """Its only parameter is an embedding's, and it multiplies with it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embed(tokens).tanh(), self.embed.weight)


def _train(rank, world, whole):
    torch.manual_seed(0)
    plain = nn.Sequential(Tied() if whole else nn.Embedding(12, 6), nn.Linear(12 if whole else 6, 2))
    torch.manual_seed(0)
    model = nn.Sequential(Tied() if whole else nn.Embedding(12, 6), nn.Linear(12 if whole else 6, 2))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model[1], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        for each in (plain, model):
            each(TOKENS).square().sum().backward()
        lane = unit_of(model).root.gather_lane
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    names = [operation.name for operation in lane.history if operation.name == "0"]
    return len(names)


@pytest.mark.parametrize(("whole", "gathers"), [(False, 1), (True, 2)], ids=["an embedding", "a module that uses one"])
def test_weights_are_gathered_for_backward_where_it_reads_them(ranks, whole, gathers):
    assert ranks(2, _train, whole) == [2 * gathers] * 2


def _while_blocks_run(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False))
    model[2].weight = model[0].weight
    fully_shard([model[0], model[2]])
    fully_shard(model[1])
    fully_shard(model)
    seen = []
    model[1].register_full_backward_pre_hook(lambda *_: seen.append(unit_of(model[0]).is_gathered))
    for _ in range(2):
        model(TOKENS).square().sum().backward()
    return seen


def test_a_head_that_shares_a_table_is_released_when_backward_has_read_it(ranks):
    assert ranks(2, _while_blocks_run)[0][-1] is False


def _with_sparse_gradients(rank, world, is_tied):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Linear(6, 6), nn.Linear(6, 12, bias=False))

    plain, model = made(), made()
    if is_tied:
        for each in (plain, model):
            each[2].weight = each[0].weight
    fully_shard(model[0] if not is_tied else [model[0], model[2]])
    fully_shard(model)
    for micro in range(2):
        tokens = torch.arange(2 * world).view(world, 2) + micro
        plain(tokens).square().mean().backward()
        model(tokens[rank]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours.grad), theirs.grad.to_dense())


@pytest.mark.parametrize("is_tied", [False, True], ids=["alone", "tied to a head"])
def test_sparse_gradients_become_dense(ranks, is_tied):
    ranks(2, _with_sparse_gradients, is_tied)
