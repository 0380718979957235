"""Formats on a GPU: kernels have the bits of torch's operations there and on a CPU, and ranks train as on CPUs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from flatshard import fully_shard, fully_shard_optimizer
from flatshard.buffer import kernels
from flatshard.buffer.blocks import Coder
from flatshard.layout import Holding, encodable, plan, wire_of
from flatshard.rehearsal import rehearse
from tests.dist.models import batches, loss_of, make_net
from tests.formats.cases import policy, units_of

# Rows of less than a block, of whole blocks and of some more; a matrix of no multiple of anything; stacked matrices.
SHAPES = [(300, 1000), (7,), (64, 128), (129, 5), (5, 33, 70), (3, 4096), (1000,)]
SHARDS = 4


def values(seed: int, numel: int) -> torch.Tensor:
    """Numbers of any size, with zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-20, 20, (numel,), generator=generator)
    found[numel // 3 : numel // 2] = torch.randn(numel // 2 - numel // 3, generator=generator) * 1e-3
    found[: numel // 20] = 0.0
    found[numel // 20 : numel // 10] *= 1e-25  # some are no longer normal numbers
    for place, value in zip(range(numel // 4, numel, numel // 5), (math.nan, math.inf, -math.inf)):
        found[place] = value
    return found


def run(device: str, use: bool, layout: str, code: str, source: torch.dtype, noise: int | None, block: int, patch):
    """The bytes of four pieces, what comes of them in three dtypes, and the mean over three ranks."""
    patch.setattr(kernels, "usable", lambda tensor: use)
    marks = [len(shape) > 1 for shape in SHAPES]
    planned = plan(SHAPES, SHARDS, layout=layout, apart=marks)
    coder = Coder(wire_of(planned, encodable(planned, marks), block, 2), code, torch.bfloat16)
    held, results = Holding(0, SHARDS), []
    of_ranks = []
    for rank in range(3):
        full = values(rank, planned.buffer_numel(SHARDS)).to(source).to(device)
        runs = [
            full[start : start + SHARDS * segment.piece]
            for start, segment in zip(planned.run_starts(SHARDS), planned.segments)
            if segment.piece
        ]
        if rank == 1:  # each in memory of its own
            runs = [each.clone() for each in runs]
        out = torch.zeros(SHARDS * coder.wire.piece, dtype=torch.uint8, device=device)
        seed = None if noise is None else torch.tensor(noise + rank, device=device)
        coder.encode(runs, held, out, seed)
        of_ranks.append(out)
    given = torch.stack(of_ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for some, factor in ((given[:1], 1.0), (given, 1 / 3)):
            decoded = torch.zeros(planned.buffer_numel(SHARDS), dtype=dtype, device=device)
            coder.decode(some, held, decoded, factor)
            results.append(decoded.cpu())
    return given.cpu(), results


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, apart from which NaN it is."""
    both = one.isnan() & other.isnan()
    return torch.equal(one.masked_fill(both, 0), other.masked_fill(both, 0))


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize(("code", "noise"), [("int8", None), ("int8", 12345), ("float8", None)])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 128])
def test_kernels_have_the_bits_of_torchs_operations(layout, code, noise, source, block, monkeypatch):
    assert kernels.usable(torch.zeros(1, device="cuda")), "Triton is missing, or FLATSHARD_KERNELS=0"
    where = [("cpu", False), ("cuda", False), ("cuda", True)]
    found = [run(device, use, layout, code, source, noise, block, monkeypatch) for device, use in where]
    for (device, use), (given, results) in zip(where[1:], found[1:]):
        differ = (given != found[0][0]).sum().item()
        # Scales of NaN may be different ones of them: two bytes for each block that has one.
        assert differ <= 2 * 3 * 3, f"{differ} bytes are others on {device}{' with kernels' * use}"
        for ours, theirs in zip(results, found[0][1]):
            assert same(ours, theirs), f"{device}, kernels {use}, {ours.dtype}"


def test_a_group_is_decoded_by_one_kernel(tmp_path):
    with rehearse(4, "free"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).cuda()
        for layer in model:
            layer.requires_grad_(False)
        fully_shard(model, mp_policy=policy(param_dtype=torch.bfloat16, gather_format="int8"))
        x = torch.randn(4, 512, device="cuda")
        with torch.no_grad():
            for _ in range(2):
                model(x)
            with torch.profiler.profile() as profile:
                model(x)
                torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert sum("_decode" in name for name in names) == 1
    assert sum("_encode" in name for name in names) == 1


def _train(rank, world, device, sizes, formats, layout):
    net = make_net(depth=2).to(device)
    mesh = torch.distributed.init_device_mesh(device, sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
    for unit in units_of(net):
        fully_shard(unit, mesh=mesh, layout=layout, mp_policy=policy(**formats))
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for tokens in batches(3, 8):
        loss = loss_of(net, tokens.chunk(world)[rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("formats", [("int8", "int8"), ("float8", "bf16_fp32"), ("int8", ("int8", "int8"))])
def test_ranks_that_share_a_gpu_train_as_ranks_on_cpus(ranks, gpu_ranks, formats):
    choices = dict(zip(("gather_format", "reduce_format"), formats))
    sizes = (2, 2) if isinstance(formats[1], tuple) else (2,)
    world = math.prod(sizes)
    on_cpu = ranks(world, _train, "cpu", sizes, choices, "tensor")
    on_gpu = gpu_ranks(world, _train, "cuda", sizes, choices, "tensor")
    for cpu, gpu in zip(on_cpu, on_gpu):
        assert gpu == pytest.approx(cpu, rel=2e-3)
