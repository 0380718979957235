"""The clock of CUDA tensors: one kernel per collective moves its bytes and ends when the modelled time is over.

A link is a word in device memory: the time (of the device's global timer) at which the link is free.  The first block
of a kernel adds the time of its collective to that word, so collectives of all streams and groups are served one at a
time, in the order in which they start on the device.  The bytes move during the modelled time, so a collective takes
the longer of the two.

Only the first block waits for the modelled time, on one multiprocessor; the rest of the device is free for other
kernels. If collectives occupy more multiprocessors (`Network.sms`), the other blocks wait for the first one at a gate.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from contextlib import nullcontext
from typing import Any, get_args

import torch

from flatshard import _epochs
from flatshard.rehearsal.cuda_driver import CudaDriver
from flatshard.rehearsal.network import Level
from flatshard.rehearsal.torch_private import compile_kernel, cuda, current_device, current_raw_stream, is_capturing
from flatshard.rehearsal.transfer import Pairs, Transfer, TransferWork

_MAX_SEGMENTS = 120  # 2.9 KiB with the header; every driver accepts 4 KiB of kernel arguments
_CALL = [struct.Struct(f"<4Q2IQfIQ{3 * segments}Q") for segments in range(_MAX_SEGMENTS + 1)]  # struct Call, below
_THREADS = 512
_MAX_BLOCKS = 32
_BYTES_PER_BLOCK = 1 << 18
_AT_ONCE = 4
_GATES = 1024  # far more than the collectives that run at the same time
_data_ptr = torch.Tensor.data_ptr
_COPY, _SCALE_FLOAT32, _SCALE_BFLOAT16 = 0, 1, 2
_SCALED_IN_KERNEL = {torch.float32: _SCALE_FLOAT32, torch.bfloat16: _SCALE_BFLOAT16}

_SOURCE = (
    f"#define MAX_SEGMENTS {_MAX_SEGMENTS}\n#define AT_ONCE {_AT_ONCE}\n"
    + r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Segment { u64 dst, src, bytes; };  // bytes of one slot
struct Call {
    u64 link, hold, sink, slots;
    u32 own, fold; u64 arithmetic;
    float scale; u32 count;
    u64 gate;  // for blocks that stay until the end: 0 before it, then how many have not left yet
    Segment segments[MAX_SEGMENTS];
};

__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ u64 reserve(u64* link, u64 hold) {
    u64 seen = atomicAdd(link, 0ULL), end;
    for (;;) {
        u64 start = now();
        end = (seen > start ? seen : start) + hold;
        u64 found = atomicCAS(link, seen, end);
        if (found == seen) return end;
        seen = found;
    }
}

__device__ __forceinline__ u32 scaled(u32 word, const Call& call) {
    if (call.arithmetic == 1) return __float_as_uint(__uint_as_float(word) * call.scale);
    if (call.arithmetic == 2) {
        u32 out = 0;
        for (int half = 0; half < 2; half++) {
            u32 bits = __float_as_uint(__uint_as_float((word >> (16 * half)) << 16) * call.scale);
            bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest even
            out |= (bits >> 16) << (16 * half);
        }
        return out;
    }
    return word;
}
__device__ __forceinline__ uint4 finish(uint4 v, const Call& c) {
    return make_uint4(scaled(v.x, c), scaled(v.y, c), scaled(v.z, c), scaled(v.w, c));
}
__device__ __forceinline__ u32 finish(u32 v, const Call& c) { return scaled(v, c); }
__device__ __forceinline__ u16 finish(u16 v, const Call& c) { return (u16)scaled(v, c); }
__device__ __forceinline__ u8 finish(u8 v, const Call&) { return v; }
__device__ __forceinline__ u32 mix(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
__device__ __forceinline__ u32 mix(u32 v) { return v; }

// Each thread has several loads on their way before it stores anything: a load takes long, and the blocks are few.
template <typename T> __device__ __forceinline__ u32 move(const Segment& s, const Call& call) {
    u64 n = s.bytes / sizeof(T), stride = (u64)gridDim.x * blockDim.x;
    const T* src = (const T*)s.src + (call.fold ? call.own * n : 0);
    const T* all = (const T*)s.src;
    T* dst = (T*)s.dst;
    T values[AT_ONCE];
    u32 read = 0;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < n; first += AT_ONCE * stride) {
        #pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * stride < n) values[k] = src[first + k * stride];
        if (call.fold) {
            #pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (first + k * stride >= n) break;
                #pragma unroll 8
                for (u64 slot = 0; slot < call.slots; slot++) read ^= mix(all[slot * n + first + k * stride]);
            }
            #pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (first + k * stride < n) dst[first + k * stride] = finish(values[k], call);
        } else {
            for (u64 slot = 0; slot < call.slots; slot++) {
                if (dst + slot * n == src) continue;
                #pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    if (first + k * stride < n) dst[slot * n + first + k * stride] = values[k];
            }
        }
    }
    return read;
}

extern "C" __global__ void __launch_bounds__(512) rehearse(const __grid_constant__ Call call) {
    bool keeper = blockIdx.x == 0 && threadIdx.x == 0;
    __shared__ u64 end;
    if (threadIdx.x == 0) end = keeper && call.hold ? reserve((u64*)call.link, call.hold) : 0;
    __syncthreads();  // or the compiler reserves the link when the bytes have moved
    u32 read = 0;
    for (u32 i = 0; i < call.count; i++) {
        const Segment& s = call.segments[i];
        u64 alignment = s.dst | s.src | s.bytes;
        if (!(alignment & 15)) read ^= move<uint4>(s, call);
        else if (!(alignment & 3)) read ^= move<u32>(s, call);
        else if (!(alignment & 1)) read ^= move<u16>(s, call);
        else read ^= move<u8>(s, call);
    }
    // the compiler does not know that this is never true, so it keeps the reads of the other slots
    if (call.fold && call.sink == 1) *(u32*)call.link = read;
    while (keeper && now() < end) __nanosleep(100);
    if (call.gate && threadIdx.x == 0 && gridDim.x > 1) {
        u64* gate = (u64*)call.gate;
        if (keeper) {
            atomicExch(gate, (u64)gridDim.x - 1);
        } else {
            while (!atomicAdd(gate, 0ULL)) __nanosleep(500);
            atomicAdd(gate, ~0ULL);  // the last one closes it
        }
    }
    if (call.gate) __syncthreads();  // all threads of the block stay, so that it keeps its multiprocessor
}
"""
)


