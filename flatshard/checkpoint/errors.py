"""The error of checkpoints, which is raised on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flatshard.buffer import Exchange
from flatshard.trust.alarm import PeerError


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or of another model, or a save failed. The text names file and tensor."""


def on_all_ranks(ranks: Exchange, action: Callable[[], Any]) -> list[Any]:
    """The results of ``action`` on all ranks, sent as JSON. If it raises on any rank, CheckpointError on all ranks."""
    own: Exception | None = None
    try:
        message = {"value": action()}
    except PeerError:  # a rank has failed, so the exchange below would not end
        raise
    except Exception as error:
        own = error
        message = {"error": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"}
    replies = [json.loads(reply) for reply in ranks.gather(json.dumps(message).encode())]
    failed = [(rank, reply["error"]) for rank, reply in enumerate(replies) if "error" in reply]
    if failed:
        rank, text = failed[0]
        if isinstance(own, CheckpointError):
            raise own
        raise CheckpointError(text if ranks.size == 1 else f"rank {rank}: {text}") from own
    return [reply["value"] for reply in replies]
