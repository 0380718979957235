"""AdamW with state in 8 bits: the same bits however it is sharded, close to AdamW, and saved; and torchao's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import fully_shard, fully_shard_optimizer
from flatshard.optim import AdamW8bit
from flatshard.optim.adamw8bit import is_quantized, state_bytes
from flatshard.rehearsal.network import get_network
from flatshard.tools.model_shapes import load_model
from flatshard.tools.plan import compare_strategies
from flatshard.tools.presets import OPTIMIZERS
from flatshard.tools.strategy_plan import Machine, Training
from tests.whole.cases import assert_equal_bits, bits, give, gradients


class Wide(nn.Module):
    """Rows of whole blocks, of more than one, and of less; a vector; and rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(512, 7, bias=False)
        self.odd = nn.Linear(300, 11)
        self.experts = nn.Parameter(torch.empty(5, 8, 9))
        self.small = nn.Linear(8, 6, bias=False)
        rng = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.2, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.even(x)


def run(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        give(model, {name: grad * 10.0 ** (step - 2) for name, grad in gradients_of(model, step).items()})
        optimizer.step()


def gradients_of(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    return gradients(model, step + 10)


def assert_equal_state(ours: Any, reference: Any, models: tuple[nn.Module, nn.Module]) -> None:
    for p, q in zip(*(each.parameters() for each in models)):
        assert ours.state[p].keys() == reference.state[q].keys()
        for key, wanted in reference.state[q].items():
            found = ours.state[p][key]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found, wanted), key


def _same_bits(rank: int, world: int, kinds: list[dict[str, Any]]) -> None:
    reference = Wide()
    wanted = AdamW8bit(reference.parameters(), lr=1e-2)
    start = copy.deepcopy(reference)
    run(reference, wanted, range(4))
    for how in kinds:
        mesh = init_device_mesh("cpu", how.pop("mesh", (world,)))
        model = fully_shard(copy.deepcopy(start), mesh=mesh, **how)
        optimizer = fully_shard_optimizer(AdamW8bit(model.parameters(), lr=1e-2))
        run(model, optimizer, range(4))
        assert_equal_bits(model, reference)
        assert_equal_state(optimizer, wanted, (model, reference))
        state = flatshard.summary(model, optimizer).state
        assert state[1] == sum(p.to_local().numel() for p in model.parameters())
        assert "of optimizer state on this rank" in str(flatshard.summary(model, optimizer))


def test_the_same_bits_on_any_number_of_ranks(ranks):
    ranks(3, _same_bits, [{"layout": "tensor"}, {"layout": "flat"}])


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_same_bits_everywhere(ranks, world):
    kinds = [{"layout": layout, "strategy": strategy} for layout in ("tensor", "flat") for strategy in range(4)]
    kinds += [{"mesh": (2, 2)}, {"mesh": (2, 2), "outer_strategy": "optim"}] if world == 4 else []
    ranks(world, _same_bits, kinds)


def _accuracy(rank: int, world: int) -> None:
    """A quarter of AdamW's state, and weights that part from AdamW's by a small part of what has been learnt."""
    model = Wide()
    start = copy.deepcopy(model)
    other = copy.deepcopy(model)
    optimizers = [AdamW8bit(model.parameters(), lr=1e-3), torch.optim.AdamW(other.parameters(), lr=1e-3)]
    for step in range(20):
        whole = gradients_of(model, step)
        for each, optimizer in zip((model, other), optimizers):
            give(each, whole)
            optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (other.get_parameter(name) - start.get_parameter(name)).norm()
        assert (parameter - other.get_parameter(name)).norm() < 0.03 * moved, name
        state = optimizers[0].state[parameter]
        size = sum(value.nbytes for key, value in state.items() if key != "step")
        assert size == state_bytes(parameter.shape) * parameter.numel()
        assert is_quantized(parameter.shape) == (name in {"even.weight", "odd.weight", "experts"})
    assert state_bytes(model.even.weight.shape) == 2 + 8 / 256


def test_bytes_and_accuracy(ranks):
    ranks(1, _accuracy)


def test_bytes_per_parameter_in_a_plan():
    network = get_network("h100-nvlink")
    found = {}
    for name in ("adamw", "adamw-8bit", "muon"):
        plan = compare_strategies(load_model("llama-1b"), Machine(8, 80e9, network), Training(state=OPTIMIZERS[name]))
        found[name] = plan.state_per_parameter
        assert f"{found[name]:.2f} bytes per parameter" in plan.table()
    assert found["adamw"] == 8
    assert 2.03 < found["adamw-8bit"] < 2.04
    assert 4 < found["muon"] < 4.01


def _save(rank: int, world: int, path: Any) -> None:
    model = fully_shard(Wide(), layout="flat")
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    run(model, optimizer, range(2))
    flatshard.checkpoint.save(path, model, optimizer, progress=False)


def _load(rank: int, world: int, path: Any) -> None:
    reference = Wide()
    wanted = AdamW8bit(reference.parameters(), lr=1e-2)
    run(reference, wanted, range(4))
    for model in (fully_shard(Wide()), Wide()):
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        flatshard.checkpoint.load(path, model, optimizer, progress=False)
        run(model, optimizer, range(2, 4))
        assert_equal_bits(model, reference)
    other = fully_shard(Wide())
    again = AdamW8bit(other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # of the unsharded one: whole tensors
    for parameter, value in other.named_parameters():
        value.detach().copy_(reference.get_parameter(parameter).detach())
    for each, stepped in ((other, again), (reference, wanted)):
        run(each, stepped, range(4, 6))
    assert_equal_bits(other, reference)


def test_checkpoints_load_on_other_ranks_and_unsharded(ranks, tmp_path):
    ranks(3, _save, tmp_path / "c")
    ranks(2, _load, tmp_path / "c")


def _cast(rank: int, world: int) -> None:
    """Gradients in another dtype than main weights are cast by the optimizer itself."""
    found = []
    for options in ({}, {"in_backward": True}):
        policy = flatshard.MixedPrecisionPolicy(grad_dtype=torch.bfloat16)
        model = fully_shard(Wide(), mp_policy=policy)
        optimizer = fully_shard_optimizer(AdamW8bit(model.parameters(), lr=1e-2), **options)
        for _ in range(3):
            model(torch.ones(1, 512)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(bits(model.even.weight.to_local()))
    assert torch.equal(*found)


def test_gradients_of_another_dtype(ranks):
    ranks(2, _cast)


def _goes_on(rank: int, world: int, path: Any, options: dict[str, Any]) -> None:
    """What such an optimizer, or a copy of it, has saved goes on as it does itself."""
    model = fully_shard(Wide())
    optimizer = fully_shard_optimizer(AdamW8bit(model.parameters(), lr=1e-2), **options)
    run(model, optimizer, range(2))
    if "whole" not in options:
        model, optimizer = copy.deepcopy((model, optimizer))
        run(model, optimizer, range(2, 4))
    flatshard.checkpoint.save(path, model, optimizer, progress=False)
    loaded = fully_shard(Wide())
    other = fully_shard_optimizer(AdamW8bit(loaded.parameters(), lr=1e-2), **options)
    flatshard.checkpoint.load(path, loaded, other, progress=False)
    for each, stepped in ((model, optimizer), (loaded, other)):
        run(each, stepped, range(4, 6))
    for one, two in zip(model.parameters(), loaded.parameters()):
        assert torch.equal(bits(one.full_tensor()), bits(two.full_tensor()))


def _are_experts(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() > 2


@pytest.mark.parametrize("options", [{"whole": _are_experts}, {"in_backward": True}])
def test_state_on_shards_is_saved_beside_whole_parameters_and_of_copies(ranks, tmp_path, options):
    ranks(2, _goes_on, tmp_path / "c", options)


def _others(rank: int, world: int) -> None:
    """torchao's, as it is: each rank quantises what it holds, as with FSDP2, in blocks that go on over rows."""
    torchao = pytest.importorskip("torchao.optim")
    for layout in ("tensor", "flat"):
        reference = nn.Linear(512, 32, bias=False)
        reference.weight.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
        model = fully_shard(copy.deepcopy(reference), layout=layout)
        optimizers = [torchao.AdamW8bit(each.parameters(), lr=1e-2) for each in (model, reference)]
        for step in range(3):
            whole = {"weight": torch.randn(32, 512, generator=torch.Generator().manual_seed(step))}
            for each, optimizer in zip((model, reference), optimizers):
                give(each, whole)
                optimizer.step()
        state = optimizers[0].state[model.weight]["exp_avg"]
        assert type(state.to_local()).__name__ == "OptimState8bit"
        # Rows are of whole blocks here, and so are shards: the bits are the same.
        assert torch.equal(bits(model.weight.full_tensor()), bits(reference.weight))


@pytest.mark.full
@pytest.mark.limit(200)
def test_torchao_works_as_it_is(ranks):
    pytest.importorskip("torchao.optim")
    ranks(2, _others)
