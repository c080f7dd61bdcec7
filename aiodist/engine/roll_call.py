"""How ranks that give arrays on devices learn where the arrays of the others lie.

Ranks that call one collective may give arrays of the host or arrays on devices: to the user it is
the same call, and all say it in the same words. Ranks that give arrays of the host begin at once,
as ever, and pay nothing for that others might not: they know of no devices. So it is for those with
arrays on devices to find out, before they move anything. Their first phase is a `RollCall`. It is
over when all others have said that theirs are on devices, or one that its is not; so all take the
same way from there: together on the devices, or each with a copy on the host, by the plan that the
ranks with arrays of the host have begun. Nobody has to turn back.

**On a lane** that all ranks are on, a rank says with its call that its array is on a device (the
place `ON_DEVICE`). So it is enough to wait until all have entered: it takes no message.

**Over links** a rank with an array on a device sends each other one a GRANT that grants nothing,
whose call is marked. A rank that has called the same with an array of the host answers with a GRANT
that grants nothing, without the mark; one whose array is on a device sends marked ones itself, and
need not answer. What comes early is kept until the collective is called, as all of its frames are::

    rank 0 (device)   ── all_reduce(…) on a device ──>   rank 1 (host): has sent rank 0 its part,
                      <── its part, as ever ──────────                  or waits for that of rank 0
                      <── all_reduce(…) ──────────────

**The first word of a rank counts.** The mark is on the frames of the roll call alone. So a frame
without it comes of a rank with an array of the host, or of one that is through with its roll call.
The latter either has heard of a rank with an array of the host, and then it makes no difference
that it is taken for one; or it has had the marked words of all others, so it had sent its own
before, and links keep the order. What has come of the plan by then is kept for the phases to come.

**It ends.** A word of a rank depends on nothing but that it has called the collective and, if its
array is on a device and it runs on a lane, that it is its turn there. Who does not come is lost, or
gives up, or is missing at the deadline, as in any phase that waits for all.
"""

from __future__ import annotations

from typing import Protocol

from aiodist.engine.operation import Operation, Pause

_MARK = b" on a device"


def marked(call: bytes) -> bytes:
    """How a rank with an array on a device says in a roll call what it has called."""
    return call + _MARK


def unmarked(call: bytes) -> bytes:
    """What the rank has called that said this."""
    return call.removesuffix(_MARK)


class Caller(Protocol):
    """The group as seen by one of its ranks."""

    size: int

    def call_roll(self, op: Operation) -> None:
        """Tells all others that the array of this rank is on a device, and asks for theirs."""
        ...


class RollCall(Pause):
    """Until it is known whether the arrays of all others are on devices: `all_on_devices`."""

    def __init__(self, group: Caller) -> None:
        self._group = group
        self.all_on_devices = False

    def belong(self, operation: Operation) -> None:
        super().belong(operation)
        self._operation = operation
        lane = operation.lane
        self._lane = lane if lane is not None and len(lane.others) + 1 == self._group.size else None
        operation.place = 0  # it is said; here nobody has an array in memory that all see
        if self._lane is None:
            self._group.call_roll(operation)

    def run(self) -> bool:
        lane, operation = self._lane, self._operation
        if lane is not None:
            if not lane.wait_for(lane.others, 0):
                return False
            self.all_on_devices = lane.board.all_on_devices(operation.seq)
            return True
        assert operation.roll is not None
        self.all_on_devices = all(operation.roll.values())
        return not self.all_on_devices or len(operation.roll) == self._group.size - 1

    def close(self) -> None:
        """Nobody is kept waiting by it."""
