"""The clock of CPU tensors: a thread per process group moves the bytes and sleeps until the modelled time is over."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch

from flatshard.rehearsal.transfer import Transfer, TransferWork

# The OS wakes a sleeping thread tens of microseconds late, so the last part of a wait yields instead of sleeping.
_WAKE_UP_SECONDS = 1.5e-4


class CpuLink:
    """A link that serves one collective at a time, first come, first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, seconds: float) -> float:
        """Reserve the link for ``seconds`` as soon as it is free; returns the end, in time of ``perf_counter``."""
        with self._lock:
            self._free_at = max(time.perf_counter(), self._free_at) + seconds
            return self._free_at


class CpuWork(TransferWork):
    """Completes on the worker thread.  ``wait`` blocks the caller, as Gloo's does."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, error: Exception | None = None) -> None:
        """Complete the future before the work, as Gloo does: a caller of ``wait`` may read results of its callbacks."""
        self._error = error
        try:
            if error is None:
                self._future.set_result(self._transfer.outputs())
            else:
                self._future.set_exception(error)
        finally:
            self._done.set()

    def wait(self, timeout: object = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._transfer.outputs()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class CpuClock:
    """The queue of one process group.  ``links`` belongs to the rehearsal and is shared by all its groups."""

    def __init__(self, links: dict[str, CpuLink]) -> None:
        self._links = links
        self._queue: queue.SimpleQueue[tuple[Transfer, CpuWork] | None] = queue.SimpleQueue()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        ready.wait()
        torch.set_num_threads(threads)

    def submit(self, transfer: Transfer) -> CpuWork:
        work = CpuWork(transfer)
        self._queue.put((transfer, work))
        return work

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self, ready: threading.Event) -> None:
        # One intra-op thread: a second team of workers would take cores from the computation.  Threads that are created
        # later inherit the setting, so the creator sets its own number again after `ready`.
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        ready.set()
        while (call := self._queue.get()) is not None:
            transfer, work = call
            try:
                end = self._links[transfer.level].reserve(transfer.seconds) if transfer.seconds else 0.0
                move_bytes(transfer)
                del call, transfer  # their memory must be free when a caller's wait returns
                _sleep_until(end)
            except Exception as error:
                work.finish(error)
            else:
                work.finish()
            del work


def move_bytes(transfer: Transfer) -> None:
    for pair in transfer.pairs:
        # `.data` has a separate version counter: like any other backend, this one does not change autograd's.
        dst, src = (tensor.data.view(-1) for tensor in pair)
        if transfer.fold:
            if transfer.slots > 1:
                src.view(torch.uint8).max()  # read the slots of the other ranks too, as a reduction does
            own = src.view(transfer.slots, -1)[transfer.own]
            if own.data_ptr() != dst.data_ptr():
                dst.copy_(own)
            if transfer.scale != 1.0:
                dst.mul_(transfer.scale if dst.is_floating_point() else int(transfer.scale))
        elif dst.numel():
            # Skip the slot that is the source, if there is one: a copy must not overlap its input.
            slots = dst.view(transfer.slots, -1)
            at = (src.data_ptr() - dst.data_ptr()) // (slots.shape[1] * dst.element_size())
            for part in (slots[:at], slots[at + 1 :]) if 0 <= at < transfer.slots else (slots,):
                part.copy_(src)


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(max(left - _WAKE_UP_SECONDS, 0.0))
