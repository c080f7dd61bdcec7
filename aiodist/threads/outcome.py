"""The outcome of something that is done on the loop, for the threads that wait for it.

Python runs signal handlers in the main thread, and an exception that one of them raises may come
after any call of that thread. A `threading.Condition` does not survive that. Its lock is taken by
Python code, so an exception may come when it is taken, and before a ``with`` block can release it.
Then all other threads wait for it without end. So `threading.Event` and `concurrent.futures.Future`
must not be used by the main thread and the loop together.

Here is one plain lock instead, which no thread needs in order to go on. It is held until the
outcome is there, and free after that.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Generic, TypeVar, cast

from aiodist.errors import GroupClosedError

T = TypeVar("T")


class LoopOutcome(Generic[T]):
    """What the loop sets once, and any thread may wait for."""

    __slots__ = ("_gate", "error", "is_taken", "is_there", "result")

    def __init__(self) -> None:
        self.is_there = False
        self.is_taken = False
        """Whether the program has it, or is about to get it."""
        self.error: BaseException | None = None
        self.result = cast("T", None)
        self._gate = gate = threading.Lock()
        gate.acquire()

    def done(self) -> bool:
        """Return whether it is there. Never waits."""
        return self.is_there

    def succeed(self, result: T) -> None:
        """Set the result, and let waiting threads go on."""
        self.result = result
        self._open()

    def fail(self, error: BaseException) -> None:
        """Set the error, and let waiting threads go on."""
        if isinstance(error, KeyboardInterrupt):
            # It is raised in the thread that it was meant for.
            error = interrupted(error)
        self.error = error
        self._open()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether it is there."""
        try:
            return self.is_there or self._gate.acquire(True, seconds)
        finally:
            # It stays open for other threads, also if an interrupt comes when this one has got it.
            # No function is called for that, because an interrupt could come at its first line.
            if self.is_there:
                try:  # noqa: SIM105
                    self._gate.release()
                except RuntimeError:
                    pass

    def _open(self) -> None:
        self.is_there = True
        with contextlib.suppress(RuntimeError):
            self._gate.release()


def interrupted(cause: BaseException | None = None) -> GroupClosedError:
    """Return the error of calls on a loop that an interrupt has left in the middle of its work."""
    error = GroupClosedError(
        "an interrupt came while the event loop of the groups worked, so their state is unknown: "
        "make new groups"
    )
    error.__cause__ = cause
    return error
