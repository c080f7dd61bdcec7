"""Threads that complete torch's futures.

What is chained to a future runs where it is completed, and may communicate and wait in turn: on the
engine's thread that would wait for itself. Nor is one thread for all of it enough, as a callback
may wait for another future. So there is always one that waits for something to do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_count = threading.Lock()
_idle = 0
"""Threads that wait for a job, less the jobs that wait for a thread."""


def soon(job: Callable[[], None]) -> None:
    """Have `job`, which must not raise, done by a thread of its own."""
    global _idle
    with _count:
        _idle -= 1
        short = _idle < 0
        if short:
            _idle += 1  # the one that is started now comes with this job
    if short:
        threading.Thread(target=_work, args=(job,), name="aiodist future", daemon=True).start()
    else:
        _jobs.put(job)


def _work(job: Callable[[], None]) -> None:
    global _idle
    while True:
        job()
        with _count:
            _idle += 1
        job = _jobs.get()
