"""Formats as ranks use them: what is sent, what forward and backward see, what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import MixedPrecisionPolicy, SchedulePolicy, fully_shard, fully_shard_optimizer, gathered, summary
from flatshard.captured import _places
from flatshard.engine.units.unit import unit_of
from tests.dist.models import batches, loss_of, make_net
from tests.formats.cases import is_encoded, mesh_of, policy, sent, through, units_of

BF16 = torch.bfloat16


def sharded(sizes, net=None, **choices):
    net = make_net(depth=2) if net is None else net
    for unit in units_of(net):
        fully_shard(unit, mesh=mesh_of(sizes), **choices)
    return net


def step(net, tokens, optimizer=None):
    loss_of(net, tokens).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


class Seen:
    """The weights of a layer, whenever its forward runs and when a gradient comes to it."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward: list[torch.Tensor] = []
        self.backward: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda m, args: self.forward.append(m.weight.detach().clone()))
        layer.register_full_backward_pre_hook(lambda m, grads: self.backward.append(m.weight.detach().clone()))


def _same_bits(rank, world, layout, code):
    net = make_net(depth=2, recompute="non-reentrant")
    weight = net.blocks[0].up.weight.detach().clone()
    sharded([world], net, layout=layout, mp_policy=policy(gather_format=code, param_dtype=BF16))
    seen = Seen(net.blocks[0].up)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    tokens = next(iter(batches(1, 4)))
    step(net, tokens)
    wanted = through(weight, code).to(BF16)
    assert len(seen.forward) == 2  # the second is the recompute
    assert len(seen.backward) == 1
    for found in (*seen.forward, *seen.backward):
        assert torch.equal(found, wanted)
    optimizer.step()
    optimizer.zero_grad()
    step(net, tokens)
    assert not torch.equal(seen.forward[-1], wanted)
    assert torch.equal(seen.forward[-1], seen.backward[-1])
    main = net.blocks[0].up.weight.full_tensor()  # of the sharded one: what optimizers and checkpoints see
    assert torch.equal(through(main, code).to(BF16), seen.forward[-1])
    return net.blocks[0].up.weight.full_tensor().tolist()


@pytest.mark.parametrize(
    "world", [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_forward_recompute_and_backward_see_the_same_bits(ranks, world):
    ranks(world, _same_bits, "flat" if world == 2 else "tensor", "float8" if world == 3 else "int8")


def _bytes(rank, world):
    def run(precision):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 256), nn.Linear(256, 512))
        for each in (net[0], net):
            fully_shard(each, mesh=mesh_of([world]), mp_policy=precision)
        net(torch.randn(4, 256)).sum().backward()
        return sent(net, "gather"), sent(net, "reduce")

    encoded = {"gather_format": "int8", "reduce_format": "int8", "encodes": lambda name, p: p.dim() == 2}
    plain = run(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    ours = run(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, **encoded))
    in_float32 = run(MixedPrecisionPolicy(param_dtype=BF16, reduce_format="bf16_fp32"))
    assert list(ours[0]) == ["all_gather"]
    assert list(ours[1]) == list(in_float32[1]) == ["all_to_all"]
    assert list(plain[1]) == ["reduce_scatter"]
    for kind, mine in (("all_gather", 0), ("reduce_scatter", 1)):
        bytes_of_bf16 = plain[mine][kind]
        bytes_of_ours = next(iter(ours[mine].values()))
        assert len(bytes_of_ours) == len(bytes_of_bf16)  # a group is one launch, scales and all
        for few, many in zip(bytes_of_ours, bytes_of_bf16):
            assert few <= 0.52 * many
    told = sum(in_float32[1]["all_to_all"]) - sum(plain[1]["reduce_scatter"])
    assert abs(told) < 2 * 2 * 16  # which parameters ranks have used, in two groups


def test_bytes_and_launches(ranks):
    ranks(2, _bytes)


