"""The error of a rank that another rank, or the network, has failed."""

from __future__ import annotations

from flatshard.trust.record import record


class PeerError(RuntimeError):
    """A collective did not end, because of another rank or of the network. Says which launch, and who, if known."""


def record_error(error: PeerError) -> PeerError:
    """An error that is in the flight record from now on, whoever catches it: its process has not ended well."""
    record.tell(error=f"PeerError: {error}")
    return error


def one_line(error: BaseException) -> str:
    """What an error says, on one line, and not at length."""
    text = " ".join(str(error).split()) or "(no message)"
    return text if len(text) <= 600 else f"{text[:600]}..."
