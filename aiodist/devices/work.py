"""What one operation has of its rank's device: a stream to queue work on, and events to order it.

Two of the events are told to other ranks, whose streams wait for them: READY, from which on the
arrays may be read, and RECORDED, with which the first half of an operation of two halves is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist.devices.base import Device, Event, Stream

READY, RECORDED, DONE, CALLED = range(4)
"""The events of an operation: arrays may be read; the first half was queued; all was; and what was
queued on the user's stream when it was called."""
EVENTS = 4
TOLD = 2
"""So many of them, from the first on, are told to the others."""


class Mark:
    """Whether an operation has queued anything that is not known to be complete."""

    busy = False


class DeviceWork:
    """A stream of aiodist's own, and events. See `DeviceMemory.begin`.

    It is made when the operation is called: what is queued on the current stream by then is what
    the operation comes after.
    """

    def __init__(
        self, device: Device, stream: Stream, numbered: Sequence[tuple[int, Event]]
    ) -> None:
        self.device = device
        self.stream = stream
        self.numbered = numbered  # its events, and by which numbers others know them
        self.events = [event for _, event in numbered]  # by READY, RECORDED, DONE and CALLED
        self.kept: list[Any] = []  # arrays that work on the device reads and writes
        self.mark = Mark()  # whether there is anything to wait for
        # Two streams, and who waits for whom:
        #
        #     the user's   x.mul_(2)  ·CALLED ·READY                    x.add_(1)
        #                                 |                                 ^
        #     aiodist's                   '-> copies, reductions ... DONE --'
        #
        # The host waits for none of this. READY is recorded here, before anything is known of the
        # others: they may have it as soon as they hear its number. If the array has to be copied
        # first, it is recorded again (`shown_later`), and not told before.
        self._user = device.current()  # the user's stream
        self._user.record(self.events[CALLED])
        self._user.record(self.events[READY])

    def follow(self) -> None:
        """What is queued from here on comes after what was when the operation was called."""
        self.stream.wait(self.events[CALLED])

    def begin(self) -> None:
        """Something is queued from here on, which comes after what was when it was called."""
        self.mark.busy = True
        self.follow()

    def shown_later(self) -> None:
        """The arrays that others may read are made by what is queued by now."""
        self.mark.busy = True
        self.stream.record(self.events[READY])

    def flat(self, array: Any) -> Any:
        """The array, flat: itself where it is contiguous, else a copy, which is queued."""
        self.kept.append(array)
        flat = self.device.flat(array)
        if flat is None:
            copy = self.device.empty(self.stream, *self.device.describe(array))
            self.follow()
            self.device.copy(self.stream, copy, array)
            self.shown_later()
            flat = self.device.flat(copy)
        self.kept.append(flat)
        return flat

    def to_host(self, array: Any) -> Any:
        """Queue a copy of the array in memory of the host."""
        copy = self.device.host(*self.device.describe(array))
        self.device.copy(self.stream, copy, array)
        return copy

    def let_go(self) -> None:
        """What the user queues from here on comes after all that is queued here: on the stream that
        was current when the operation was called, and on the one that is now."""
        if self.mark.busy:
            done = self.done()
            self._user.wait(done)
            self.device.current().wait(done)

    def done(self) -> Event:
        """The event of all that is queued by now."""
        self.stream.record(self.events[DONE])
        return self.events[DONE]

    def finished(self) -> None:
        """All that was queued is complete, here and on all ranks that read the arrays."""
        self.mark.busy = False
        self.kept.clear()