def _ahead(rank, world):
    full = 2 * (256 * 256 + 256)
    coded = 256 * 256 + 2 * 256 * 2 + 2 * 256  # codes, two scales a row, the bias
    precision = MixedPrecisionPolicy(param_dtype=BF16, gather_format="int8", encodes=lambda name, p: p.dim() == 2)
    for units in (1, 2, 4):
        most = full + units * coded  # one is decoded while it has its bytes
        for schedule in (
            SchedulePolicy(max_gathered=units),
            SchedulePolicy(max_gathered=1, max_gathered_bytes=most),
            SchedulePolicy(max_gathered=1, max_gathered_bytes=most + coded - 1),
        ):
            net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
            for each in (*net, net):
                fully_shard(each, mesh=mesh_of([world]), mp_policy=precision, schedule=schedule)
            for _ in range(3):
                net(torch.ones(1, 256, dtype=BF16)).sum().backward()
                pool = unit_of(net).root.gather_pool
                peak, pool.peak_bytes = pool.peak_bytes, 0
            assert (peak, pool.live_bytes) == (most, 0), schedule


def test_what_is_gathered_ahead_takes_the_bytes_that_travelled(ranks):
    ranks(2, _ahead)


class Around(nn.Module):
    """A unit with a matrix of its own around others."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))
        self.inner = nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        return sum(layer(x[:, : layer.in_features]).sum() for layer in self.inner)


def _under_a_limit(rank, world, dtype):
    """Units that are in one another; codes and scales that take as many bytes as bfloat16."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, gather_format="int8", encodes=lambda name, p: p.dim() == 2)
    for shape, kept in (((64, 64), ()), ((2, 1024), ()), ((64, 64), (1, 3))):
        least = 0
        for more in (0, 0, 3_000, 8_000, 12_000, 20_000):
            net = Around(shape)
            schedule = SchedulePolicy(max_gathered=1, max_gathered_bytes=least + more)
            for number, each in enumerate((*net.inner, net)):
                reshard = None if each is net else number not in kept
                fully_shard(
                    each, mesh=mesh_of([world]), mp_policy=precision, schedule=schedule, reshard_after_forward=reshard
                )
            for _ in range(3):
                net(torch.ones(2, 64, dtype=dtype)).backward()
                pool = unit_of(net).root.gather_pool
                peak, pool.peak_bytes = pool.peak_bytes, 0
            assert not least or peak <= least + more, (shape, kept, more, least)
            least = least or peak
        assert peak > least  # of the last, which has room


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_no_more_is_gathered_ahead_than_can_be_decoded(ranks, dtype):
    ranks(2, _under_a_limit, dtype)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.extra(x) if use else x)


def _parked_by_all(rank, world):
    """A rank that passes a unit over still keeps its part, from which the others gather it again."""
    trained = []
    for reshard in (True, 2):
        torch.manual_seed(0)
        net = Skipping()
        for each in net.children():
            fully_shard(each, reshard_after_forward=reshard, optional=each is net.extra, mp_policy=policy(
                gather_format="int8", encodes=lambda name, p: p.dim() == 2))  # fmt: skip
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step, use in enumerate((rank % 2 == 0, True, rank % 2 == 1, False)):
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            net(x, use).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.full_tensor() for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*trained))


def test_a_rank_that_passes_a_unit_over_keeps_its_part(ranks):
    ranks(4, _parked_by_all)


