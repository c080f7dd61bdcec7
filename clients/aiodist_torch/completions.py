"""Threads that complete torch's futures.

What is chained to a future runs where it is completed, and may communicate and wait in turn: on the
engine's thread that would wait for itself. Nor is one thread for all of it enough, as a callback
may wait for another future. So a job never waits for another one to end.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

IDLE = 1.0
"""Seconds after which a thread without a job ends."""

Job = Callable[[], None]


class Completions:
    """Threads that do jobs; as many as there are jobs at once, kept a while for later ones."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with no threads: after a fork they are those of the parent."""
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._count = threading.Lock()
        self._idle = 0  # threads that wait for a job, less the jobs they are to get

    @property
    def idle(self) -> int:
        """Threads that wait for a job."""
        return self._idle

    def soon(self, job: Job) -> None:
        """Have `job`, which must not raise, done by a thread that does nothing else."""
        # `_idle` is lowered by whoever gives a job, not by the thread that takes it: in between, a
        # second job would count on the same thread, and wait behind the first, which may be waiting
        # for it.
        with self._count:
            taken = self._idle > 0
            if taken:
                self._idle -= 1
        if taken:
            self._jobs.put(job)
        else:
            threading.Thread(
                target=self._work, args=(job,), name="aiodist futures", daemon=True
            ).start()

    def _work(self, job: Job) -> None:
        while True:
            job()
            with self._count:
                self._idle += 1
            try:
                job = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                with self._count:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                job = self._jobs.get()  # it has been promised, and is on its way


_here = Completions()
soon = _here.soon

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_here.begin)
