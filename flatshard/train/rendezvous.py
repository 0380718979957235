"""Where ranks that torchrun has started find each other, the first time and every other time."""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.01  # seconds from one look to the next


def init_process_group(backend: str, patience: timedelta | None) -> None:
    """`init_process_group` for a rank of torchrun.

    torchrun starts ranks again with the store that it had, and in it are the addresses of ranks that are gone: those
    of the new ones that are early would call there (torch 2.4 and newer; pytorch issues 135712 and 167288).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=patience)
        return
    store, rank, world = next(rendezvous("env://", timeout=patience or default_pg_timeout))
    dist.init_process_group(
        backend, store=fresh_store(store, rank, world), rank=rank, world_size=world, timeout=patience
    )


def fresh_store(store: Store, rank: int, world: int) -> Store:
    """A part of the store that the ranks that call this now have to themselves. All of them call it.

    A count of restarts would not do, since every node has its own. Every rank says a word that nobody has said before.
    Rank 0 answers with the words that it finds and one for all, and again, until everyone has found his own in it.
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
