"""What a job of thousands of ranks costs before and beside its steps, simulated on one machine.

    python -m benchmarks.scale store        # a TCPStore with W clients: seconds to connect, requests per second
    python -m benchmarks.scale gloo         # a Gloo group of W ranks: seconds, connections, requests to the store
    python -m benchmarks.scale alarm        # W ranks of the alarm's tree: start, one error, a question, the end
    python -m benchmarks.scale blame        # flight records of W ranks, and what `flatshard blame` takes to read them
    python -m benchmarks.scale checkpoint   # planning and manifest of a checkpoint of W ranks, beside DCP's planner
    python -m benchmarks.scale plan         # layout, padding and `flatshard plan` of 405B and of a 1T mixture
    python -m benchmarks.scale latency      # one collective and one step on 8 to 16,384 ranks, by algorithm
    python -m benchmarks.scale stragglers   # what a step loses if ranks are slower than others

Every sub-command takes ``--worlds`` and ``--json FILE``.  All ranks of a simulation share the processors of one
machine: seconds are of all of them together unless a column says "per rank".  Counts and bytes are exact.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import selectors
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flatshard.trust.watch as watch_module
from flatshard.trust.blame import blame as verdict_of
from flatshard.trust.blame import read_records
from flatshard.trust.record import CAPACITY, FlightRecord
from flatshard.trust.verdict import Verdict
from flatshard.trust.watch import Watch, Watched

Row = dict[str, Any]


@contextmanager
def seconds(row: Row, name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    row[name] = time.perf_counter() - begin


def open_files(count: int) -> None:
    """Raise the limit of open files to what this process is allowed; ValueError if that is not enough."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if count > most:
        raise ValueError(f"{count} open files are needed; this process may have {most}")


# Start


class CountingStore:
    """A store that counts the requests and the bytes of one rank."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests, self.bytes = 0, 0

    def _count(self, *texts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        self._count(key, found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        found: bool = self._store.check(keys)
        return found


class LightClient:
    """A connection to a TCPStore that speaks just enough of its protocol to ask whether a key is there.

    A client of torch's own has the same traffic on the wire; thousands of them in one process take much longer to make.
    """

    _HELLO, _CHECK = struct.pack("<BI", 0, 0x3C85F7CE), 5

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(self._HELLO)

    def ask(self, key: str) -> None:
        self._socket.sendall(struct.pack("<BQQ", self._CHECK, 1, len(key)) + key.encode())

    def is_there(self) -> bool:
        """The answer to the question before."""
        answer = self._socket.recv(1)
        if answer not in (b"\0", b"\1"):
            raise RuntimeError(f"this TCPStore answers {answer!r}: its protocol is another one")
        return answer == b"\0"


def store(world: int) -> Row:
    """Every rank connects to one TCPStore, and all look at a key at once; several times."""
    open_files(2 * world + 200)
    row: Row = {"world": world}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("there", "")
    with seconds(row, "connect_s"):
        clients = [LightClient(server.port) for _ in range(world)]
        clients[-1].ask("/there")
        assert clients[-1].is_there()
    rounds = []
    for _ in range(9):
        begin = time.perf_counter()
        for client in clients:
            client.ask("/raised")
        assert not any(client.is_there() for client in clients)
        rounds.append(time.perf_counter() - begin)
    row["all_look_s"] = statistics.median(rounds)
    row["looks_per_s"] = world / row["all_look_s"]
    return row


def gloo(world: int) -> Row:
    """Every rank makes a Gloo group, in a thread of its own, as `Exchange` does for messages beside training."""
    row: Row = {"world": world}
    for lazy in (False, True):
        name = "lazy" if lazy else "full"
        open_files(2 * world * world + 200 if not lazy else 8 * world + 200)
        base = dist.HashStore()
        before = len(os.listdir("/proc/self/fd"))
        groups: list[Any] = [None] * world

        def make(rank: int, lazy: bool = lazy, base: Any = base, name: str = name, groups: list[Any] = groups) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)]
            options._threads = 1
            groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore(name, base), rank, world, options)
            value = torch.ones(1)
            groups[rank].allgather([[torch.zeros(1) for _ in range(world)]], [value]).wait()

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
        with seconds(row, f"{name}_s"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        row[f"{name}_files_per_rank"] = (len(os.listdir("/proc/self/fd")) - before) / world
        row[f"{name}_keys"] = base.num_keys()
        groups.clear()
    return row


class Turns:
    """In the place of the loop's thread: what a rank has to do, it does at once."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def do(self, action: Callable[[], None], wait: float = 0.0) -> None:
        action()


