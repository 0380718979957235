"""Create the process group of a job, also after torchrun has restarted its ranks."""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.01  # seconds between two reads of the store


def init_process_group(backend: str, patience: timedelta | None) -> None:
    """`torch.distributed.init_process_group`, for ranks that torchrun may have restarted.

    torchrun restarts ranks with the same store. It still has the addresses of the previous ranks, and a rank that
    starts early would connect to them (torch 2.4 and newer; pytorch issues 135712 and 167288).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=patience)
        return
    store, rank, world = next(rendezvous("env://", timeout=patience or default_pg_timeout))
    dist.init_process_group(
        backend, store=fresh_store(store, rank, world), rank=rank, world_size=world, timeout=patience
    )


def fresh_store(store: Store, rank: int, world: int) -> Store:
    """A part of the store with a new prefix, which all ranks that call this agree on. All ranks must call it.

    A count of restarts cannot be the prefix, because each node has its own count. Every rank writes a unique word.
    Rank 0 publishes the words that it has read, together with the prefix, until every rank has found its own word.
    """
    word = uuid.uuid4().hex
    others = range(1, world)
    if rank != 0:
        store.set(f"flatshard/word/{rank}", word)
        while True:
            common, heard = json.loads(store.get("flatshard/answer"))
            if heard[rank - 1] == word:
                break
            time.sleep(_PAUSE)
        store.set(f"flatshard/{common}/{rank}", "")
    else:
        common = word
        while others:
            heard = [each.decode() for each in store.multi_get([f"flatshard/word/{other}" for other in others])]
            store.set("flatshard/answer", json.dumps([common, heard]))
            if store.check([f"flatshard/{common}/{other}" for other in others]):
                break
            time.sleep(_PAUSE)
    return PrefixStore(f"flatshard/{common}", store)
