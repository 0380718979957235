"""What a step on whole matrices takes and launches, what it refuses, and gradients of other dtypes."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, whole_optimizer
from flatshard.optim import CombinedOptimizer
from flatshard.optim.split_step import SplitStep
from tests.whole.cases import Net, Spectral, assert_equal_bits, give, gradients, inside, muon, shard

COUNT, ROWS, COLUMNS = 40, 24, 32


class Live(TorchDispatchMode):
    """The most bytes that tensors made in it have had at once, and storages that were resized in it.

    A thread of Gloo lets go of what it has sent a moment after it has told so. Above ``most``, look again for a while.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.peak, self._most = 0, most
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._bytes()
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        looks = 0
        while self._bytes() > self._most and looks < 200:
            looks += 1
            time.sleep(0.01)
        self.peak = max(self.peak, self._bytes())
        return result

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._sizes[storage._cdata] = StorageWeakRef(storage), size
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _bytes(self) -> int:
        self._sizes = {key: each for key, each in self._sizes.items() if not each[0].expired()}
        return sum(size for _, size in self._sizes.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Counting(Optimizer):
    """Counts in its groups, in a tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1


def test_calls_of_one_step_count_once():
    matrices = [nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    count = torch.tensor(4.0)
    optimizer = Counting(matrices, {"count": count, "odd": float("nan")})
    split = SplitStep(optimizer, optimizer.step)
    for matrix in matrices:
        with split.with_params([(0, matrix)]) as step:
            step()
    split.close()
    assert optimizer.param_groups[0]["count"] is count
    assert count == 5


class Plain(Optimizer):
    """Takes no memory of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            assert p.grad is None or not torch.equal(p.grad, p)
            p.sub_(p.grad, alpha=0.1)


def _bounded(rank: int, world: int, how: dict[str, Any]) -> None:
    model = nn.Sequential(*[nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(COUNT)])
    fully_shard(model, **how)
    optimizer = fully_shard_optimizer(Plain(model.parameters()), whole=True, bucket_bytes=1)
    give(model, gradients(model, 0))
    optimizer.step()  # the plan is made once
    side = optimizer.__dict__["_flatshard_stepper"]
    (lane,) = {bucket.lane for bucket in side.buckets}
    before = lane.launched
    pair = 2 * 4 * ROWS * COLUMNS  # a matrix and its gradient
    with Live(int(5.5 * pair)) as live:
        optimizer.step()
    assert 2 * pair <= live.peak <= 5.5 * pair, (live.peak / pair, world)
    assert lane.launched - before == 2 * len(side.buckets)
    assert len(side.buckets) == -(-COUNT // world)  # each owner has one of every bucket
    names = [operation.name for operation in lane.history][before:]
    assert names[:5] == ["whole 0 in", "whole 1 in", "whole 0 out", "whole 2 in", "whole 1 out"]  # the next comes early


def test_memory_is_that_of_a_few_buckets(ranks):
    ranks(2, _bounded, {})


@pytest.mark.full
@pytest.mark.parametrize("world", [3, 4])
def test_memory_is_that_of_a_few_buckets_everywhere(ranks, world):
    for layout in ("tensor", "flat"):
        ranks(world, _bounded, {"layout": layout})


def _bounded_copies(rank: int, world: int) -> None:
    model = nn.Sequential(*[nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(COUNT)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = fully_shard_optimizer(Plain(model.parameters()), whole=True, bucket_bytes=1, owners="all")
    give(model, gradients(model, 0))
    optimizer.step()
    most = 9 * 2 * 4 * ROWS * COLUMNS  # two replicas share the work
    with Live(most) as live:
        optimizer.step()
    assert live.peak <= most < 8 * COUNT * ROWS * COLUMNS


@pytest.mark.full
def test_memory_where_replicas_share_the_work(ranks):
    ranks(4, _bounded_copies)


def _dtypes(rank: int, world: int) -> None:
    """Gradients in bfloat16 are cast for the step, or given as they are."""
    tokens = torch.arange(8) % 13
    for aware in (False, True):
        policy = MixedPrecisionPolicy(grad_dtype=torch.bfloat16)
        model = shard(Net(), mp_policy=policy)
        seen: list[torch.dtype] = []

        class Watching(Spectral):
            def step(self, closure: Any = None, seen=seen, aware=aware) -> None:
                params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
                seen += [p.grad.dtype for p in params]
                if not aware:
                    super().step()

        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer = fully_shard_optimizer(Watching(matrices), whole=True, precision_aware=aware)
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in matrices)
        optimizer.step()
        assert set(seen) == {torch.bfloat16 if aware else torch.float32}


def test_gradients_of_another_dtype(ranks):
    ranks(2, _dtypes)


def _combined_dtypes(rank: int, world: int) -> None:
    tokens = torch.arange(8) % 13
    model = shard(Net(), mp_policy=MixedPrecisionPolicy(grad_dtype=torch.bfloat16))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    rest = [(name, parameter) for name, parameter in model.named_parameters() if not inside(name, parameter)]
    adamw = fully_shard_optimizer(torch.optim.AdamW(rest))
    optimizer = CombinedOptimizer([whole_optimizer(Spectral, model, inside), adamw])
    torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    assert not any(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before) if old.numel())


def test_optimizers_that_cast_gradients_are_combined(ranks):
    ranks(2, _combined_dtypes)


class Summing(Optimizer):
    """Adds up over parameters, which no rank can."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["total"] = sum((p.grad.sum().item() for p in group["params"]), group["total"])


def _refused(rank: int, world: int) -> None:
    model = shard(Net())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with pytest.raises(ValueError, match="give whole=True"):
        fully_shard_optimizer(muon(matrices))
    with pytest.raises(ValueError, match="that `whole` leaves out"):
        fully_shard_optimizer(muon(matrices), whole=lambda name, p: p.shape[0] > 10)
    with pytest.raises(ValueError, match="evaluates the model several times"):
        fully_shard_optimizer(torch.optim.LBFGS(matrices), whole=True)
    with pytest.raises(ValueError, match=r"split of 'blocks.0.qkv.weight': 18 rows cannot be split into 4"):
        whole_optimizer(muon, model, inside, split={"*qkv*": 4})
    with pytest.raises(ValueError, match="of `factory` does not have"):
        whole_optimizer(lambda matrices: muon(matrices[1:]), model, inside)
    with pytest.raises(ValueError, match="no parameter"):
        whole_optimizer(muon, model, lambda name, p: False)
    with pytest.raises(ValueError, match="owners='every'"):
        fully_shard_optimizer(muon(matrices), whole=True, owners="every")
    optimizer = fully_shard_optimizer(muon(matrices), whole=True)
    with pytest.raises(ValueError, match="with another `whole`"):
        fully_shard_optimizer(optimizer)
    assert fully_shard_optimizer(optimizer, whole=True) is optimizer
    with pytest.raises(RuntimeError, match="copy of an optimizer with whole=True"):
        copy.copy(optimizer).step()
    give(model, gradients(model, 0))
    foreign = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    for step in (lambda: foreign(matrices).step(), lambda: fully_shard_optimizer(foreign(matrices))):
        with pytest.raises(ValueError, match="of bitsandbytes scales blocks"):
            step()
    optimizer = whole_optimizer(muon, model, lambda name, p: name.startswith("blocks.0") and "down" in name)
    optimizer.add_param_group({"params": [model.blocks[1].down.weight]})
    with pytest.raises(ValueError, match="that `whole` leaves out"):  # it would step shards as if they were whole
        optimizer.step()
    with pytest.raises(RuntimeError, match="changes 'total'"):
        fully_shard_optimizer(Summing(matrices), whole=True, bucket_bytes=1).step()


def test_refusals(ranks):
    ranks(1, _refused)


class Calling(torch.optim.Muon):
    """Its step is one call of its base's, which has hooks of its own as soon as there has been a Muon."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _added(rank: int, world: int) -> None:
    """What is done to groups, weights and state between steps is done to what owners have, too."""
    reference = Net()
    model = shard(copy.deepcopy(reference))
    optimizers = [kind([each.head.weight], lr=0.1) for kind, each in ((Calling, model), (torch.optim.Muon, reference))]
    fully_shard_optimizer(optimizers[0], whole=True)
    for step in range(6):
        for each, optimizer in zip((model, reference), optimizers):
            if step == 1:
                optimizer.add_param_group({"params": [block.down.weight for block in each.blocks], "lr": 0.3})
            if step == 2:
                optimizer.param_groups.reverse()
            if step == 3:
                optimizer.state.clear()
            if step == 4:
                optimizer.state = defaultdict(dict)
                del optimizer.param_groups[0]["params"][0]
            give(each, gradients(reference, 0))
            optimizer.step()
            for parameter in each.parameters():  # as one who averages weights, or loads others: the next step sees it
                parameter.data.mul_(0.5)
        assert_equal_bits(model, reference)
    side = optimizers[0].__dict__["_flatshard_stepper"]
    assert [each.owner for each in side.matrices] == [0, 1, 1]  # who came later counts what was there; nobody's changes


def _named_as_in_the_model(rank: int, world: int) -> None:
    reference = Net()
    model = shard(copy.deepcopy(reference))
    optimizers = []
    for each in (model, reference):
        each.blocks[1].requires_grad_(False)
        optimizers.append(whole_optimizer(muon, each, inside))
        optimizers[-1].add_param_group({"params": list(each.blocks[1].requires_grad_().down.parameters())})
        give(each, gradients(reference, 0))
        optimizers[-1].step()
    assert_equal_bits(model, reference)


def test_what_is_done_between_steps(ranks):
    ranks(2, _added)
    ranks(2, _named_as_in_the_model)


def _different(rank: int, world: int) -> None:
    model = shard(Net())
    optimizer = whole_optimizer(muon, model, lambda name, p: inside(name, p) and (rank == 0 or "up" not in name))
    give(model, gradients(model, 0))
    with pytest.raises(RuntimeError, match=r"rank 0: blocks.0.up.weight \(10, 6\).* rank 1: blocks.0.down"):
        optimizer.step()
    matrices = [p for n, p in model.named_parameters() if inside(n, p) and p.dim() == 2]
    with pytest.raises(ValueError, match="Muon needs whole matrices, but these are sharded"):
        muon(matrices).step()
    with pytest.raises(RuntimeError, match=r"rank 0: total=\S+ in parameter group 0; rank 1: total="):
        fully_shard_optimizer(Summing(matrices), whole=True).step()  # each rank has one bucket, and its own sum
    optimizer = whole_optimizer(muon, model, inside, cost=lambda shape: shape[rank])
    with pytest.raises(RuntimeError, match=r"owned by number 0; rank 1: .* owned by number 1"):
        optimizer.step()


def test_ranks_with_different_matrices_are_told(ranks):
    ranks(2, _different)
