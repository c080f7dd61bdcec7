"""Where ranks of a lane learn whether the arrays of all are on devices."""

from __future__ import annotations

from aiodist.engine.operation import Operation, Pause


class Meeting(Pause):
    """On a lane, until all who are on it have entered: then it is known whether all their arrays
    are on devices. If not, the program hears it, see `Operation.turn`.

    `turned`: it has heard that already.
    """

    def __init__(self, *, turned: bool = False) -> None:
        self._turned = turned

    def belong(self, operation: Operation) -> None:
        self._operation = operation

    def run(self) -> bool:
        operation = self._operation
        lane = operation.lane
        assert lane is not None
        if not lane.wait_for(lane.others, 0):
            return False
        operation.place = 0  # it is said; here nobody has an array in memory that all see
        if lane.board.all_on_devices(operation.seq):
            if self._turned:
                # Those who have not heard of it yet may wait for what this rank does not show any
                # more. They must not take what it does instead for that.
                lane.board.turn(operation.seq)
                lane.skip_phase()
        elif not self._turned:
            operation.others_are_on_host()
        return True

    def close(self) -> None:
        """Nobody is kept waiting by it."""
