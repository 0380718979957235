"""Which parameters of a group any rank has used: one number per parameter, reduced with its gradient.

A parameter that no rank has used has no gradient, as in one process; a parameter that some rank has used has one on all
ranks. Only a rank that has not used a parameter reads the reduced number, and only then does the host wait for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MOST = 32  # sets of parameters for which numbers are kept


class Uses:
    """The use counts for the ``count`` params of one group."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: dict[tuple[tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def given(self, used: Sequence[int], copies: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this rank sends, in ``copies`` copies: 1 for each param it has ``used``, else 0. Read-only."""
        key = tuple(used), copies, dtype
        found = self._given.get(key)
        if found is None:
            rows = torch.zeros(copies, self.count, dtype=dtype, device=device)
            for index in used:
                rows[:, index].fill_(1)
            found = rows.view(-1)
            if not capturing(found) and len(self._given) < _MOST:
                self._given[key] = found
        return found

    def answer(self, noted: torch.Tensor, asked: Sequence[int]) -> list[int]:
        """Which of the params ``asked`` some rank has used, by the reduced numbers. The host waits for them.

        A captured step cannot wait, and uses the same parameters in every step: the answer is that of the last step
        before it.
        """
        key = tuple(asked)
        if not capturing(noted):
            counts = noted.tolist()
            self._answers[key] = [index for index in asked if counts[index] > 0]
            if len(self._answers) > _MOST:
                self._answers = {key: self._answers[key]}
        elif key not in self._answers:
            raise RuntimeError("the captured step uses parameters that no step before it used; raise `warmup`")
        return self._answers[key]


def capturing(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
