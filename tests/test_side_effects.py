"""What flatshard changes in a process for everybody (docs/side-effects.md), and when. In interpreters of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.script import free_port

_ROOT = Path(__file__).parents[1]

# Prints what has changed after all modules were imported, and after a model was trained for a step.
_SCRIPT = """
import atexit, ctypes, importlib, json, os, pkgutil, signal, sys, threading
from multiprocessing import util

called = {}
for owner, name in ((atexit, "register"), (os, "register_at_fork"), (util, "Finalize")):
    def spy(*args, of=f"{owner.__name__}.{name}", real=getattr(owner, name), **kwargs):
        who = sys._getframe(1).f_globals["__name__"]
        if who.startswith("flatshard"):
            called[of] = who
        return real(*args, **kwargs)
    setattr(owner, name, spy)

import torch, torch.distributed as dist, torch.optim.optimizer as optim
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp, torch.nn.modules.module as modules, torch.utils.checkpoint as checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

library = ctypes.CDLL("libstdc++.so.6")
library["_ZSt13get_terminatev"].restype = ctypes.c_void_p
watched = {
    "torch.Tensor": torch.Tensor, "DTensor": DTensor, "nn.Module": nn.Module, "Optimizer": torch.optim.Optimizer,
    "ProcessGroup": dist.ProcessGroup, "distributed": dist, "c10d": c10d, "fsdp": torch.distributed.fsdp,
    "checkpoint": checkpoint, "modules": modules, "builtins": importlib.import_module("builtins"),
}

def state():
    found = dict(called)
    for title, owner in watched.items():
        known = vars(owner).items()
        found.update({f"{title}.{name}": id(value) for name, value in known if name in before[title]})
        if isinstance(owner, type):
            found.update({f"{title}.{name}": "new" for name, value in known if name not in before[title]})
    dispatcher = DTensor._op_dispatcher
    found.update({f"handler of {op}": id(handler) for op, handler in dispatcher._custom_op_handlers.items()})
    for name, table in vars(dispatcher.sharding_propagator).items():
        if isinstance(table, dict):
            found.update({f"{name} of {op}": id(rule) for op, rule in table.items()})
    hooks = [getattr(owner, name) for owner in (optim, modules) for name in vars(owner) if name.startswith("_global_")]
    tables = [table for table in hooks if isinstance(table, dict)]
    found.update({f"hook {getattr(hook, '__module__', hook)}": 1 for table in tables for hook in table.values()})
    found.update({f"signal {number.name}": str(signal.getsignal(number)) for number in signal.valid_signals()
                  if isinstance(number, signal.Signals)})
    found["wakeup fd"] = wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    found.update({f"thread {thread.name}": 1 for thread in threading.enumerate()})
    found["sys.excepthook"], found["threading.excepthook"] = id(sys.excepthook), id(threading.excepthook)
    found["std::terminate"] = library["_ZSt13get_terminatev"]()
    found.update({f"environ {name}": value for name, value in os.environ.items() if "INDUCTOR" not in name})
    return found

def changed(since):
    now = state()
    return sorted(key for key in now.keys() | since.keys() if now.get(key) != since.get(key))

before = {title: set(vars(owner)) for title, owner in watched.items()}
first = state()
import flatshard
for each in flatshard.__all__:
    getattr(flatshard, each)
for module in pkgutil.walk_packages(flatshard.__path__, "flatshard."):
    if module.name != "flatshard.__main__":
        importlib.import_module(module.name)
told = {"imported": changed(first)}
dist.init_process_group("gloo")
second = state()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.SGD(flatshard.fully_shard(model).parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
told["trained"] = changed(second)
dist.destroy_process_group()
print(json.dumps(told))
"""

_RULES = ["_foreach_norm", "_fused_adagrad_", "_fused_sgd_", "copy_", "index_put_", "linalg_vector_norm"]
_ALARM = [
    *("atexit.register", "multiprocessing.util.Finalize", "os.register_at_fork", "signal SIGUSR1", "std::terminate"),
    *("sys.excepthook", "thread flatshard-watch", "wakeup fd"),
]


def _changes(world: int, alarm: str) -> list[dict[str, list[str]]]:
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **place, "PYTHONPATH": str(_ROOT), "FLATSHARD_ALARM": alarm}
    call = [sys.executable, "-c", _SCRIPT]
    ranks = [
        subprocess.Popen(call, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        return [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("alarm", ["on", pytest.param("off", marks=pytest.mark.full)])
def test_imports_change_nothing_and_a_sharded_model_what_the_page_says(alarm):
    for told in _changes(2, alarm):
        assert told["imported"] == []
        rules = [name for name in told["trained"] if name.startswith("handler of aten.")]
        operations = sorted({name.split(".")[1] for name in rules})
        lists = [name for name in operations if name.startswith("_foreach_") and name.endswith("_")]  # in place
        assert {"_foreach_add_", "_foreach_copy_", "_foreach_lerp_"} <= set(lists)
        assert [name for name in operations if name not in lists] == _RULES
        rest = sorted(set(told["trained"]) - set(rules))
        assert rest == sorted(["DTensor.data", "hook flatshard.optim.step_hook", *(_ALARM if alarm == "on" else [])])
