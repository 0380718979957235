"""A rank of a job over NCCL in which something goes wrong: ``fault.py WHAT``. Tests start some of them on one GPU."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.experimental import WirePolicy

STARTUP = 120  # seconds for ranks to meet
TIMEOUT = 20  # seconds, of the process groups
PAUSE = float(os.environ.get("PAUSE", "45"))  # seconds for which a rank is stopped, in a job that waits longer


class Net(nn.Module):
    """Blocks, one of which a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else x + block(x).relu()
        return x


def main(what: str) -> None:
    torch.cuda.set_device(0)
    limit = 10 * TIMEOUT if what in ("pause", "first ends", "finally") else TIMEOUT
    # Ranks of all jobs start at once: they may need longer to meet than a collective may take.
    store, rank, world = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=STARTUP)))
    store.set_timeout(datetime.timedelta(seconds=limit))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=limit))
    torch.manual_seed(0)
    model = Net().cuda()
    if what == "other model" and rank == 1:
        model.blocks[2] = nn.Linear(64, 64, bias=False).cuda()
    sharded = sys.modules["torch.distributed.fsdp"].fully_shard if what == "control" else flatshard.fully_shard
    schedule = {"schedule": WirePolicy(peers=True)} if what == "peers" else {}
    place = {"mesh": init_device_mesh("cuda", (2, world // 2))} if what == "replicas kill" else {}
    for block in model.blocks:
        sharded(block, **place)
    sharded(model, **place, **schedule)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, capturable=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = flatshard.capture(step) if "replay" in what else step
    for number in range(1, 13):
        if number == 10 and rank == 1:
            misbehave(what, model)
        loss = captured(torch.ones(4, 64, device="cuda"))
        if number % 3 == 0:
            loss.item()
    torch.cuda.synchronize()
    say("trained")
    if what in ("first ends", "control"):
        time.sleep(3 * rank)
    if what == "last ends":
        time.sleep(3 * (1 - rank))
    if what != "no destroy":
        dist.destroy_process_group()
    say("ended")


def misbehave(what: str, model: Net) -> None:
    say("misbehaves")
    if what in ("raise", "replay raise", "finally"):
        raise ValueError("there is no more data")
    if "kill" in what:
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("stop", "replay stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if what in ("skip", "check"):
        model.left_out = 2
    if what == "pause":  # by the test that has started it, which also lets it go on
        time.sleep(0.5)
    if what == "exit":
        sys.exit(0)


def say(what: str) -> None:
    print(f"{time.time():.1f} {what}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "finally":
        try:
            main(sys.argv[1])
        finally:
            dist.destroy_process_group()
    else:
        import torch.distributed.fsdp

        main(sys.argv[1])
