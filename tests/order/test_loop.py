"""The watch thread at the end of a process."""

from __future__ import annotations

import subprocess
import sys

_ENDS_IN_A_CALL = """
import atexit, datetime
import torch.distributed as dist
from flatshard.trust.loop import TICK, Loop

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def call():
    try:
        store.wait(["never"], datetime.timedelta(seconds=2 * TICK))  # in C++, without the GIL
    except RuntimeError:
        print("came back", flush=True)

loop = Loop(tick=lambda seconds: None, pause=lambda: TICK, dump=lambda: None)
loop.start()
loop.do(call)
atexit.register(loop.stop)
"""


def test_the_process_ends_well_while_the_thread_is_in_a_call_to_the_store():
    ended = subprocess.run([sys.executable, "-c", _ENDS_IN_A_CALL], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "came back\n"), ended.stderr