class CudaLink:
    """What the groups of a rehearsal share on one device: the kernel, the words of the links, and unused events."""

    def __init__(self, device: torch.device, sms: int) -> None:
        self.device = device
        self.sms = sms
        self.driver = CudaDriver()
        with cuda.device(device):
            self.function = compile_kernel(_SOURCE, "rehearse")
            self._words = torch.zeros(len(get_args(Level)) + _GATES, dtype=torch.int64, device=device)
            cuda.synchronize()
        levels, at = get_args(Level), self._words.data_ptr()
        words = range(at, at + self._words.nbytes, 8)
        self.words, gates = dict(zip(levels, words)), words[len(levels) :]
        self.gates = itertools.cycle(gates if sms else [0])
        self.spare_events: list[int] = []


class _Event:
    """A driver event that is reused when nothing refers to it any more.

    A stream that waits for an event captures its state at the call of wait, so the event can be recorded again.
    """

    __slots__ = ("_link", "handle")

    def __init__(self, link: CudaLink) -> None:
        self._link = link
        try:
            self.handle = link.spare_events.pop()
        except IndexError:
            self.handle = link.driver.create_event()

    def __del__(self) -> None:
        self._link.spare_events.append(self.handle)


class CudaWork(TransferWork):
    """``wait`` orders the current stream after the collective.  The tensors are kept alive until then."""

    def __init__(self, transfer: Transfer, event: _Event, stream: int, link: CudaLink) -> None:
        super().__init__(transfer)
        self._event, self._stream, self._link = event, stream, link
        self._waited = False

    def wait(self, timeout: object = None) -> bool:
        link, transfer = self._link, self._transfer
        stream = current_raw_stream(link.device.index)
        if stream != self._stream:
            link.driver.wait(stream, self._event.handle)
        if transfer.blocks_host:
            link.driver.synchronize(self._event.handle)
        if not self._waited:
            self._waited = True
            transfer.result = transfer.outputs()
            transfer.pairs = []
        return True

    def is_completed(self) -> bool:
        return self._link.driver.is_done(self._event.handle)

    def result(self) -> list[torch.Tensor]:
        return self._transfer.outputs()

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future whose ``wait`` orders streams, as NCCL's does.  Made on the first call."""
        if self._future is None:
            device = self._link.device
            self._future = torch.futures.Future(devices=[device])
            carrier = cuda.Stream(device)
            with cuda.stream(carrier):
                self._link.driver.wait(carrier.cuda_stream, self._event.handle)
                self._future.set_result(self.result())
        return self._future


