"""A happens-before checker: CPU tensors, under which lanes and pools believe in streams.

Within `watching`, every lane has a stream, every pool takes memory from an allocator that works as CUDA's does, and
every operator and collective is an access of the current stream to the memory of its tensors. The work itself is done
at once, so values are right whatever the order; what is checked is whether an order was asked for. Two accesses to the
same bytes, one of them a write, of streams that no event orders are a race, whether or not it would show.

Allocating counts as a write: another stream that uses new memory must be ordered after its allocation, since what the
owning stream did before may be going on in it. Giving memory back and allocating again is checked by `Arena`.

Process groups are those of `flatshard.rehearsal`: one rank of W in this process. What is not seen: work that the host
does with memory of its own (offloading), and what operators allocate for themselves, which stays on their stream.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import _torch
from flatshard.buffer import lanes, pools
from flatshard.rehearsal.backend import RehearsalGroup
from flatshard.rehearsal.clock_cpu import CpuWork
from tests.races.order import ROOT, Access, Arena, Block, Place, Race, Stream, line_of

_DEPTH = 6  # lines of source that an access is shown with
_SHOWN = 5  # races in a report


class Event:
    """A point of a stream that others can wait for."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.clock: dict[Stream, int] = {}
        self.stream: Stream | None = None  # that has recorded it

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.checker.current
        self.clock = dict(self.stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.checker.current).join(self.clock)

    def synchronize(self) -> None:
        """The host waits: whatever it starts from now on comes after."""
        for stream in self.checker.streams:
            stream.join(self.clock)

    def query(self) -> bool:
        return True


