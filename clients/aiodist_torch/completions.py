"""Threads that complete torch's futures.

A callback of a future runs in the thread that completes it, and may communicate and wait in turn.
On the engine's thread it would wait for itself. One thread for all callbacks is not enough either,
because a callback may wait for another future. So no job ever waits for another one to end.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable

IDLE = 1.0
"""Seconds after which a thread without a job ends."""

RETRY = 0.1
"""Seconds until another try to start a thread."""

Job = Callable[[], None]


class Completions:
    """Threads that run jobs: one for each job at a time, kept for a while for later jobs."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with no threads, because after a fork they are those of the parent."""
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._count = threading.Lock()
        self._idle = 0  # threads that wait for a job, less the jobs that they are about to get

    @property
    def idle(self) -> int:
        """Threads that wait for a job."""
        return self._idle

    def soon(self, job: Job) -> None:
        """Run `job`, which must not raise, in a thread that does nothing else.

        Called on an event loop, because it tries again later if no thread can be started.
        """
        # The caller lowers `_idle`, and not the thread that takes the job. Otherwise a second job
        # could count on the same thread in between, and wait behind the first, which may be waiting
        # for it.
        with self._count:
            taken = self._idle > 0
            if taken:
                self._idle -= 1
        if taken:
            self._jobs.put(job)
        else:
            thread = threading.Thread(
                target=self._work, args=(job,), name="aiodist futures", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the process has as many as it may have, for now
                asyncio.get_running_loop().call_later(RETRY, self.soon, job)

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
                job = self._jobs.get()  # a job was promised, and is on its way


_here = Completions()
soon = _here.soon

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_here.begin)