class Ranks:
    """Ranks that watch over each other, in one thread; each has its own connections, over loopback sockets."""

    def __init__(self, world: int) -> None:
        open_files(3 * world + 200)
        os.environ.pop("MASTER_ADDR", None)
        self.turns, self.heard = Turns(), Counter[int]()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores = [CountingStore(server) for _ in range(world)]
        self.watches = [self._watch(rank, world) for rank in range(world)]

    def _watch(self, rank: int, world: int) -> Any:
        group = Watched(lambda name: self.stores[rank], None, rank, world)
        watch = Watch(group, "simulated", self.turns, Verdict())  # type: ignore[arg-type]
        hear = watch._hear

        def counted(message: dict[str, Any]) -> None:
            self.heard[rank] += 1
            hear(message)

        watch._hear = counted  # type: ignore[method-assign]
        return watch

    def run(self, wait: float = 0.05) -> None:
        """Until nobody has anything to say."""
        selector = self.turns.selector
        while ready := selector.select(0.0) or (wait and selector.select(wait)):
            for key, _ in ready:
                key.data()

    def most_heard(self) -> int:
        """Messages of the rank that has heard most, since this was asked the last time."""
        found = max(self.heard.values(), default=0)
        self.heard.clear()
        return found


def alarm(world: int) -> Row:
    """The watch of a job: its start, one error, a question that all ranks ask at once, and the end of all."""
    row: Row = {"world": world}
    watch_module.GRACE = math.inf  # ranks that take turns on one processor take longer than those that have one each
    ranks = Ranks(world)
    with seconds(row, "start_s"):
        for watch in ranks.watches:
            watch.open()
        while not all([watch._find_others() for watch in ranks.watches]):
            ranks.run(0.0)
    row["store_requests_per_rank"] = max(store.requests for store in ranks.stores)
    row["store_requests"] = sum(store.requests for store in ranks.stores)
    row["store_bytes"] = sum(store.bytes for store in ranks.stores)
    row["connections_per_rank"] = max(len(watch._links._links) for watch in ranks.watches)
    with seconds(row, "error_s"):
        ranks.watches[world // 2].tell("ValueError: no data")
        ranks.run()
    assert all(watch.verdict.reason for watch in ranks.watches if watch.group.rank != world // 2)
    row["error_messages_per_rank"] = ranks.most_heard()
    with seconds(row, "question_s"):
        for watch in ranks.watches:
            if watch._survey.begin():
                watch._answer({"ask": watch.group.rank})
        ranks.run()
    assert all(watch._survey.is_complete() for watch in ranks.watches)
    row["question_messages_per_rank"] = ranks.most_heard()
    row["question_s_per_rank"] = row["question_s"] / world
    with seconds(row, "end_s"):
        for watch in reversed(ranks.watches):
            watch.close()
            ranks.run(0.0)
    row["end_messages_per_rank"] = ranks.most_heard()
    return row


# Failure


def blame(world: int) -> Row:
    """Records of which each holds as many launches as fit; one rank has stopped before the others."""
    row: Row = {"world": world}
    with tempfile.TemporaryDirectory() as folder:
        with seconds(row, "write_s"):
            for rank in range(world):
                record = FlightRecord()
                record.keep_in(Path(folder), rank, world=world, pid=rank, host=f"node-{rank // 8}", looked=1.0)
                gather, reduce = record.group(f"gather 0-{world - 1}"), record.group(f"reduce 0-{world - 1}")
                for number in range(CAPACITY - (rank == world // 3)):
                    group = gather if number % 3 else reduce
                    record.append(group, 0 if number % 3 else 1, f"model.layers.{number % 126}", 1 << 28, _ENDED)
                record._path = None  # it is left there
        row["bytes_per_rank"] = (Path(folder) / "rank-0.ring").stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with seconds(row, "read_s"):
            records = read_records(Path(folder))
        with seconds(row, "blame_s"):
            said = verdict_of(records)
        row["memory_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert f"rank {world // 3} launched nothing more" in said, said
    row["said"] = len(said)
    return row


class _Ended:
    is_on_device = False

    def has_ended(self) -> bool:
        return True


_ENDED = _Ended()


COMMANDS: dict[str, tuple[Callable[..., Row], tuple[int, ...]]] = {
    "store": (store, (64, 256, 1024, 4096)),
    "gloo": (gloo, (8, 16, 32, 64)),
    "alarm": (alarm, (64, 256, 1024)),
    "blame": (blame, (64, 512, 4096)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run, worlds = COMMANDS[options.command]
    rows = []
    for world in options.worlds or worlds:
        rows.append(run(world))
        print(
            "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[options.command] = rows
        options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
