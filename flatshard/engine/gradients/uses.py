"""Which parameters of a group the ranks have used, known to all of them: a number per parameter, beside its gradient.

A parameter that no rank has used has no gradient, as in one process; one that some rank has used has one on all ranks.
A rank that has used a parameter knows. Only one that has not asks, and only then does the host wait for the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MOST = 32  # sets of parameters for which numbers are kept


class Uses:
    """Of the ``count`` params of one group."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: dict[tuple[tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def given(self, used: Sequence[int], copies: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this rank sends to each of so many: 1 for what it has ``used``, in order. Not to be written to."""
        key = tuple(used), copies, dtype
        found = self._given.get(key)
        if found is None:
            rows = torch.zeros(copies, self.count, dtype=dtype, device=device)
            for index in used:
                rows[:, index].fill_(1)
            found = rows.view(-1)
            if not _capturing(found) and len(self._given) < _MOST:
                self._given[key] = found
        return found

    def answer(self, noted: torch.Tensor, asked: Sequence[int]) -> list[int]:
        """Which of the params ``asked`` about some rank has used, by what has been reduced. The host waits for it.

        A graph cannot, and uses the same parameters in every step: it has the answer of the last step before it.
        """
        key = tuple(asked)
        if not _capturing(noted):
            counts = noted.tolist()
            self._answers[key] = [index for index in asked if counts[index] > 0]
            if len(self._answers) > _MOST:
                self._answers = {key: self._answers[key]}
        elif key not in self._answers:
            raise RuntimeError("this rank uses other parameters than in the steps before; run more of them first")
        return self._answers[key]


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
