"""A second thread for large copies: on a core that has nothing to do it halves their time.

Whoever copies does so step by step, and this thread takes steps of the same copy meanwhile. The
call returns when none is under way any more: so memory is written within the call alone, and a
cancel after that has nothing to wait for. If the thread is late, as where no core is free, there is
nothing left for it to do, and nobody waits for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Final

IDLE: Final = 0.2
"""Seconds without work after which the thread ends."""


class _Job:
    """One call, with the steps that nobody has taken yet."""

    def __init__(self, step: Callable[[int], None], steps: Iterator[int]) -> None:
        self._step = step
        self._steps = steps  # to take one is a single operation of the interpreter
        self._failed: BaseException | None = None
        # The second thread may be at a step. It says so before it takes one: who finds none left,
        # and then that this is not said, knows that it will not take one, either.
        self._helped = False
        self._over = threading.Event()

    def do(self) -> None:
        for number in self._steps:
            self._step(number)

    def help(self) -> None:
        """Take steps in the second thread."""
        self._helped = True
        try:
            self.do()
        except BaseException as error:  # raised where the copy was asked for
            self._failed = error
        self._over.set()

    def finish(self) -> None:
        """Wait for the step that the second thread is at. Raises what that has raised."""
        for _ in self._steps:  # those that are left after an error
            pass
        if self._helped:
            self._over.wait()
        if self._failed is not None:
            raise self._failed


class SecondThread:
    """The second thread of a process: there while there is something to copy, and for a while."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """There is no thread, whatever there was: as in the child after a fork."""
        self._lock = threading.Lock()  # held by who begins, or ends, the thread
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._runs = False

    def run(self, step: Callable[[int], None], steps: Iterable[int]) -> None:
        """Call `step` once with each of `steps`, in any order, two at a time at most. They are to
        release the interpreter while they work. Raises what one of them has raised: then some may
        have been left out."""
        job = _Job(step, iter(steps))
        with self._lock:
            self._jobs.put(job)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._serve, name="aiodist-copies", daemon=True).start()
        try:
            job.do()
        finally:
            job.finish()

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