class CudaClock:
    """Runs the collectives of one process group in launch order, from any stream.

    They run on an internal stream or, if they are synchronous (``asyncOp`` is False), on the caller's, as NCCL's do.
    """

    def __init__(self, link: CudaLink) -> None:
        self._link = link
        self._driver = link.driver
        self._stream = cuda.Stream(link.device, priority=-1)
        self._raw_stream: int = self._stream.cuda_stream
        with cuda.device(link.device):
            self._before = self._driver.create_event()
        # The end of the last launch, its stream, and its epoch and whether it was captured: a graph must not wait for
        # launches outside of it, nor these for those in a graph.
        self._last: tuple[_Event, int, tuple[int, bool]] | None = None
        self._arguments = ctypes.create_string_buffer(_CALL[-1].size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments))

    def submit(self, transfer: Transfer) -> CudaWork:
        link, driver = self._link, self._driver
        if current_device() != link.device.index:
            with cuda.device(link.device):
                return self.submit(transfer)
        stream = current = current_raw_stream(link.device.index)
        if not transfer.on_current_stream:
            stream = self._raw_stream
            # one event is enough for all launches: wait captures the last record
            driver.record(self._before, current)
            driver.wait(stream, self._before)
        epoch = _epochs.now, bool(is_capturing())
        if self._last is not None and self._last[1] != stream and self._last[2] == epoch:
            driver.wait(stream, self._last[0].handle)
        pairs, sizes = transfer.pairs, transfer.sizes
        while len(pairs) > _MAX_SEGMENTS:
            self._launch(transfer, pairs[:_MAX_SEGMENTS], sizes[:_MAX_SEGMENTS], 0.0, stream)
            pairs, sizes = pairs[_MAX_SEGMENTS:], sizes[_MAX_SEGMENTS:]
        self._launch(transfer, pairs, sizes, transfer.seconds, stream)
        event = _Event(link)
        driver.record(event.handle, stream)
        self._last = (event, stream, epoch)
        return CudaWork(transfer, event, stream, link)

    def _launch(self, transfer: Transfer, pairs: Pairs, sizes: list[int], seconds: float, stream: int) -> None:
        slots, scale = transfer.slots, transfer.scale
        fields = [0] * (3 * len(pairs))
        fields[2::3] = sizes
        for at, tensors in enumerate(zip(*pairs)):  # the destinations, then the sources
            fields[at::3] = map(_data_ptr, tensors)
        arithmetic = _COPY if scale == 1.0 else _SCALED_IN_KERNEL.get(pairs[0][0].dtype, _COPY)
        _CALL[len(pairs)].pack_into(
            self._arguments,
            0,
            self._link.words[transfer.level],
            int(seconds * 1e9),
            0,
            slots,
            transfer.own,
            transfer.fold,
            arithmetic,
            scale,
            len(pairs),
            next(self._link.gates),
            *fields,
        )
        blocks = min(self._link.sms or _MAX_BLOCKS, sum(sizes) * slots // _BYTES_PER_BLOCK + 1)
        self._driver.launch(self._link.function, blocks, _THREADS, stream, self._pointers)
        if scale != 1.0 and arithmetic == _COPY:
            own_stream = stream == self._raw_stream
            with cuda.stream(self._stream) if own_stream else nullcontext(), torch.no_grad():
                for dst, _ in pairs:
                    dst.data.mul_(scale if dst.is_floating_point() else int(scale))

    def close(self) -> None:
        """Wait for all launches."""
        self._stream.synchronize()
