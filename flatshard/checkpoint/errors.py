"""The error of checkpoints, which is raised on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from flatshard.buffer import Exchange
from flatshard.trust.alarm import PeerError

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or of another model, or a save failed. The text names file and tensor."""


def on_all_ranks(ranks: Exchange, action: Callable[[], T], plain: type[Exception] = CheckpointError) -> T:
    """The result of ``action`` on this rank. If it raises on any rank, CheckpointError on all ranks.

    Errors of the type ``plain`` are for users: they are raised as they are, and quoted without their type.
    """
    own: Exception | None = None
    text = None
    try:
        result = action()
    except PeerError:  # a rank has failed, so the exchange below would not end
        raise
    except Exception as error:
        own = error
        text = str(error) if isinstance(error, plain) else f"{type(error).__name__}: {error}"
    for rank, problem in enumerate(from_all_ranks(ranks, text)):
        if problem is not None:
            if isinstance(own, plain):
                raise own
            raise CheckpointError(problem if ranks.size == 1 else f"rank {rank}: {problem}") from own
    return result


def from_all_ranks(ranks: Exchange, value: Any) -> list[Any]:
    """The values of all ranks, in rank order, sent as JSON."""
    return [json.loads(reply) for reply in ranks.gather(json.dumps(value).encode())]
