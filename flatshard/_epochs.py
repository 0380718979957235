"""A counter of epochs. All work of an earlier epoch has ended, so its events need no waiting.

A CUDA graph capture is a separate epoch: it must not wait for earlier events, nor later code for events in it.
"""

now = 0


def begin() -> None:
    """Start an epoch. All launched work must have ended, or be in a graph, whose replays order it."""
    global now
    now += 1
