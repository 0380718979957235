"""`CPUOffloadPolicy`: weights, gradients and optimizer state in host memory."""

import functools
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, fully_shard_optimizer
from flatshard.buffer import Ticket
from flatshard.engine.units.unit import unit_of
from flatshard.engine.weights import offload
from flatshard.engine.weights.offload import Home, HostCopy
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_engine import shard_net


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 7)), nn.Linear(7, 3))


def shard(model, policy, **choices):
    for module in model:
        fully_shard(module, offload_policy=policy, **choices)
    return fully_shard(model, offload_policy=policy, **choices)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.full), True], ids=["as it is", "by way of copies"])
def apart(request):
    """A mesh of CPUs copies nothing; with True it does what a mesh of accelerators does."""
    return request.param


def keep_apart(monkeypatch):
    """Let a mesh of CPUs copy to and from "host memory", as a mesh of accelerators does."""

    def of(cls, device, policy):
        is_apart = isinstance(policy, CPUOffloadPolicy)
        return cls(device, is_apart, device_grad_bytes=policy.device_grad_bytes if is_apart else 0)

    monkeypatch.setattr(Home, "of", classmethod(of))


def _train(rank, world, apart, choices, sizes):
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            keep_apart(patch)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        reference, model = build(), shard(build(), CPUOffloadPolicy(), mesh=mesh, **choices)
    assert all(group.home.host == apart for module in model for group in unit_of(module).groups)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    fully_shard_optimizer(optimizers[0])
    seen = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad.to_local().clone()}))
    data = torch.randn(6, 2 * world, 5, generator=torch.Generator().manual_seed(1))
    for number, batch in enumerate(data):
        last = number % 2 == 1  # two micro-batches a step: the first is kept unreduced, or reduced and added to
        model.set_requires_gradient_sync(last or number > 2)
        model(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        if not last:
            continue
        for parameter in model.parameters():
            assert torch.equal(seen.pop(parameter), parameter.grad.to_local())
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.1), norm)
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert ours.device.type == ours.grad.device.type == "cpu"
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    flatshard.check_buffers(model)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data)
        assert all(value.device.type == "cpu" for value in optimizers[0].state[ours].values())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.testing.assert_close(full, dict(reference.state_dict()))


WIDE = flatshard.MixedPrecisionPolicy(reduce_dtype=torch.float64)


@pytest.mark.parametrize(
    ("world", "choices", "sizes"),
    [
        (2, {}, (2,)),
        (2, {"strategy": 2, "mp_policy": WIDE}, (2,)),
        (4, {"reshard_after_forward": False, "gradient_scale": 0.25}, (2, 2)),
    ],
)
def test_training_from_host_memory(ranks, apart, world, choices, sizes):
    ranks(world, _train, apart, choices, sizes)


