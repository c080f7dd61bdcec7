"""A second thread for large copies: on a core that has nothing to do it halves their time.

Whoever copies does so step by step, and this thread takes steps of the same copy meanwhile. The
call returns when none is under way any more: so memory is written within the call alone, and a
cancel after that has nothing to wait for. If the thread is late, as where no core is free, there is
nothing left for it to do, and nobody waits for it.
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
    """One call: its steps are taken in order, by two threads."""

    def __init__(self, step: Callable[[int], None], steps: int) -> None:
        self._step = step
        self._lock = threading.Lock()  # held by who takes a step, or ends this
        self._steps = steps
        self._taken = 0
        self._helping = False  # the second thread has taken one
        self._failed: BaseException | None = None
        self._over = threading.Event()  # and takes no more

    def do(self, most: int) -> None:
        """Do `most` steps, in the thread that has called."""
        for _ in range(most):
            number = self._take()
            if number is None:
                return
            self._step(number)

    def help(self) -> None:
        """Do what there is, in the second thread."""
        try:
            while (number := self._take(helps=True)) is not None:
                self._step(number)
        except BaseException as error:  # raised where the copy was asked for
            self._failed = error
        self._over.set()

    def _take(self, *, helps: bool = False) -> int | None:
        with self._lock:
            if self._taken == self._steps:
                return None
            self._helping |= helps
            self._taken += 1
            return self._taken - 1

    def finish(self) -> int:
        """Take no more, and wait for the step that the second thread is at: how many were done.
        Raises what that has raised."""
        with self._lock:
            self._steps = self._taken
        if self._helping:
            self._over.wait()
        if self._failed is not None:
            raise self._failed
        return self._steps


class SecondThread:
    """The second thread of a process: there while there is something to copy, and for a while."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """There is no thread, whatever there was: as in the child after a fork."""
        self._lock = threading.Lock()  # held by who begins, or ends, the thread
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._runs = False

    def run(self, step: Callable[[int], None], steps: int, mine: int) -> int:
        """Call `step` with 0, 1, … up to `steps`, in two threads; in this one `mine` times at most.
        Returns how many were done, which are the first ones: that is all this thread may do, and
        what the other one has done in that time. They are to release the interpreter while they
        work. Raises what one of them has raised: then some may have been left out."""
        job = _Job(step, steps)
        with self._lock:
            if not self._runs:
                # There is none to be had where the process, or a limit of the system, is at its
                # end: then this one does what it may do.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._serve, name="aiodist-copies", daemon=True).start()
                    self._runs = True
            if self._runs:
                self._jobs.put(job)
        try:
            job.do(mine)
        finally:
            done = job.finish()
        return done

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
"""That of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SECOND_THREAD.begin_anew)
