"""How ranks with arrays on devices learn whether the other arrays are on devices, too.

Ranks of one collective may give arrays on the host or on devices. For the user it is the same call,
and all ranks describe it in the same words. Ranks with host arrays begin at once. They pay nothing,
because they need not know about devices.

So ranks with arrays on devices have to ask before they move anything. Their first phase is a
`RollCall`. It is over when all others have said that their arrays are on devices, or one has said
that its array is not. Then all ranks take the same way: together on the devices, or each with a
copy on the host, by the plan that the ranks with host arrays have begun. No rank has to turn back.

**On a lane** with all ranks, a rank says with its call that its array is on a device (the place
`ON_DEVICE`). So this phase only waits until all have entered, and takes no message.

**Over links** a rank with an array on a device sends all others a GRANT that grants nothing, and
whose call is marked. A rank that called the same with a host array answers with such a GRANT
without the mark. A rank with an array on a device sends marked ones itself, and need not answer.
Frames that come early are kept until the collective is called, as always::

    rank 0 (device)   ── all_reduce(…) on a device ──>   rank 1 (host): has sent rank 0 its part,
                      <── its part, as ever ──────────                  or waits for that of rank 0
                      <── all_reduce(…) ──────────────

**The first word of a rank counts.** Only frames of the roll call have the mark. So a frame without
it comes from a rank with a host array, or from one that has finished its roll call. In the second
case, there are two possibilities. That rank may have heard of a host array, and then it does not
matter that it is taken for one. Or it has the marked words of all others. Then it had sent its own
mark before, and links keep the order. Frames of the plan that come meanwhile are kept for later
phases.

**It ends.** A rank answers as soon as it has called the collective. On a lane, a rank with an array
on a device also waits for its turn. A rank that does not answer is lost, gives up, or is missing at
the deadline, as in every phase that waits for all.
"""

from __future__ import annotations

from typing import Protocol

from aiodist.engine.operation import Operation, Pause

_MARK = b" on a device"


def marked(call: bytes) -> bytes:
    """Return `call` with the mark of a rank whose array is on a device."""
    return call + _MARK


def unmarked(call: bytes) -> bytes:
    """Return `call` without the mark."""
    return call.removesuffix(_MARK)


class RollCaller(Protocol):
    """The group, seen by one of its ranks."""

    size: int

    def call_roll(self, op: Operation) -> None:
        """Tells all others that the array of this rank is on a device, and asks for theirs."""
        ...


class RollCall(Pause):
    """A phase that lasts until `all_on_devices` is known."""

    def __init__(self, group: RollCaller) -> None:
        self._group = group
        self.all_on_devices = False

    def belong(self, operation: Operation) -> None:
        super().belong(operation)
        self._operation = operation
        lane = operation.lane
        self._lane = lane if lane is not None and len(lane.others) + 1 == self._group.size else None
        operation.place = 0  # it was announced, and has no other use here
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
        """Do nothing, because no other rank waits for this."""
