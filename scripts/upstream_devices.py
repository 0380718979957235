"""What tests for machines with several GPUs see on a machine with one, or with none.

With CUDA, there are as many devices as is said, and every use of one of them is of device 0. NCCL refuses two ranks of
one host on a device: each rank has a host name of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


def apply(device: str, backend: str, count: int) -> None:
    """Change what torch says of devices in this process and its forks. Before torch.testing is imported."""
    sys.modules["numba"] = None  # torch.testing asks it for GPUs, which starts CUDA in the process that forks ranks
    known = _asked_of_device() if device == "cuda" else None  # as it is: torch looks at all devices when CUDA starts
    torch.cuda.device_count = lambda: count
    torch.accelerator.device_count = lambda: count
    _carry(backend)
    if known is not None:
        _one_cuda_device(known)
    else:
        _no_device(count)
    _fork_ranks()


def be_rank(rank: int, world: int | None = None) -> None:
    """Make this process a rank: `world` for one that torchrun would have started."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    if world is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        utilities = sys.modules.get("tests.unit_tests.test_utilities")  # it has read them when it was imported
        if utilities is not None:
            utilities.Utils.rank, utilities.Utils.world_size = rank, world


def write_checkpoints_to(folder: Path) -> None:
    """Let tests that run side by side write to folders of their own."""
    module = sys.modules.get("tests.unit_tests.distributed.mfsdp_v1.test_mfsdp_fully_shard")
    if module is not None:
        module.SHARED_TMP_DIR = str(folder)


def leave_out_transformer_engine() -> None:
    """Let test files that import Transformer Engine at their head be imported where it is missing.

    Megatron-Core looks for it first, and does without. Tests that use more of it than `FusedAdam` raise ImportError.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    for name in ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "megatron.core.optimizer"):
        importlib.import_module(name)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = _Missing(name)
    sys.modules["transformer_engine"].__version__ = "0.0.0"
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = torch.optim.AdamW


class _Missing(types.ModuleType):
    """A module that is not here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name} needs Transformer Engine")


def map_devices_of(root: Path, plugins: Iterable[Any]) -> None:
    """Let test modules that make a device of a rank's number have device 0; ``plugins``: their conftests."""
    if not torch.cuda.is_available():
        return
    for module in [*sys.modules.values(), *plugins]:
        file = getattr(module, "__file__", None)
        if not file or not Path(file).is_relative_to(root) or vars(module).get("torch") is not torch:
            continue
        if re.search(r"torch\.device\([^()]*rank", Path(file).read_text()):
            module.torch = _Torch("torch")


class _Torch(types.ModuleType):
    """torch, with another `device`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _IsDevice(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.device)


class _Device(metaclass=_IsDevice):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _first(torch.device(*args, **kwargs))


_Torch.device = _Device


def _first(device: Any) -> Any:
    """Device 0 for any CUDA device; other things as they are."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return 0
    if isinstance(device, str) and device.startswith("cuda:"):
        return "cuda:0"
    if isinstance(device, torch.device) and device.type == "cuda" and device.index:
        return torch.device("cuda", 0)
    return device


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with device 0 for every device among its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_first, args), **{name: _first(value) for name, value in kwargs.items()})

    return call


