"""The engine on a GPU: overlap and streams as one rank of eight, losses and memory on two real ranks."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.engine.units.unit import unit_of
from flatshard.rehearsal import Link, Network, rehearse
from tests.dist.models import make_net, train
from tests.dist.test_engine import ROWS, STEPS, shard_net

WIDTH, DEPTH, TOKENS = 4096, 6, 8192
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


def step(model: nn.Module, data: torch.Tensor) -> None:
    model(data).backward(torch.ones_like(data))
    model.zero_grad()


def kernels_of_a_step(path) -> list[dict]:
    """The kernels of one steady-state step under a network on which a gather takes about half a layer's forward."""
    network = Network(Link(200e9, 5e-6), Link(200e9, 5e-6), ranks_per_node=8, name="test")
    with rehearse(8, network):
        model = build()
        data = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4):
            step(model, data)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            torch.cuda._sleep(60_000_000)  # lets the host run ahead, as it does in the middle of training
            step(model, data)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(path))
        del model
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return sorted(kernels, key=lambda event: event["ts"])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return kernels_of_a_step(tmp_path_factory.mktemp("trace") / "step.json")


def is_collective(kernel) -> bool:
    return kernel["name"].startswith("rehearse")


def is_product(kernel) -> bool:
    return any(word in kernel["name"].lower() for word in ("gemm", "nvjet", "cutlass", "xmma"))


def overlaps(kernel, others) -> bool:
    begin, end = kernel["ts"], kernel["ts"] + kernel["dur"]
    return any(other["ts"] < end and begin < other["ts"] + other["dur"] for other in others)


def split(kernels):
    """Collectives by stream: the gathers' starts first."""
    products = [kernel for kernel in kernels if is_product(kernel)]
    by_stream: dict[int, list[dict]] = {}
    for kernel in kernels:
        if is_collective(kernel):
            by_stream.setdefault(kernel["args"]["stream"], []).append(kernel)
    gathers, reduces = sorted(by_stream.values(), key=lambda group: group[0]["ts"])
    return gathers, reduces, products


def test_gathers_and_reduces_overlap_compute(kernels):
    gathers, reduces, products = split(kernels)
    assert len(gathers) == 2 * DEPTH  # every layer in forward and again in backward
    assert len(reduces) == DEPTH
    hidden_gathers = [overlaps(kernel, products) for kernel in gathers]
    hidden_reduces = [overlaps(kernel, products) for kernel in reduces]
    assert all(hidden_gathers[1:DEPTH])  # forward: all but the first
    assert all(hidden_gathers[DEPTH + 1 :])
    assert all(hidden_reduces[:-1])  # backward: all but the last


def test_gather_reduce_and_compute_run_on_different_streams(kernels):
    gathers, reduces, products = split(kernels)
    streams = [{kernel["args"]["stream"] for kernel in group} for group in (gathers, reduces, products)]
    assert all(len(stream) == 1 for stream in streams)
    assert len(set.union(*streams)) == 3


def test_no_copy_kernel_stands_between_a_gather_and_its_use(kernels):
    _, _, products = split(kernels)
    compute = products[0]["args"]["stream"]
    names = [kernel["name"] for kernel in kernels if kernel["args"]["stream"] == compute]
    assert not [name for name in names if "copy" in name.lower() or "cat" in name.lower()]


def test_deleting_a_model_frees_its_memory():
    network = Network(Link(1e12, 1e-6), Link(1e12, 1e-6), ranks_per_node=8, name="test")
    rests = []
    for _ in range(2):  # the first product of a process takes memory for cuBLAS, which stays
        with rehearse(8, network):
            model = build()
            data = torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                step(model, data)
            torch.cuda.synchronize()
            trained = torch.cuda.memory_allocated()
            del model, data
            torch.cuda.synchronize()
            rests.append(torch.cuda.memory_allocated())
    assert trained - rests[1] > 2**20
    assert rests[1] - rests[0] < 2**20


def _losses(rank, world, device):
    model = shard_net(make_net(), mesh=torch.distributed.init_device_mesh(device, (world,)))
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), STEPS, ROWS, rank, world, device=device)


def test_losses_on_two_gpu_ranks_are_those_of_the_cpu(ranks):
    on_cpu, on_gpu = ranks(2, _losses, "cpu"), ranks(2, _losses, "cuda")
    for cpu, gpu in zip(on_cpu, on_gpu):
        assert gpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("widths", [(8, 8, 8, 8), (8, 16, 512, 16), (1024, 1024, 1030, 1024)])
def test_slots_are_used_again(widths):
    """Units of any size, far below what the driver gives memory in too: after the second step nothing new is taken."""
    with rehearse(8, "h100-nvlink"):
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], 8]))).cuda()
        for layer in model:
            fully_shard(layer, mp_policy=BF16)
        fully_shard(model, mp_policy=BF16)
        data = torch.randn(4, widths[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        known = []
        for _ in range(4):
            model(data).sum().backward()
            model.zero_grad()
            pools = unit_of(model).root.gather_pool, unit_of(model).root.reduce_pool
            known.append((*(pool.num_slots for pool in pools), torch.cuda.memory_reserved()))
        assert known[1] == known[2] == known[3], known
        assert known[-1][0] <= 4  # two at a time, of at most two sizes that cannot share