class Checker:
    """What streams have done so far, and the races among it."""

    def __init__(self) -> None:
        self.compute = self.current = Stream("compute")
        self.streams = [self.compute]
        self.accesses = 0
        self._races: dict[tuple[object, ...], Race] = {}
        self.arena = self._heap = Arena()  # where memory comes from now, and usually
        self.user: Stream | None = None  # who is to use what storages get, if not the current stream
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}  # by the address of the storage
        self.lanes: weakref.WeakSet[lanes.Lane] = weakref.WeakSet()

    def new_arena(self) -> Arena:
        """A memory pool. What may be going on in its memory has to be over when it is given back to the device.

        The device waits for the stream that owns the memory, and for no other, if segments are expandable.
        """
        arena = Arena()
        weakref.finalize(arena, self._unmap, arena.returned).atexit = False
        return arena

    @property
    def races(self) -> list[Race]:
        return list(self._races.values())

    def report(self) -> str:
        """The first races, to be read, and how many there are."""
        return "\n\n".join([f"{len(self._races)} race(s)", *map(str, self.races[:_SHOWN])])

    # Streams

    def stream(self, name: str) -> Stream:
        self.streams.append(Stream(name))
        return self.streams[-1]

    def event(self) -> Event:
        return Event(self)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Within, operations are those of another stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # Accesses

    def access(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """The current stream reads and writes the memory of these tensors."""
        stream, here = self.current, place()
        time = stream.next()
        self.accesses += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            if tensors:
                access = Access(stream, time, what, here, is_write)
                for tensor in tensors:
                    self._touch(tensor, access)

    def allocated(self, what: str, storage: torch.UntypedStorage, user: Stream | None = None) -> Block:
        """The current stream has been given memory, or ``user`` memory of the current stream."""
        user = user or self.current
        made = Access(user, user.next(), what, place(), True)
        for earlier, returned in self.arena.hand_out(self.current, user):
            memory = f"memory that stream '{user.name}' is given again"
            self._add("reuse of memory in use", earlier, made, memory, returned)
        return self._know(storage, Block(storage.nbytes(), self.arena, self.current, made))

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The memory of a tensor, if it has been seen."""
        known = self._blocks.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage has got or lost its memory."""
        if storage.nbytes() == before:
            return
        known = self._blocks.pop(storage._cdata, None)
        if known is not None:
            self._give_back(known[1])
        if storage.nbytes():
            self.allocated("taking storage", storage, self.user)

    def _touch(self, tensor: torch.Tensor, access: Access) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes() or not tensor.numel():
            return
        known = self._blocks.get(storage._cdata)
        # What was made before the watch, or inside of torch, is taken for an ordinary tensor of the compute stream.
        block = self._know(storage, Block(storage.nbytes(), self._heap, self.compute, None)) if not known else known[1]
        start, stop = _bytes_of(tensor)
        for earlier in block.touch(start, stop, access):
            memory = f"bytes {start} to {stop} of {block.size}, allocated by {_origin(block)}"
            self._add(_kind(earlier, access), earlier, access, memory)

    def _know(self, storage: torch.UntypedStorage, block: Block) -> Block:
        key = storage._cdata

        def gone(_: object) -> None:
            known = self._blocks.get(key)
            if known is not None and known[1] is block:
                del self._blocks[key]
                self._give_back(block)

        self._blocks[key] = weakref.ref(storage, gone), block
        return block

    def _give_back(self, block: Block) -> None:
        block.arena.take_back(block.owner, block.last(), place())
        if block.is_temporary:
            stream = self.current
            for earlier in block.pending(stream):
                dropped = Access(stream, stream.next(), "dropping the last reference", place(), True)
                memory = f"a temporary tensor of {block.size} bytes"
                self._add("drop of a temporary in use", earlier, dropped, memory)

    def _unmap(self, returned: dict[Stream, list[tuple[Access, Place]]]) -> None:
        for owner, accesses in returned.items():
            unmapped = Access(owner, owner.next(), "giving it back to the device", place(), True)
            for earlier, where in accesses:
                if not earlier.is_before(owner):
                    self._add("unmapping of memory in use", earlier, unmapped, "memory of a pool that is gone", where)

    def _add(self, kind: str, first: Access, second: Access, memory: str, returned: Place | None = None) -> None:
        """Note a race; what two lines do, or what was given back by one line, races once."""
        key = kind, first.stream, returned or (first.what, first.place), second.stream, second.what, second.place
        self._races.setdefault(key, Race(kind, first, second, memory, returned))


def place() -> Place:
    """The lines of this repository that are being executed, the innermost first."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if _is_shown(code.co_filename):
            found.append((code, frame.f_lineno))
            if code.co_name.startswith("test_"):
                break
        frame = frame.f_back
    return tuple(found)


@functools.cache
def _is_shown(file: str) -> bool:
    """Whether reports tell the lines of a file, and not what only stands in between."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or ".venv" in path.parts or path.parent == ROOT / "flatshard" / "rehearsal":
        return False
    return path.parent != Path(__file__).parent or path.name.startswith("test_")


def _kind(first: Access, second: Access) -> str:
    return f"{'write' if second.writes else 'read'} after {'write' if first.writes else 'read'}"


def _origin(block: Block) -> str:
    if block.made is None:
        return f"stream '{block.owner.name}', unseen"
    return f"stream '{block.owner.name}' at {line_of(block.made.place)}"


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins and ends. What lies between the elements of a strided one counts as its."""
    start, size = tensor.storage_offset(), tensor.element_size()
    if tensor.is_contiguous():
        return start * size, (start + tensor.numel()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    return start * size, (start + last + 1) * size


# Operators


class _Operator:
    """Which arguments of an operator are read and written: what its schema says."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        short = schema.name.partition("::")[2]
        returns = [r.alias_info for r in schema.returns if r.alias_info is not None]
        # Collectives are seen where they are launched.
        self.is_seen = not schema.name.startswith(("_c10d_functional::", "c10d::"))
        self.is_view = any(not info.is_write for info in returns) or torch.Tag.inplace_view in func.tags
        self.allocates = short.startswith(("empty", "new_empty"))
        self.reads_values = not (self.allocates or short.startswith("new_") or short.endswith("_like"))
        self._arguments = [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments]

    def operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that are read, and those that are written."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for number, (name, is_write) in enumerate(self._arguments):
            value = args[number] if number < len(args) else kwargs.get(name)
            if is_write or self.reads_values:
                _collect(value, writes if is_write else reads)
        return reads, writes


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, into)


