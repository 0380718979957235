"""Sharded training with formats equals one process that rounds the same weights and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from flatshard import fully_shard, fully_shard_optimizer, gathered, microbatch
from tests.dist.models import assert_rows, batches, loss_of, make_net
from tests.formats.cases import is_encoded, mesh_of, policy, through, units_of

ROWS, STEPS = 12, 2

# sizes of the mesh, strategy, outer strategy, layout, formats, and what else fully_shard and the steps are told
CASES = [
    ((1,), None, None, "tensor", "int8", "int8", {}),
    ((2,), None, None, "tensor", "int8", None, {}),
    ((2,), None, None, "flat", "float8", "int8", {"recompute": "non-reentrant"}),
    ((3,), None, None, "tensor", "float8", "bf16_fp32", {"recompute": "reentrant"}),
    ((3,), None, None, "flat", "int8", "int8", {"micro": 2}),
    ((4,), None, None, "tensor", "int8", "int8", {"reshard_after_forward": 2}),
    ((4,), None, None, "flat", "int8", "int8", {"reshard_after_forward": False}),
    ((2,), "no_shard", None, "tensor", "int8", "int8", {}),
    ((2,), "optim", None, "flat", "int8", "int8", {"micro": 2}),
    ((3,), "optim_grads", None, "tensor", "int8", "int8", {}),
    ((2, 2), None, None, "tensor", "int8", "int8", {"micro": 2}),
    ((2, 2), None, None, "flat", "float8", ("int8", "int8"), {}),
    ((2, 2), None, None, "tensor", "int8", ("bf16_fp32", "int8"), {"micro": 2}),
    ((2, 2), None, None, "tensor", None, ("int8", None), {}),
    ((2, 2), None, "optim", "tensor", "int8", ("int8", "bf16_fp32"), {}),
    ((2, 2), None, "optim", "flat", "int8", ("int8", "int8"), {"micro": 2}),
    ((2,), None, None, "tensor", "int8", "int8", {"change": "frozen"}),
    ((3,), None, None, "flat", "int8", "int8", {"change": "frozen"}),
    ((2,), None, None, "tensor", "int8", "int8", {"change": "tied"}),
    ((3,), "optim", None, "tensor", "int8", "int8", {"change": "tied"}),
    ((3,), None, None, "flat", "float8", "int8", {"change": "meta"}),
]
DEFAULT = (2, 10, 15)  # cases in every run


def _net(change, recompute=None):
    """A net of which some parameters are frozen, or shared, before it is sharded."""
    net = make_net(depth=2, recompute=recompute)
    if change == "frozen":
        net.blocks[1].requires_grad_(False)
        net.blocks[0].up.requires_grad_(False)
    if change == "tied":
        net.head.weight = net.embed.weight
    return net


def _reduced(gradients, sizes, formats):
    """The mean over the ranks of a mesh of what travels of each rank's gradient, added in the order of ranks.

    ``formats``: of the outer and the inner axis.
    """

    def added(parts, kind):
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += _travelled(part, kind)
        return total / len(parts)

    count = sizes[-1]
    rows = [added(gradients[at : at + count], formats[1]) for at in range(0, len(gradients), count)]
    return rows[0] if len(sizes) == 1 else added(rows, formats[0])


def _travelled(gradient, kind):
    if kind == "bf16_fp32":
        return gradient.bfloat16().float()
    return through(gradient, "int8") if kind == "int8" else gradient


def _reference(sizes, gather, reduce, micro, world, change):
    """Losses and weights of one process that does what all ranks do."""
    net = _net(change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for tokens in batches(STEPS, ROWS):
        weights = {}
        for name, parameter in net.named_parameters():
            coded = gather is not None and is_encoded(name, parameter)
            values = through(parameter, gather) if coded else parameter.detach()
            weights[name] = values.requires_grad_(parameter.requires_grad)
        of_ranks, total = [], 0.0
        for part in tokens.chunk(world):
            for leaf in weights.values():
                leaf.grad = None
            for few in part.chunk(micro):
                loss = loss_of(lambda t, w=weights: functional_call(net, w, (t,)), few) / micro
                loss.backward()
                total += loss.item() / world
            of_ranks.append({name: leaf.grad for name, leaf in weights.items()})
        formats = reduce if isinstance(reduce, tuple) else (None, reduce)
        for name, parameter in net.named_parameters():
            if not parameter.requires_grad:
                continue
            coded = is_encoded(name, parameter)
            kinds = [kind if coded or kind == "bf16_fp32" else None for kind in formats]
            parameter.grad = _reduced([each[name] for each in of_ranks], sizes, kinds)
        optimizer.step()
        losses.append(total)
    return losses, net


def _train(rank, world, sizes, strategy, outer, layout, gather, reduce, more):
    more = dict(more)
    micro = more.pop("micro", 1)
    change = more.pop("change", None)
    wanted, reference = _reference(sizes, gather, reduce, micro, world, change)
    with torch.device("meta" if change == "meta" else "cpu"):
        net = _net(change, more.pop("recompute", None))
    mesh = mesh_of(sizes)
    for unit in units_of(net):
        fully_shard(
            unit,
            mesh=mesh,
            strategy=strategy,
            outer_strategy=outer,
            layout=layout,
            mp_policy=policy(gather_format=gather, reduce_format=reduce),
            **more,
        )
    if change == "meta":
        net.to_empty(device="cpu")
        with gathered(net, write=True):
            for parameter, value in zip(net.parameters(), _net(change).parameters()):
                parameter.data.copy_(value)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for tokens in batches(STEPS, ROWS):
        total = 0.0
        for number, part in enumerate(tokens.chunk(world)[rank].chunk(micro)):
            with microbatch(net, is_first=number == 0, is_last=number == micro - 1):
                loss = loss_of(net, part) / micro
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    whole = torch.tensor(losses)
    torch.distributed.all_reduce(whole)
    torch.testing.assert_close(whole / world, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    for (name, sharded), value in zip(net.named_parameters(), reference.parameters()):
        # A sum that is added in another order may round to the other side of a code: that is rare, and one step of it.
        assert_rows(sharded.detach(), value.data, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    if gather is not None:
        with gathered(net):
            shown = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        with gathered(net, write=True):
            for name, parameter in net.named_parameters():
                coded = through(parameter, gather) if is_encoded(name, parameter) else parameter
                assert torch.equal(shown[name], coded), name


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if n in DEFAULT else [pytest.mark.full]) for n, case in enumerate(CASES)],
    ids=[" ".join(map(str, case)) for case in CASES],
)
def test_training_equals_one_process(ranks, case):
    world = 1
    for size in case[0]:
        world *= size
    ranks(world, _train, *case)