def _one_cuda_device(known: types.SimpleNamespace) -> None:
    home = os.getpid()

    def in_forks(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if os.getpid() == home:
                raise RuntimeError("CUDA would start in the process that forks ranks")
            return function(*args)

        return call

    def here(name: str, answer: Any) -> None:
        """Let this process have an answer for which CUDA would start; tests ask when they are imported."""
        function = getattr(torch.cuda, name)
        call = functools.wraps(function)(lambda *args: answer if os.getpid() == home else function(*map(_first, args)))
        setattr(torch.cuda, name, call)

    torch.cuda._lazy_init = in_forks(torch.cuda._lazy_init)
    torch._C._cuda_getDeviceCount = in_forks(torch._C._cuda_getDeviceCount)
    torch.cuda.is_available = lambda: True
    here("current_device", 0)
    here("get_device_properties", known)
    here("get_device_capability", (known.major, known.minor))
    here("get_device_name", known.name)
    for name in ("set_device", "synchronize", "current_stream"):
        setattr(torch.cuda, name, _mapped(getattr(torch.cuda, name)))
    for name in ("memory_allocated", "max_memory_allocated", "memory_stats", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, _mapped(getattr(torch.cuda, name)))
    torch.cuda.get_rng_state = _with_first_device(torch.cuda.get_rng_state, 0)
    torch.cuda.set_rng_state = _with_first_device(torch.cuda.set_rng_state, 1)
    for name in ("set_device_index", "set_device_idx", "synchronize", "current_stream"):
        setattr(torch.accelerator, name, _mapped(getattr(torch.accelerator, name)))
    _map_method(torch.cuda.device, "__init__")
    _map_method(torch.Tensor, "cuda")
    _map_method(torch.nn.Module, "cuda")
    # Ranks that share a device have no multicast; to look for it would start CUDA.
    torch._C._distributed_c10d._SymmetricMemory.has_multicast_support = lambda *args: False
    _order_threads()
    _give_all([0])


def _order_threads() -> None:
    """Let collectives of ranks that are threads wait for all streams: torch's read what other ranks may still write."""
    from torch.testing._internal.distributed.multi_threaded_pg import Collective

    join = Collective.join

    def ordered(self: Any, rank: int, data: Any) -> Any:
        torch.cuda.synchronize()
        found = join(self, rank, data)
        torch.cuda.synchronize()
        return found

    Collective.join = ordered


def _with_first_device(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:position], *map(_first, args[position:]))
        return function(*args, **{name: _first(value) if name == "device" else value for name, value in kwargs.items()})

    return call


def _map_method(owner: type, name: str) -> None:
    setattr(owner, name, _with_first_device(getattr(owner, name), 1))


def _asked_of_device() -> types.SimpleNamespace:
    """The properties of device 0, asked in a fork, where CUDA may start."""
    here, there = _FORK.Pipe(duplex=False)

    def ask() -> None:
        found = torch.cuda.get_device_properties(0)
        names = [name for name in dir(found) if not name.startswith("_")]
        there.send({name: value for name in names if isinstance(value := getattr(found, name), (int, float, str))})

    process = _FORK.Process(target=ask)
    process.start()
    there.close()
    try:
        return types.SimpleNamespace(**here.recv())
    except EOFError:
        raise SystemExit("device 0 could not be asked for its properties") from None
    finally:
        process.join()


def _no_device(count: int) -> None:
    """CPU ranks, with what tests ask of torch.cpu."""
    torch.cuda.is_available = lambda: False  # looking for a driver would spoil forks
    torch.cuda.can_device_access_peer = lambda *args: False
    torch.cpu.device_count = lambda: count
    torch.cpu.manual_seed = torch.manual_seed
    for module, name in ((torch.cpu, "empty_cache"), (torch.cuda, "synchronize"), (torch.cuda, "set_device")):
        setattr(module, name, lambda *args: None)  # each its own: Dynamo tells functions of torch apart
    import torch.testing._internal.common_distributed as common

    common.skip_if_lt_x_gpu = lambda x, *, allow_cpu=False: lambda test: test
    import torch.testing._internal.common_fsdp as fsdp

    fsdp.DEVICE_COUNT = count
    _give_all(None)


def _give_all(devices: list[int] | None) -> None:
    """Let what takes a list of devices have this one."""
    from torch.nn.parallel import DistributedDataParallel

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device_ids") is not None:
                kwargs["device_ids"] = devices
            if kwargs.get("output_device") is not None:
                kwargs["output_device"] = devices and devices[0]
            return function(*args, **kwargs)

        return call

    DistributedDataParallel.__init__ = changed(DistributedDataParallel.__init__)
    dist.barrier = dist.distributed_c10d.barrier = changed(dist.barrier)


def _carry(backend: str) -> None:
    """Make process groups of the default device's backend with this one."""
    start = dist.init_process_group

    @functools.wraps(start)
    def init(chosen: Any = None, *args: Any, **kwargs: Any) -> None:
        chosen = kwargs.pop("backend", chosen)
        if isinstance(chosen, str) and backend != "nccl":
            chosen = chosen.replace("nccl", backend)
        kwargs["device_id"] = _first(kwargs.get("device_id")) if backend == "nccl" else None
        start(chosen, *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init


def _fork_ranks() -> None:
    """Let torch's test cases fork their ranks, each with a host name of its own."""
    import torch.testing._internal.common_distributed as common

    def process(target: Callable[..., Any], args: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            if args and isinstance(args[0], int):
                be_rank(args[0])
            target(*args, **kwargs)

        return _FORK.Process(target=run, args=args, **kwargs)

    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)
    torch.multiprocessing.set_start_method("fork", force=True)
    torch.multiprocessing.Process = process