def _reduce_is_within_its_bound(rank, world, stochastic):
    """Each rank's gradient as it is, and the mean that comes out of the reduce."""
    net = nn.Sequential(nn.Linear(40, 24, bias=False))
    fully_shard(net, mesh=mesh_of([world]), mp_policy=policy(reduce_format="int8", stochastic=stochastic))
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(rank))
    net(x).sum().backward()
    grads = [torch.randn(5, 40, generator=torch.Generator().manual_seed(r)).sum(0).expand(24, 40) for r in range(world)]
    exact = sum(grads) / world
    scale = [through(g, "int8") for g in grads]
    largest = [g.view(24, 40).unfold(1, 8, 8).abs().amax((1, 2)) / 127 * 1.01 for g in grads]  # of a row, at least
    bound = sum(each[:, None] for each in largest) / world / (1 if stochastic else 2)
    found = net[0].weight.grad.full_tensor()
    assert ((found - exact).abs() <= bound + 1e-6).all()
    return torch.allclose(found, sum(scale) / world, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_mean_is_off_by_the_mean_of_half_the_scales(ranks, stochastic):
    nearest = ranks(3, _reduce_is_within_its_bound, stochastic)
    assert all(nearest) != stochastic


class Weighted(nn.Module):
    """The gradient of its weight is what is given, and that of its bias the sum over it."""

    def __init__(self, rows=24):
        super().__init__()
        self.inner = nn.Linear(40, rows)

    def forward(self, given):
        return (self.inner.weight * given).sum() + (self.inner.bias * given.sum(1)).sum()


def _given(rank, number, dtype):
    return torch.randn(24, 40, generator=torch.Generator().manual_seed(100 * rank + number)).to(dtype)


def _sums_are_encoded_as_they_are(rank, world, strategy, accumulate):
    """What several backwards have left in float32 is encoded from that, and not from its rounding to bfloat16."""
    net = Weighted()
    fully_shard(net, strategy=strategy, mp_policy=policy(param_dtype=BF16, reduce_format="int8"))
    for number in range(3):
        last = number == 2
        if accumulate == "sync":
            net.set_requires_gradient_sync(last)
        with flatshard.microbatch(net, is_first=number == 0, is_last=last) if accumulate != "sync" else nullcontext():
            net(_given(rank, number, BF16)).backward()
    sums = [sum(_given(r, number, BF16).float() for number in range(3)) for r in range(world)]
    found = net.inner.weight.grad.full_tensor()
    assert torch.allclose(found, sum(through(each, "int8") for each in sums) / world, rtol=1e-6, atol=1e-7)
    assert not torch.equal(sums[0], sums[0].to(BF16).float())


@pytest.mark.parametrize(("strategy", "accumulate"), [(3, "sync"), (1, "microbatch"), (0, "microbatch")])
def test_accumulated_gradients_are_rounded_once(ranks, strategy, accumulate):
    ranks(2, _sums_are_encoded_as_they_are, strategy, accumulate)


def _wide(rank, world):
    net = Weighted().double()
    fully_shard(net, mp_policy=policy(reduce_format="int8"))
    net(_given(rank, 0, torch.float64)).backward()
    exact = sum(_given(r, 0, torch.float64).sum(1) for r in range(world)) / world
    torch.testing.assert_close(net.inner.bias.grad.full_tensor(), exact, rtol=1e-14, atol=1e-14)


def test_what_is_not_encoded_of_float64_is_added_in_it(ranks):
    ranks(3, _wide)


def _asked(rank, world):
    net = make_net(depth=2)
    wanted, asked = net.blocks[0].up.weight, []

    def encodes(name, parameter):
        asked.append(name)
        return parameter is wanted

    sharded([world], net, mp_policy=MixedPrecisionPolicy(gather_format="int8", encodes=encodes))
    shown = [row.formats for row in summary(net).rows if row.formats]
    assert shown == ["int8 / - (1 of 5)"]
    assert len(asked) == sum(p.dim() > 1 for p in net.parameters())
    net.load_state_dict(net.state_dict(), assign=True)
    net.set_mp_policy(MixedPrecisionPolicy(gather_format="float8", encodes=encodes))
    net(next(iter(batches(1, 4))))
    assert [row.formats for row in summary(net).rows if row.formats] == ["float8 / - (1 of 5)"]
    assert len(asked) == sum(p.dim() > 1 for p in net.parameters())


def test_a_predicate_is_asked_once_of_the_parameter_that_was_given(ranks):
    ranks(2, _asked)


def _sums_are_in_float32(rank, world):
    """Gradients in bfloat16 are sent from where they are, and their mean is not rounded to it."""
    net = nn.Sequential(nn.Linear(40, 24, bias=False))
    fully_shard(net, mesh=mesh_of([world]), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_format="bf16_fp32"))
    rows = [torch.randn(5, 40, generator=torch.Generator().manual_seed(r)).to(BF16) for r in range(world)]
    out = net(rows[rank])
    out.sum().backward()
    grads = [(torch.ones(24, 5, dtype=BF16) @ row).float() for row in rows]
    exact = sum(grads) / world
    assert torch.equal(net[0].weight.grad.full_tensor(), exact)
    assert not torch.equal(exact, exact.to(BF16).float())


def test_bf16_is_added_in_float32(ranks):
    ranks(2, _sums_are_in_float32)


