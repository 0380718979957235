"""The traps of PITFALLS.md that concern the engine, by their numbers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard import SchedulePolicy, fully_shard
from flatshard.engine.units.unit import unit_of
from tests.dist.test_counts import BLOCKS, DIM, ROOT, Chain, Counter, root_of, rows, sharded_chain, warm


def pair(make: Any) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], made[1]


def equal_steps(plain: nn.Module, model: nn.Module, rank: int, world: int, steps: int = 2) -> None:
    """Train both on the same rows; gradients and weights stay equal."""
    torch.manual_seed(1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=True) for m in (plain, model)]
    for _ in range(steps):
        data = torch.randn(2 * world, DIM)
        for each, part in ((plain, data), (model, data.chunk(world)[rank])):
            each(part).square().mean().backward()
        for (name, theirs), ours in zip(plain.named_parameters(), model.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _fresh_weights(rank: int, world: int) -> None:
    model = sharded_chain()
    x = rows()
    for change in (1.0, 0.5, -2.0):
        kept = model(x)  # the root stays gathered: its full weights are now out of date
        with torch.no_grad():
            for parameter in unit_of(model).groups[0].params:
                parameter.sharded.mul_(change)
            for block in model.blocks:
                block[0].weight.mul_(change)
        plain = Chain()
        del kept
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        torch.testing.assert_close(model(x), plain(x))


def test_pitfall_01_a_gather_reads_what_the_optimizer_wrote(ranks):
    ranks(2, _fresh_weights)


def _same_tensors(rank: int, world: int) -> None:
    model = sharded_chain()
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(name: str, module: nn.Module) -> None:
        weight = module.weight
        assert not isinstance(weight, DTensor)
        seen.setdefault(name, []).append((id(weight), weight.untyped_storage()._cdata))

    for name, block in zip(BLOCKS, model.blocks):
        block[0].register_forward_pre_hook(lambda module, args, name=name: note(name, module))
        block[0].register_full_backward_hook(lambda module, gi, go, name=name: note(name, module))
    for _ in range(2):
        model(rows()).sum().backward()
    for name in BLOCKS:
        assert len(seen[name]) == 4
        assert len(set(seen[name])) == 1, f"{name}: backward saw another tensor or storage than forward"


def test_pitfall_04_05_backward_refills_the_tensors_that_forward_used(ranks):
    ranks(2, _same_tensors)


def _empty_shards(rank: int, world: int) -> list[Any]:
    model = nn.Sequential(nn.Linear(DIM, 1), nn.Linear(1, 2))  # fewer rows than ranks
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(rows()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    return [model[0].weight.to_local().shape[0], sorted((key, *sorted(value)) for key, value in state.items())]


def test_pitfall_07_a_rank_without_rows_has_the_same_optimizer_keys(ranks):
    results = ranks(3, _empty_shards)
    assert [shard for shard, _ in results] == [1, 0, 0]
    assert all(keys == results[0][1] for _, keys in results)
    assert len(results[0][1]) == 4


class EitherOrder(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.one, self.two) if self.rank == 0 else (self.two, self.one)
        return first(x) + second(x)


def _different_orders(rank: int, world: int) -> None:
    model = EitherOrder(rank)
    fully_shard(model.one)
    fully_shard(model.two)
    fully_shard(model, schedule=SchedulePolicy(prefetch=False))  # else both are gathered ahead, in one order
    with pytest.raises(RuntimeError, match=r"ranks differ in what they do next: rank 0: .*'one'.*; rank 1: .*'two'"):
        model(rows()).sum().backward()


def test_pitfall_17_ranks_that_run_units_in_different_orders_are_told(ranks):
    ranks(2, _different_orders)


def _recompute_leaves_nothing(rank: int, world: int, mode: str) -> None:
    model = sharded_chain(recompute=mode)
    root = warm(model).root
    left = []

    def note(index: int) -> None:
        gathered = [unit.name for unit in root.units if unit.is_gathered]
        left.append([name for name in BLOCKS[index + 1 :] if name in gathered])

    for index, block in enumerate(model.blocks):
        block[0].register_full_backward_hook(lambda module, gi, go, index=index: note(index))
    model(rows()).sum().backward()
    # While block i computes its gradients, i+1 may be about to be released; nothing beyond it is gathered.
    assert len(left) == len(BLOCKS)
    assert all(len(names) <= 1 for names in left), left


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_pitfall_23_a_recompute_does_not_gather_finished_units_again(ranks, mode):
    ranks(2, _recompute_leaves_nothing, mode)


def _refilled(rank: int, world: int) -> None:
    plain, model = pair(Chain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    x = torch.randn(3, DIM, requires_grad=True)
    outputs = []
    for each in (plain, model):
        first, second = each(x), each(2 * x)
        with torch.no_grad():
            each(x)
        (first.sum() + second.square().sum()).backward()
        outputs.append(x.grad.clone())
        x.grad = None
    torch.testing.assert_close(outputs[1], outputs[0])
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_pitfall_26_a_refilled_buffer_does_not_bump_versions(ranks):
    ranks(2, _refilled)


class FrozenBetween(nn.Module):
    """A frozen projection that the root owns, between a nested unit and the trainable head. No input needs a grad."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.proj = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.proj(self.embed(x))))


