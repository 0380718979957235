"""How often everything that had been launched was over: events of earlier epochs need no waiting.

A capture begins and ends an epoch: within it, and after it, events of another one must not be waited for.
"""

now = 0


def begin() -> None:
    """Everything launched so far has ended, or is in a graph whose replays are in order by themselves."""
    global now
    now += 1