def _meta(rank, world, apart, folder):
    """A meta model that is given weights parameter by parameter; saved and loaded."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        if apart:
            keep_apart(patch)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        shard(model, CPUOffloadPolicy(pin_memory=False))
    torch.manual_seed(0)
    whole = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        given = distribute_tensor(whole[name], parameter.device_mesh, [Shard(0)])
        model.load_state_dict({name: given}, assign=True, strict=False)
    x = torch.randn(3, 4)
    expected = x @ whole["0.weight"].T @ whole["1.weight"].T
    torch.testing.assert_close(model(x), expected)
    flatshard.checkpoint.save(folder, model, progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(x).any()
    flatshard.checkpoint.load(folder, model, progress=False)
    torch.testing.assert_close(model(x), expected)


def test_meta_models_and_checkpoints(ranks, apart, tmp_path):
    ranks(2, _meta, apart, str(tmp_path / "saved"))


def _refused(rank, world):
    with pytest.raises(TypeError, match="CPUOffloadPolicy"):
        fully_shard(nn.Linear(2, 2), offload_policy="cpu")


def test_another_policy_is_refused(ranks):
    ranks(1, _refused)


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
FEATURES = {
    "zero 0": {"strategy": 0},
    "zero 1": {"strategy": 1, "mp_policy": MixedPrecisionPolicy(**BF16)},
    "zero 2": {"strategy": 2, "mp_policy": MixedPrecisionPolicy(**BF16)},
    "int8 gathers": {"mp_policy": MixedPrecisionPolicy(**BF16, gather_format="int8")},
    "int8 both": {"mp_policy": MixedPrecisionPolicy(**BF16, gather_format="int8", reduce_format="int8")},
    "int8, zero 1": {"strategy": 1, "mp_policy": MixedPrecisionPolicy(**BF16, gather_format="int8")},
    "whole matrices": {},
    "recompute": {"mp_policy": MixedPrecisionPolicy(**BF16)},
    "saved on CPU": {"mp_policy": MixedPrecisionPolicy(**BF16)},
}


def _with_feature(rank, world, feature):
    """Losses and weights of a model in host memory and of one that is not, to the last bit."""
    found = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(policy, CPUOffloadPolicy):
                keep_apart(patch)
            model = shard_net(
                make_net(recompute="non-reentrant" if feature == "recompute" else None),
                offload_policy=policy,
                **FEATURES[feature],
            )
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        if feature == "whole matrices":
            optimizer = fully_shard_optimizer(torch.optim.Muon(matrices, lr=0.02), whole=True)
        else:
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
        losses = []
        for number, tokens in enumerate(batches(6, 4)):
            last = number % 2 == 1
            model.set_requires_gradient_sync(last or number > 2)
            with torch.autograd.graph.save_on_cpu() if feature == "saved on CPU" else nullcontext():
                loss = loss_of(model, tokens.chunk(world)[rank])
                loss.backward()
            losses.append(loss.item())
            if last:
                losses.append(flatshard.clip_grad_norm_(matrices, 1.0).item())
                optimizer.step()
                model.zero_grad()
        found.append((losses, [p.full_tensor() for p in model.parameters()]))
    (losses, weights), (others, theirs) = found
    assert losses == others
    assert all(map(torch.equal, weights, theirs))
    assert losses[0] != losses[-2]


@pytest.mark.parametrize("feature", FEATURES)
def test_features_work_from_host_memory(ranks, feature):
    ranks(2, _with_feature, feature)


def test_memory_that_cannot_be_pinned_is_told_with_what_to_do(monkeypatch):
    def empty(*args, pin_memory, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match=r"4\.00 GB of host memory could not be pinned .*out of memory.*ulimit -l"):
        Home(torch.device("cpu"), host=True, pinned=True).empty(10**9, torch.float32)
    with pytest.raises(RuntimeError, match=r"4\.00 GB of host memory could not be allocated: .*out of memory"):
        Home(torch.device("cpu"), host=True).empty(10**9, torch.float32)


def test_no_more_is_pinned_than_the_limit(monkeypatch):
    pinned, real = [], torch.empty

    def empty(numel, pin_memory, **kwargs):
        pinned.append(4 * numel if pin_memory else 0)
        return real(numel, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(offload, "pinned_bytes", lambda: sum(pinned))
    home = Home.of(torch.device("cuda"), CPUOffloadPolicy(pin_limit=4 * 1024))
    for numel in (512, 513, 128, 200, 128, 64):  # blocks are powers of two
        home.empty(numel, torch.float32)
    assert pinned == [2048, 0, 512, 800, 512, 0]
    with pytest.raises(ValueError, match="pin_limit=-1: must be at least 0"):
        CPUOffloadPolicy(pin_limit=-1)


def _sums(rank, world):
    """A sum that does not fit in the dtype of gradients, although what it is divided to does."""
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = nn.Linear(4, 2, bias=False).half()
        fully_shard(
            model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), offload_policy=CPUOffloadPolicy()
        )
    model.set_gradient_divide_factor(4.0)
    model(torch.full((1, 4), 40000.0, dtype=torch.float16)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((2, 4), 20000.0, dtype=torch.float16))


def test_sums_are_divided_before_they_are_cast(ranks):
    ranks(2, _sums)


def _casts(rank, world):
    """Of a step of two micro-batches."""
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = shard(build(), CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(**BF16))
        cast, plain = [], HostCopy._run
        patch.setattr(HostCopy, "_run", lambda *given: cast.append(given) or plain(*given))
        for number in range(2):
            with flatshard.microbatch(model, is_first=number == 0, is_last=number == 1):
                loss = model(torch.randn(2, 5)).square().mean()
            loss.backward()
    return len(cast), sum(len(unit_of(module).groups) for module in (*model, model))


def test_weights_are_cast_once_per_step(ranks):
    for casts, groups in ranks(2, _casts):
        assert casts == groups


def _sent(rank, world):
    """How many gathers have sent main, and how many the cast, in four forwards of a model whose host thread is late.

    The bus is idle; the same, in the next micro-batch; the bus is busy; without gradients. In all of them, the output
    is that of a model on the device.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        sent, send, settle = [], HostCopy.send, HostCopy.settle
        patch.setattr(HostCopy, "send", lambda *given: sent.append("any") or send(*given))
        patch.setattr(HostCopy, "settle", lambda self: sent.append("cast") or settle(self))
        patch.setattr(torch.Tensor, "is_pinned", lambda self: True)
        model = shard(build(), CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(**BF16))
        reference = shard(build(), OffloadPolicy(), mp_policy=MixedPrecisionPolicy(**BF16))
        x = torch.randn(2, 5)
        for is_first, is_idle, grads in [
            (True, True, True),
            (False, True, True),
            (True, False, True),
            (True, True, False),
        ]:
            gate = threading.Event()
            offload._worker.submit(gate.wait)
            patch.setattr(Ticket, "has_ended", lambda self, gate=gate, idle=is_idle: idle or gate.set())
            if not grads or not is_first:  # the gathers wait for the cast, although the bus is idle
                threading.Timer(0.2, gate.set).start()
            with flatshard.microbatch(model, is_first=is_first, is_last=False), torch.set_grad_enabled(grads):
                assert torch.equal(model(x), reference(x))
            gate.set()
            found.append((sent.count("any") - sent.count("cast"), sent.count("cast")))
            sent.clear()
    return found