class PartTwice(nn.Module):
    """A part of the root that is called twice, once checkpointed: its gradients arrive before its last use is over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.part = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.part(checkpoint(self.part, self.part(x), use_reentrant=True))


class Batch:
    """Not a pytree: the tensor in it cannot be seen."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.out = nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.out(torch.tanh(self.fixed(batch.x)))


class TakesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(DIM, DIM), Opaque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(Batch(self.first(x)))


def _no_input_gradients(rank: int, world: int) -> None:
    for make, unit in ((FrozenBetween, "embed"), (PartTwice, "first"), (TakesOpaque, "inner")):
        plain, model = pair(make)
        fully_shard(model.get_submodule(unit))
        fully_shard(model)
        equal_steps(plain, model, rank, world)


def test_pitfall_27_weights_stay_until_backward_has_read_them_where_no_input_needs_a_gradient(ranks):
    ranks(2, _no_input_gradients)


class Output(OrderedDict):
    """As Hugging Face's: a mapping whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> Output:
        hidden = torch.tanh(self.body(x))
        return Output(hidden=hidden, others=(None, [Output(aux=self.aux(hidden))]))


class UsesMapped(nn.Module):
    def __init__(self, only_aux: bool) -> None:
        super().__init__()
        self.inner, self.only_aux = Mapped(), only_aux

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        assert type(output) is Output
        aux = output.others[1][0].aux
        return aux if self.only_aux else aux + output.hidden


def _mapped(rank: int, world: int) -> None:
    for only_aux in (False, True):
        plain, model = pair(lambda only_aux=only_aux: UsesMapped(only_aux))
        fully_shard(model.inner)
        fully_shard(model)
        equal_steps(plain, model, rank, world)


def test_pitfall_28_outputs_of_any_shape_gather_for_backward(ranks):
    ranks(2, _mapped)


def _idle_part(rank: int, world: int) -> None:
    model = Chain()
    for block in model.blocks:
        block.idle = nn.Linear(DIM, DIM)
        block.forward = lambda x, block=block: block[1](block[0](x))  # a Sequential would run what is appended
        fully_shard(block)
    fully_shard(model)
    counter = warm(model)
    events: list[str] = []
    history = counter.root.reduce_lane.history
    model.blocks[0][0].register_full_backward_hook(lambda *_: events.append(history[-1].name))
    with counter as counted:
        model(rows()).sum().backward()
    assert counted.reduces == [ROOT, *BLOCKS[::-1]]
    # When block 0 computes its gradients, block 1 has been reduced: it did not wait for its idle part.
    assert events == ["blocks.1"], events
    assert model.blocks[1].idle.weight.grad is None


def test_pitfall_34_an_idle_part_does_not_hold_up_the_reduce(ranks):
    ranks(2, _idle_part)


def _no_full_state(rank: int, world: int) -> None:
    model = sharded_chain()
    state = model.state_dict()
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.to_local().shape[0] == [-(-value.shape[0] // world), value.shape[0] // world][rank], name
    model(rows()).sum().backward()
    with Counter(model) as counter:
        model.state_dict()
    assert counter.counts == [0, 0]
    assert root_of(model).gather_pool.live_bytes == 0


def test_pitfall_33_a_state_dict_gathers_nothing(ranks):
    ranks(2, _no_full_state)


def _inference_first(rank: int, world: int) -> None:
    plain, model = pair(Chain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(rows()), plain(rows()))
    equal_steps(plain, model, rank, world)
    with torch.inference_mode():
        torch.testing.assert_close(model(rows()), plain(rows()))


def test_evaluation_under_inference_mode_before_training_makes_nothing_unusable(ranks):
    ranks(2, _inference_first)


def _stale_child(rank: int, world: int) -> None:
    model = sharded_chain()
    warm(model)
    held = list(model.parameters())  # as an optimizer holds them
    hook = model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows())
    hook.remove()
    with torch.no_grad():
        for parameter in held:
            parameter.zero_()
        found = model.blocks[1](rows()).abs().max()
    assert found == 0, f"block 1 was gathered ahead, before its weights became zero: {found}"


def test_a_child_called_alone_after_a_forward_that_raised_sees_new_weights(ranks):
    ranks(2, _stale_child)