def _nonfinite(rank, world, value, layout):
    net = sharded([world], layout=layout, mp_policy=policy(reduce_format="int8", gather_format="int8"))

    def spoil(grad):
        if rank == 1:
            grad = grad.clone()
            grad[0, 0] = value
        return grad

    seen = []

    def hook(module, args):
        if not seen:
            seen.append(module.weight.register_hook(spoil))

    net.blocks[1].down.register_forward_pre_hook(hook)
    step(net, next(iter(batches(1, 4))))
    assert {name for name, _ in flatshard.find_nonfinite(net)} == {"blocks.1.down.weight"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_find_nonfinite_names_the_parameter(ranks, value):
    ranks(2, _nonfinite, value, "flat" if value == value else "tensor")


def _differ(rank, world):
    mine = policy(gather_format="int8", encodes=lambda name, p: p.dim() == 2 and (rank == 0 or "up" not in name))
    net = sharded([world], mp_policy=mine)
    with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*, encoded by int8.*not encoded by int8"):
        net(next(iter(batches(1, 4))))


def test_ranks_that_encode_different_parameters_are_told(ranks):
    ranks(2, _differ)


def _differ_later(rank, world):
    """After passes, as formats are switched; ranks that then agree go on."""
    net = sharded([world])
    tokens = next(iter(batches(1, 4)))
    step(net, tokens)
    for mine in (
        policy(gather_format="float8" if rank else "int8"),
        policy(gather_format="int8", block=16 if rank else 32),
        policy(gather_format="int8", encodes=lambda name, p: p.dim() == 2 and rank == 0),
        MixedPrecisionPolicy(param_dtype=BF16 if rank else torch.float16),
    ):
        net.set_mp_policy(mine)
        with pytest.raises(RuntimeError, match="ranks differ in their models"):
            net(tokens)
    net.set_mp_policy(policy(gather_format="int8"))
    step(net, tokens)


def test_ranks_that_switch_to_different_formats_are_told(ranks):
    ranks(2, _differ_later)


def _switch(rank, world):
    """Formats come and go between steps; what main holds, and so checkpoints, does not change by that."""
    net = sharded([world])
    tokens = next(iter(batches(1, 4)))
    step(net, tokens)
    before = {name: value.full_tensor() for name, value in net.state_dict().items()}
    net.zero_grad()
    net.set_mp_policy(policy(gather_format="int8", reduce_format="int8"))
    shown = [row.formats for row in summary(net).rows if row.formats]
    assert shown == ["int8 / int8 (1 of 3)", "int8 / int8 (2 of 5)", "int8 / int8 (2 of 5)"]
    step(net, tokens)
    after = net.state_dict()
    assert all(torch.equal(value, after[name].full_tensor()) for name, value in before.items())
    with gathered(net):
        for name, parameter in net.named_parameters():
            coded = through(before[name], "int8") if is_encoded(name, before[name]) else before[name]
            assert torch.equal(parameter.detach(), coded), name
    assert "all_to_all" in sent(net, "reduce")
    net.set_mp_policy(MixedPrecisionPolicy())
    assert not any(row.formats for row in summary(net).rows)
    with gathered(net):
        assert all(torch.equal(parameter.detach(), before[name]) for name, parameter in net.named_parameters())


def test_formats_can_be_switched_between_steps(ranks):
    ranks(2, _switch)


def _switch_off(rank, world):
    """A plain reduce over the outer axis needs room behind the gradients, which an encoded one does not."""
    tokens, found = next(iter(batches(1, 4))), []
    for first in (policy(reduce_format=("int8", "int8")), MixedPrecisionPolicy()):
        net = sharded([2, world // 2], mp_policy=first)
        step(net, tokens)
        net.zero_grad()
        net.set_mp_policy(MixedPrecisionPolicy())
        step(net, tokens)
        found.append([parameter.grad.full_tensor() for parameter in net.parameters()])
    assert all(map(torch.equal, *found))


def test_formats_of_both_axes_can_be_switched_off(ranks):
    ranks(4, _switch_off)


def _what_graphs_take_for_granted(rank, world):
    net = sharded([world])
    step(net, next(iter(batches(1, 4))))
    net.zero_grad()
    roots = [unit_of(net).root]
    for changed in (
        policy(gather_format="int8"),
        policy(reduce_format="int8"),
        MixedPrecisionPolicy(reduce_dtype=BF16),
    ):
        before = _places(roots)
        assert _places(roots) == before
        net.set_mp_policy(changed)
        assert _places(roots) != before


def test_a_captured_step_knows_another_policy(ranks):
    ranks(2, _what_graphs_take_for_granted)


def _saved(rank, world, folder):
    """What is saved with formats is main; a run without them goes on from it, on another layout, and the reverse."""
    tokens = next(iter(batches(1, 4)))
    net = sharded([world], mp_policy=policy(gather_format="int8", reduce_format="int8"))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    step(net, tokens, optimizer)
    flatshard.checkpoint.save(f"{folder}/one", net, optimizer, progress=False)
    plain = sharded([world], make_net(seed=1, depth=2), layout="flat")
    other = fully_shard_optimizer(torch.optim.AdamW(plain.parameters(), lr=1e-2))
    flatshard.checkpoint.load(f"{folder}/one", plain, other, progress=False)
    for one, two in zip(net.parameters(), plain.parameters()):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    step(plain, tokens, other)
    flatshard.checkpoint.save(f"{folder}/two", plain, other, progress=False)
    flatshard.checkpoint.load(f"{folder}/two", net, optimizer, progress=False)
    with gathered(net):  # what was encoded of the old weights is not shown
        shown = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for name, parameter in plain.named_parameters():
        whole = parameter.full_tensor()
        assert torch.equal(shown[name], through(whole, "int8") if is_encoded(name, whole) else whole), name


def test_checkpoints_know_nothing_of_formats(ranks, tmp_path):
    ranks(2, _saved, str(tmp_path))


def _by_rows(rank, world):
    """Rows are looked up in main, whatever the policy says; and so is what is gathered of the table."""
    net = nn.Sequential(nn.Embedding(64, 40))
    table = net[0].weight.detach().clone()
    for unit, more in ((net[0], {"rows": True}), (net, {})):
        every = policy(gather_format="int8", reduce_format="bf16_fp32", encodes=lambda name, p: True)
        fully_shard(unit, mesh=mesh_of([world]), mp_policy=every, **more)
    dist.broadcast(table, 0)
    with gathered(net, write=True):
        net[0].weight.data.copy_(table)
    tokens = torch.arange(7) * (rank + 3)
    assert torch.equal(net(tokens), table[tokens])
    with gathered(net):
        assert torch.equal(net[0].weight, table)
    assert not any(row.formats for row in summary(net).rows)


def test_tables_by_rows_travel_as_they_are(ranks):
    ranks(2, _by_rows)


def _default(rank, world):
    """A model as people write them: what stays as it is."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(256)
            self.proj = nn.Linear(256, 512)
            self.gate = nn.Linear(512, 128)  # a router
            self.gate_proj = nn.Linear(128, 512)
            self.router = nn.ModuleDict({"layer": nn.Linear(512, 128)})
            self.pos_embed = nn.Parameter(torch.empty(1, 256, 256))
            self.small = nn.Linear(16, 16)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(256, 1000)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(1000, 256)
            self.layer = Layer()
            self.lm_head = nn.Linear(256, 1000)
            self.last = nn.Linear(256, 1000)
            self.another = Head()

    model, precision = Model(), MixedPrecisionPolicy(gather_format="int8")
    units = (model.layer, model.last, model.another, model)
    for unit in units:
        fully_shard(unit, mesh=mesh_of([world]), mp_policy=precision)
    found = {}
    for unit in units:
        for group in unit_of(unit).groups:
            found.update((member.name, mark) for member, mark in zip(group.params, group.formats.encoded))
    assert {name for name, mark in found.items() if mark} == {"proj.weight", "gate_proj.weight"}


def test_what_stays_as_it_is_by_default(ranks):
    ranks(1, _default)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"gather_format": "int4"}, "gather_format"),
        ({"reduce_format": "float8"}, "reduce_format"),
        ({"reduce_format": ("int8", "fp8")}, "reduce_format"),
        ({"reduce_format": ("int8", "int8", "int8")}, "must have two formats"),
        ({"block": 100}, "power of two"),
        ({"block": 8}, "at least 16"),
        ({"encodes": "all"}, "encodes"),
        ({"stochastic": "yes"}, "stochastic"),
    ],
)
def test_refusals(fields, match):
    with pytest.raises((ValueError, TypeError), match=match):
        MixedPrecisionPolicy(**fields)
