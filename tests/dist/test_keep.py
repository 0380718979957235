"""Units that stay gathered beyond their own use, under a budget: which ones, and what it saves."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from flatshard import SchedulePolicy, fully_shard, microbatch, summary
from flatshard.engine.tree.roots import gathered_bytes
from flatshard.engine.units.unit import unit_of
from tests.dist.test_counts import BLOCKS, DIM, ROOT, Chain, Counter, rows


def _chain(reshard=None, **budget) -> Chain:
    torch.manual_seed(0)
    model = Chain()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, schedule=SchedulePolicy(**budget))


def _sizes() -> tuple[int, int]:
    """Gathered bytes of a block and of the root."""
    model = _chain()
    block, root = (gathered_bytes(unit_of(module)) for module in (model.blocks[0], model))
    assert block > root >= 4 * DIM
    return block, root


def _for_backward(rank, world):
    block, _ = _sizes()
    model, plain = _chain("auto", keep_for_backward=2 * block + 1), _chain(True)
    for each in (plain, model, plain):
        each(rows()).sum().backward()
    with Counter(model) as counted:
        model(rows()).sum().backward()
    # the last blocks of forward are the first of backward: they are kept for the shortest time
    assert counted.gathers == [ROOT, *BLOCKS, *BLOCKS[1::-1]]
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    kept = {row.unit: row.kept for row in summary(model).rows}
    assert [kept[name] for name in BLOCKS] == ["no", "no", "until backward", "until backward"]


def test_a_budget_keeps_the_last_units_of_forward_for_backward(ranks):
    ranks(2, _for_backward)


def _for_next(rank, world, blocks):
    block, root = _sizes()
    model, plain = _chain(keep_for_next=root + blocks * block), _chain()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, fused=True) for each in (plain, model)]
    for step in range(3):
        for number in range(3):
            inputs = torch.full((2, DIM), 0.1 * (step + number + rank), requires_grad=True)
            plain(inputs).sum().backward()
            before = unit_of(model).root.gather_lane.launched if step else 0
            with microbatch(model, is_first=number == 0, is_last=number == 2):
                model(inputs).sum().backward()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            history = unit_of(model).root.gather_lane.history
            found = sorted(operation.name for operation in history if operation.number > before)
            if step:  # a small unit saves most per byte: the root is kept first, then blocks as forward needs them
                forward = [ROOT, *BLOCKS] if number == 0 else BLOCKS[blocks:]
                assert found == sorted([*forward, *BLOCKS]), (number, found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(ours.to_local(), theirs.to_local())
    shown = {row.unit: row.kept for row in summary(model).rows}
    assert [name for name in BLOCKS if shown[name] == "between micro-batches"] == BLOCKS[:blocks]


@pytest.mark.parametrize("blocks", [0, 2, 4])
def test_units_kept_between_microbatches_are_gathered_once_less_and_train_alike(ranks, blocks):
    ranks(2, _for_next, blocks)


def test_a_budget_is_a_number_of_bytes():
    for name in ("keep_for_backward", "keep_for_next"):
        with pytest.raises(ValueError, match=f"{name}=-1: must be at least 0"):
            SchedulePolicy(**{name: -1})


WRITES = {
    "in place": lambda p, value: p.copy_(value),
    "data": lambda p, value: p.data.copy_(value),
    "detached": lambda p, value: p.detach().copy_(value),
    "local": lambda p, value: p.to_local().copy_(value.to_local()),
    "local data": lambda p, value: p.to_local().data.copy_(value.to_local()),
    "list": lambda p, value: torch._foreach_copy_([p], [value]),
    "list of detached": lambda p, value: torch._foreach_lerp_([p.detach()], [value], 1.0),
    "list of data": lambda p, value: torch._foreach_copy_([p.data], [value]),
}


def _written(rank, world, reshard, names):
    """As averaged weights are swapped in for an evaluation, and out again."""
    for name in names:
        for grads in (False, True):
            model = fully_shard(torch.nn.Linear(DIM, DIM), reshard_after_forward=reshard)
            x = torch.ones(2, DIM)
            with torch.no_grad():
                model(x)
                for parameter in model.parameters():
                    WRITES[name](parameter, torch.full_like(parameter, 0.5))
            with torch.set_grad_enabled(grads):
                found = model(x)
            torch.testing.assert_close(found, torch.full((2, DIM), 0.5 * DIM + 0.5))


def test_weights_written_after_an_evaluation_count_in_the_next_forward(ranks):
    ranks(2, _written, None, list(WRITES))


def test_weights_that_are_kept_on_purpose_are_gathered_anew_when_parameters_are_written(ranks):
    # Nothing tells of the last one: reshard() is for it.
    ranks(2, _written, False, [name for name in WRITES if name != "local data"])