class _Watch(TorchDispatchMode):
    """Every operator is an access of the current stream."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker
        self._operators: dict[Any, _Operator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor asks for shapes
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a class that computes with other tensors: those are seen
        if func is torch.ops.aten.lift_fresh.default and self._checker.block(args[0]) is None:
            self._checker.allocated("torch.tensor", args[0].untyped_storage())  # on the current stream, out of sight
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)
        result = func(*args, **kwargs)
        if operator.is_seen and not operator.is_view:
            self._note(operator, args, kwargs, result)
        return result

    def _note(self, operator: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        checker = self._checker
        reads, writes = operator.operands(args, kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        results: list[torch.Tensor] = []
        _collect(result, results)
        made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]
        if results and not made and not writes:
            return  # a view, or the tensor itself
        for tensor in made:
            if tensor.untyped_storage().nbytes() and checker.block(tensor) is None:
                checker.allocated(operator.name, tensor.untyped_storage())
        if not operator.allocates:
            checker.access(operator.name, reads, [*writes, *made])


# What stands in for torch, the lanes and the pools


class _AllocatingFrom:
    """Within, memory comes from an arena. Can be entered again and again."""

    def __init__(self, checker: Checker, arena: Arena) -> None:
        self._checker = checker
        self._arena = arena
        self._outer: list[Arena] = []

    def __enter__(self) -> None:
        self._outer.append(self._checker.arena)
        self._checker.arena = self._arena

    def __exit__(self, *error: object) -> None:
        self._checker.arena = self._outer.pop()


@contextmanager
def watching() -> Iterator[Checker]:
    """Within, lanes and pools that are made have streams, and a `Checker` follows what is done on them.

    Models must be built and sharded within, too, and not be used after it.
    """
    checker = Checker()
    with ExitStack() as stack:
        for target, name, new in (
            (_torch, "Event", checker.event),
            (_torch, "current_stream", lambda index: checker.current),
            (_torch, "set_stream", checker.set_stream),
            (_torch, "memory", lambda device, groups=(): _AllocatingFrom(checker, checker.new_arena())),
            (torch.Tensor, "tolist", _noting_lists(checker)),
            (torch.UntypedStorage, "resize_", _noting_sizes(checker)),
            (lanes.Lane, "__init__", _having_a_stream(checker)),
            (pools, "_Slot", _slot_with_memory(checker)),
            (pools.Pool, "temporary", _noting_temporaries(checker)),
            (pools.Pool, "allocate", _noting_users(checker)),
            (RehearsalGroup, "_launch", _noting_collectives(checker)),
            (CpuWork, "wait", _joining_the_group()),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(_Watch(checker))
        try:
            yield checker
        finally:
            for lane in checker.lanes:  # what is left of models is not watched when it goes
                lane.stream, lane.inside = None, lanes._Inside(None)


def _noting_lists(checker: Checker) -> Callable[..., Any]:
    """Of a CPU tensor no operator makes a list."""
    tolist = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> Any:
        checker.access("tolist", [self], [])
        return tolist(self)

    return noted


def _noting_sizes(checker: Checker) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = resize(self, size)
        checker.resized(self, before)
        return result

    return resize_


def _having_a_stream(checker: Checker) -> Callable[..., None]:
    init = lanes.Lane.__init__

    def __init__(self: lanes.Lane, name: str, device: torch.device, **kwargs: Any) -> None:
        init(self, name, device, **kwargs)
        self.stream = stream = checker.stream(name)
        self.inside = lanes._Inside(stream)
        checker.lanes.add(self)

    return __init__


def _slot_with_memory(checker: Checker) -> type[pools._Slot]:
    class Slot(pools._Slot):
        """As on CUDA: with a memory pool of its own."""

        def __init__(self, size: int, device: torch.device, groups: Sequence[Any] = ()) -> None:
            super().__init__(size, device, groups)
            self.allocating = _AllocatingFrom(checker, checker.new_arena())

    return Slot


def _noting_temporaries(checker: Checker) -> Callable[..., torch.Tensor]:
    temporary = pools.Pool.temporary

    def noted(self: pools.Pool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = temporary(self, numel, dtype)
        block = checker.block(tensor)
        if block is not None:
            block.is_temporary = True
        return tensor

    return noted


def _noting_users(checker: Checker) -> Callable[..., None]:
    """Memory of a lane that the current stream is to write: whatever was done in it must be before that stream."""
    allocate = pools.Pool.allocate

    def noted(self: pools.Pool, tensor: torch.Tensor, lasting: bool = False, for_current_stream: bool = False) -> None:
        checker.user = checker.current if for_current_stream else None
        try:
            allocate(self, tensor, lasting, for_current_stream)
        finally:
            checker.user = None

    return noted


def _noting_collectives(checker: Checker) -> Callable[..., Any]:
    """On NCCL a collective runs on the current stream, or else on one of the group's own that waits for it."""
    launch = RehearsalGroup._launch
    streams: dict[RehearsalGroup, Stream] = {}

    def _launch(self: RehearsalGroup, kind: str, size: int, pairs: Any, opts: Any = None, *args: Any, **kwargs: Any):
        written, read = [dst for dst, _ in pairs], [src for dst, src in pairs if src is not dst]
        work = launch(self, kind, size, pairs, opts, *args, **kwargs)
        if not getattr(opts, "asyncOp", True):
            checker.access(kind, read, written)
            return work
        if self not in streams:
            streams[self] = checker.stream(f"of group {self.getGroupDesc() or self.getGroupName()}")
        streams[self].join(checker.current.clock)
        with checker.on(streams[self]):
            checker.access(kind, read, written)
            work.end = checker.event()
            work.end.record()
        return work

    return _launch


def _joining_the_group() -> Callable[..., bool]:
    wait = CpuWork.wait

    def joining(self: Any, timeout: object = None) -> bool:
        end = getattr(self, "end", None)
        if end is not None:
            end.wait()
        return bool(wait(self, timeout))

    return joining
