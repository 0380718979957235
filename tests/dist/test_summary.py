"""`summary` and `check_buffers`."""

import pytest
import torch

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.engine.units.unit import unit_of
from tests.dist.models import loss_of, make_net
from tests.dist.test_engine import shard_net


def _summary(rank, world):
    net = make_net(depth=2)
    for parameter in net.embed.parameters():
        parameter.requires_grad_(False)
    total = sum(parameter.numel() for parameter in net.parameters())
    model = shard_net(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    table = flatshard.summary(model)
    assert sum(row.parameters for row in table.rows) == total
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert 4 * local <= table.bytes_per_rank <= 4 * (local + 64 * len(list(model.parameters())))
    assert table._repr_html_().count("\n") == str(table).count("\n")  # in a notebook
    return str(table)


def test_summary_shows_every_group(ranks):
    text = ranks(2, _summary)[0]
    print(text)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == [
        "(root)",
        "embed",
        "blocks.0",
        "blocks.0",
        "blocks.1",
        "blocks.1",
    ]
    assert "bfloat16" in lines[2]
    assert "Replicate" in text  # the scalar of a block
    assert " no " in next(line for line in lines if line.startswith("embed"))
    assert "parameters" in lines[-1]


def _check(rank, world):
    model = shard_net(make_net())
    flatshard.check_buffers(model)
    loss_of(model, torch.zeros(2, 5, dtype=torch.long)).backward()
    flatshard.check_buffers(model)
    model.unshard()
    flatshard.check_buffers(model)
    model.reshard()
    unit = unit_of(model.blocks[1])
    member = unit.groups[0].params[0]
    member.sharded._local_tensor = member.sharded._local_tensor.clone()
    with pytest.raises(AssertionError, match=r"blocks\.1.*does not lie in its main buffer"):
        flatshard.check_buffers(model)
    linear = fully_shard(torch.nn.Linear(4, 4))
    linear._parameters["weight"] = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(AssertionError, match="replaced"):
        flatshard.check_buffers(linear)


def test_check_buffers_finds_parameters_that_left_their_buffers(ranks):
    assert ranks(2, _check) == [None] * 2
