"""A second thread for large copies, which halves their time if a core is idle.

The caller copies step by step, and this thread takes steps of the same copy meanwhile. The call
returns when no step is under way. So memory is written only within the call, and a cancel after
that need not wait. If the thread is late, because no core is free, nothing is left for it and the
call does not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

IDLE: Final = 0.2
"""Seconds without work after which the thread ends."""


class _Job:
    """One call. Two threads take its steps in order."""

    def __init__(self, step: Callable[[int], None], steps: int) -> None:
        self._step = step
        self._lock = threading.Lock()  # held to take a step, or to end this
        self._steps = steps
        self._taken = 0
        self._helping = False  # the second thread has taken one
        self._failed: BaseException | None = None
        # Released when it takes no more. Not an Event, because an interrupt would break that.
        self._over = threading.Lock()
        self._over.acquire()

    def do(self, most: int) -> None:
        """Do at most `most` steps, in the calling thread."""
        for _ in range(most):
            number = self._take()
            if number is None:
                return
            self._step(number)

    def help(self) -> None:
        """Do the remaining steps, in the second thread."""
        try:
            while (number := self._take(helps=True)) is not None:
                self._step(number)
        except BaseException as error:  # raised in the calling thread
            self._failed = error
        self._over.release()

    def _take(self, *, helps: bool = False) -> int | None:
        with self._lock:
            if self._taken == self._steps:
                return None
            self._helping |= helps
            self._taken += 1
            return self._taken - 1

    def finish(self) -> int:
        """Take no more steps, and wait for that of the second thread. Returns how many were done.

        Raises the error of a step.
        """
        with self._lock:
            self._steps = self._taken
        if self._helping:
            with self._over:
                pass
        if self._failed is not None:
            raise self._failed
        return self._steps


class SecondThread:
    """The second thread of a process. It exists while there are copies, and for a while after."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin without a thread, as in the child after a fork."""
        self._lock = threading.Lock()  # held to begin or end the thread
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._runs = False

    def run(self, step: Callable[[int], None], steps: int, mine: int) -> int:
        """Call `step` with 0, 1, … up to `steps`, in two threads; in this one at most `mine` times.

        Returns how many were done, the first ones: what this thread may do, and what the other one
        has done meanwhile. Steps must release the GIL while they work. Raises the error of a step;
        some may have been left out then.
        """
        job = _Job(step, steps)
        try:
            self._begin(job)
            job.do(mine)
            return job.finish()
        except BaseException:
            # Also if an interrupt came in `finish`, because the memory is the caller's after this.
            job.finish()
            raise

    def _begin(self, job: _Job) -> None:
        with self._lock:
            if not self._runs:
                # A thread may be impossible if the process or the system is at its limit. Then this
                # thread does its part.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._serve, name="aiodist-copies", daemon=True).start()
                    self._runs = True
            if self._runs:
                self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            try:
                self._jobs.get(timeout=IDLE).help()
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._runs = False
                        return


SECOND_THREAD: Final = SecondThread()
"""The second thread of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SECOND_THREAD.begin_anew)