def test_a_gather_waits_for_the_cast_only_while_the_bus_is_busy(ranks):
    for (idle, none), *others in ranks(2, _sent):
        assert idle > 0
        assert none == 0
        assert all(main == 0 and cast > 0 for main, cast in others)


def _sent_once(rank, world, reshards):
    """How many groups the host casts: in three steps, in one after a forward without gradients, and in the next."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        cast, plain = [], HostCopy._run
        patch.setattr(HostCopy, "_run", lambda *given: cast.append(given[0]) or plain(*given))
        patch.setattr(torch.Tensor, "is_pinned", lambda self: True)
        choices = {"mp_policy": MixedPrecisionPolicy(**BF16), "reshard_after_forward": reshards}
        models = [shard(build(), policy, **choices) for policy in (CPUOffloadPolicy(), OffloadPolicy())]
        optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
        for number, batch in enumerate(torch.randn(5, 2, 5)):
            losses = []
            for model, optimizer in zip(models, optimizers):
                if number == 3:
                    with torch.no_grad():
                        model(batch)
                    for module in (*model, model):
                        module.reshard()
                losses.append(model(batch).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
            for _ in range(3):  # what is put off comes behind the others
                offload._worker.submit(int).result()
            found.append(len(set(cast)))  # one that is put off is started again
            cast.clear()
    return found, sum(len(unit_of(module).groups) for module in (*model, model))


def test_weights_that_are_sent_once_per_step_are_not_cast_by_the_host(ranks):
    for found, groups in ranks(2, _sent_once, False):
        assert found == [groups, 0, 0, groups, 0]
    for found, groups in ranks(2, _sent_once, True):
        assert found == [groups] * 5


def _failed(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = shard(build(), CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(**BF16))
        x = torch.randn(2, 5)
        expected = model(x)
        with mock.patch.object(torch.Tensor, "copy_", side_effect=MemoryError("the host has no room")):
            model.reset()
            with pytest.raises(MemoryError, match="no room"):
                model(x)
        model.reset()
        assert torch.equal(model(x), expected)


def test_a_cast_that_failed_is_repeated(ranks):
    ranks(1, _failed)


def _inferred(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = shard(build(), CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(**BF16))
    x = torch.randn(2, 5)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_first_pass_may_be_one_of_inference(ranks):
    ranks(1, _inferred)


def _outer(rank, world, policy):
    """Losses of steps on the device, with optimizer state sharded over an outer axis."""
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        mixed = MixedPrecisionPolicy(**BF16)
        model = shard_net(make_net(), offload_policy=policy, mp_policy=mixed, mesh=mesh, outer_strategy="optim")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
        losses = []
        for batch in batches(3, 4):
            loss = loss_of(model, batch.chunk(world)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_compute_weights_of_an_outer_axis_follow_steps_from_host_memory(ranks):
    assert ranks(2, _outer, CPUOffloadPolicy()) == ranks(2, _outer, OffloadPolicy())


@pytest.mark.parametrize(("pinned", "order"), [(True, [2, 3, 4, 0, 1, 5, 6]), (False, [0, 1, 2, 3, 4, 5, 6])])
def test_the_host_casts_ahead_of_the_bus(pinned, order):
    """Weights that the device is to cast: the first and the large ones, and of blocks one of three or four."""
    started = []
    copies = []
    for number, numel in enumerate([1, 8, 4, 4, 4, 4, 8]):
        local = mock.Mock(numel=lambda numel=numel: numel, is_pinned=lambda: pinned)
        prepare = functools.partial(started.append, number)
        copies.append(mock.Mock(main=mock.Mock(local=local), prepare=prepare))
    offload.prepare_in_turns(copies, may_send_main=True)
    assert started == order
    assert {copy.may_send_main for copy in copies} == {pinned}


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def _share(rank, world, wanted, in_backward):
    """The last blocks are in host memory, the others are not; training equals one process."""
    reference = _blocks()
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = _blocks()
        choices = {"units": [nn.Sequential], "offload_policy": CPUOffloadPolicy(), "offload_bytes": wanted}
        table = flatshard.shard_model(model, **choices)
    sizes = [(unit_of(block).groups[0].home.host, unit_of(block).groups[0].main.local.nbytes) for block in model[1:]]
    offloaded = [size for is_offloaded, size in sizes if is_offloaded]
    assert [is_offloaded for is_offloaded, _ in sizes] == sorted(is_offloaded for is_offloaded, _ in sizes)
    assert sum(offloaded[1:]) < max(wanted, 1) and sum(offloaded) >= wanted  # noqa: PT018
    assert not unit_of(model).groups[0].home.host
    assert str(table).count("float32 on host") == len(offloaded)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    fully_shard_optimizer(optimizers[0], in_backward=in_backward)
    for batch in torch.randn(5, 2 * world, 8, generator=torch.Generator().manual_seed(1)):
        model(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        if not in_backward:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data)
    early = [unit_of(block).groups[0].gradients.on_final is not None for block in model[1:]]
    assert early == [in_backward] * len(sizes)


@pytest.mark.parametrize(("wanted", "in_backward"), [(0, False), (150, False), (150, True), (600, True)])
def test_only_as_many_bytes_as_asked_are_offloaded(ranks, wanted, in_backward):
    ranks(2, _share, wanted, in_backward)


def test_bytes_to_offload_need_the_policy():
    with pytest.raises(ValueError, match="give offload_policy=CPUOffloadPolicy"):
        flatshard.shard_model(_blocks(), offload_bytes=1)


def _used_in_other_ways(rank, world, way, layout):
    """Gradients that could stay on the device are used in another way than by reading ``.grad``."""
    found = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy(device_grad_bytes=1 << 30)):
        with pytest.MonkeyPatch.context() as patch:
            keep_apart(patch)
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(4, 4), offload_policy=policy, layout=layout)
        model.set_decoupled_gradients(way == "decoupled")
        losses = [model(torch.full((2, 4), rank + number)).square().sum() for number in (1.0, 2.0)]
        model.set_is_last_backward(way != "added to in flight")
        losses[0].backward()
        if way == "of two stages":
            flatshard.sum_shared_gradients(model.parameters(), init_device_mesh("cpu", (world,)))
        elif way == "added to by autograd":
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
        elif way == "added to in flight":
            model.set_is_last_backward(True)
            losses[1].backward()
        name = "decoupled_grad" if way == "decoupled" else "grad"
        found.append([getattr(parameter, name).to_local() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("way", ["decoupled", "of two stages", "added to by autograd", "added to in flight"])
def test_gradients_that_may_stay_on_the_device_can_be_used_in_other_ways(ranks, way):
    ranks(2, _used_in_other_ways, way, "flat" if way == "added to in flight" else "tensor")


def _kept_bytes(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        model = shard_net(make_net(depth=8), offload_policy=CPUOffloadPolicy(device_grad_bytes=2200))
    loss_of(model, next(batches(1, 4))).backward()
    kept = [group.gradients.main_grads.on_device for unit in unit_of(model).root.units for group in unit.groups]
    sizes = [reduced.buffer.local.nbytes for reduced in kept if reduced is not None]
    assert 0 < sum(sizes) <= 2200  # those of reduces that were in flight count, too


def test_no_more_gradients_stay_on_the_device_than_asked(ranks):
    ranks(2, _kept_bytes)
