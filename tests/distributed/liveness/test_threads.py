"""A process may end while a thread of fdp's is in torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from samples import exhaustive

# The interpreter ends slowly, so that the thread comes back from C++ in the middle of that, many times.
ENDS = """
    import datetime, time
    import torch.distributed as dist
    from fdp.distributed.liveness import threads

    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(1.0)

    store, keep = dist.TCPStore("127.0.0.1", 0, 1, True), Slow()

    def work():
        while time.monotonic() < end_s:
            try:
                store.wait(["never"], datetime.timedelta(seconds=0.02))
            except dist.DistError:
                pass
        time.sleep(AFTERWARDS_S)

    end_s = time.monotonic() + 1.2
    threads.start_thread(work, "waits")
    time.sleep(0.2)
    threads._WAITS_S = WAITS_S
"""


def end_while_a_thread_waits(afterwards_s: float, waits_s: float) -> int:
    text = textwrap.dedent(ENDS).replace("AFTERWARDS_S", str(afterwards_s)).replace(" WAITS_S", f" {waits_s}")
    return subprocess.run([sys.executable, "-c", text], timeout=120, env=os.environ, check=False).returncode


def test_a_process_ends_well_while_a_thread_is_in_torch() -> None:
    assert end_while_a_thread_waits(0.0, 60.0) == 0


@exhaustive
def test_a_thread_that_stays_does_not_keep_the_process() -> None:
    assert end_while_a_thread_waits(3600.0, 2.0) == 0


@exhaustive
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are left where they are since Python 3.14")
def test_a_process_that_does_not_wait_is_aborted() -> None:
    assert end_while_a_thread_waits(0.0, 0.0) == -6
