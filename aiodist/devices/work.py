"""One operation's work on a device: a stream to queue it on, and events to order it.

Other ranks' streams wait for two of the events: READY, after which the arrays may be read, and
RECORDED, after the first half of an operation of two halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from aiodist.devices.base import Device, Event, Stream

READY, RECORDED, DONE, CALLED = range(4)
"""The events of an operation: its arrays may be read; its first half was queued; all of it was; the
user's work before the call."""
EVENTS = 4
TOLD = 2
"""The first so many events are told to the others."""


class Mark:
    """Whether an operation has queued work that is not known to be complete."""

    busy = False


class DeviceWork:
    """A stream of aiodist's own, and events. See `DeviceMemory.begin`.

    It is made when the operation is called. The operation comes after all work on the current
    stream.
    """

    def __init__(
        self, device: Device, stream: Stream, numbered: Sequence[tuple[int, Event]]
    ) -> None:
        self.device = device
        self.stream = stream
        self.numbered = numbered  # its events, with the numbers by which others know them
        self.events = [event for _, event in numbered]  # by READY, RECORDED, DONE and CALLED
        self.kept: list[Any] = []  # arrays that work on the device reads and writes
        self.mark = Mark()  # whether there is work to wait for
        # Two streams that wait for each other's events::
        #
        #     the user's   x.mul_(2)  ·CALLED ·READY                    x.add_(1)
        #                                 |                                 ^
        #     aiodist's                   '-> copies, reductions ... DONE --'
        #
        # The host waits for none of this. READY is recorded here, before the other ranks are known,
        # so that they may use it as soon as they hear its number. If the array has to be copied
        # first, READY is recorded again (`shown_later`), and told only after that.
        self._user = device.current()  # the user's stream
        self._user.record(self.events[CALLED])
        self._user.record(self.events[READY])

    def follow(self) -> None:
        """Order later work after the user's work before the call."""
        self.stream.wait(self.events[CALLED])

    def begin(self) -> None:
        """Begin to queue work, after the user's work before the call."""
        self.mark.busy = True
        self.follow()

    def shown_later(self) -> None:
        """Let others read the arrays after the work that is queued by now."""
        self.mark.busy = True
        self.stream.record(self.events[READY])

    def flat(self, array: Any) -> Any:
        """The array, flat: itself if it is contiguous, else a copy, which is queued."""
        flat = self.device.flat(array)
        if flat is None:
            return self.copied(array)
        self.kept += [array, flat]
        return flat

    def copied(self, array: Any) -> Any:
        """A flat copy of the array, which is queued."""
        copy = self.device.empty(self.stream, *self.device.describe(array))
        self.follow()
        self.device.copy(self.stream, copy, array)
        self.shown_later()
        flat = self.device.flat(copy)
        self.kept += [array, flat]
        return flat

    def to_host(self, array: Any) -> Any:
        copy = self.device.host(*self.device.describe(array))
        self.device.copy(self.stream, copy, array)
        return copy

    def let_go(self) -> None:
        """Order the user's later work after all that is queued here.

        That holds on the stream at the call, and on the current one.
        """
        # A device that fails runs nothing more, so there is nothing to order.
        with contextlib.suppress(Exception):
            if self.mark.busy:
                done = self.done()
                self._user.wait(done)
                self.device.current().wait(done)

    def done(self) -> Event:
        """The event after all that is queued by now."""
        self.stream.record(self.events[DONE])
        return self.events[DONE]

    def finished(self) -> None:
        """All queued work is complete, here and on all ranks that read the arrays."""
        self.mark.busy = False
        self.kept.clear()
