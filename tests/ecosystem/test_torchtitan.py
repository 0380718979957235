"""torchtitan's models with its own code to shard them, unmodified, on flatshard by `install`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import flatshard
from benchmarks.titan import imported, loss_by_chunks, parallelized
from tests.ecosystem.launch import in_host_memory
from tests.fsdp2.test_offload import keep_apart

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.full, pytest.mark.limit(400)]
# model, tied embeddings, compiled blocks, a loss that calls the head chunk by chunk, weights in host memory, degrees of
# parallelism
CASES = {
    "dense": ("llama3", False, False, False, False, {}),
    "tied, chunked loss": ("llama3", True, False, True, False, {}),
    "compiled": ("llama3", False, True, False, False, {}),
    "experts": ("deepseek_v3", False, False, True, False, {}),
    "replicas": ("llama3", False, False, False, False, {"dp_replicate": 2}),
    "tensor parallel": ("llama3", False, False, False, False, {"tp": 2}),
    "host memory": ("llama3", False, False, False, True, {}),
}


def _train(rank, world, case, way):
    """Losses and norms of three steps."""
    name, tied, compiled, chunked, offload, more = CASES[case]
    offload = offload and way == "ours"  # FSDP2 pins memory, which takes a GPU
    imported(name)  # what is imported while flatshard is installed stays with it
    if way == "ours":
        flatshard.install()
    with contextlib.ExitStack() as stack:
        stack.callback(flatshard.uninstall)
        keep_apart(stack.enter_context(pytest.MonkeyPatch.context()))
        degrees = {"dp_shard": 2} | more
        model, config = parallelized(
            name, layers=2, tied=tied, compiled="aot_eager" if compiled else None, offload=offload, degrees=degrees
        )
        assert isinstance(model, flatshard.FSDPModule) == (way == "ours")
        if way == "ours":
            assert in_host_memory(model) == {offload}
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the control would have Gloo scale sums
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
            for title, parameter in model.named_parameters():
                rng = torch.Generator().manual_seed(len(title))
                whole = 0.02 * torch.randn(parameter.shape, generator=rng) + ("norm" in title)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        loss_of = loss_by_chunks(model, config) if chunked else None
        return _steps(model.train(), rank // degrees.get("tp", 1), loss_of)


def _steps(model, rank, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for number in range(3):
        rng = torch.Generator().manual_seed(10 * number + rank)
        tokens, labels = (torch.randint(0, 2048, (2, 16), generator=rng) for _ in range(2))
        output = model(tokens, torch.arange(16).expand(2, 16))
        if isinstance(output, DTensor):  # under tensor parallelism the vocabulary is cut
            output = output.full_tensor()
        if loss_of is not None:
            loss, _ = loss_of(output, labels, torch.tensor(64.0))
        else:
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / 64
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_gives_the_losses_of_fsdp2(ranks, case):
    more = CASES[case][-1]
    world = 2 * more.get("dp_replicate", 1) * more.get("tp", 1)
    ours, theirs = (ranks(world, _train, case, way) for way in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
