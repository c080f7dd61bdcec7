"""Prepared collectives of groups that span hosts, which wait without an operation.

Nearly every call that needs a frame of another host has to wait for it. It knows what it waits for:
stamps of its own host, and at most one frame of each peer, whose length is known. So the call stays
on the lane and takes these frames itself, and each of them makes its executor go on. If anything
else happens, the call becomes an operation with the same executor. The operation also gets the
frames that have come or are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiodist.engine.calls import Calls
from aiodist.engine.early import Key
from aiodist.engine.executor import Executor
from aiodist.engine.operation import Operation, Program
from aiodist.engine.phase import Spans
from aiodist.prepared.express import failing
from aiodist.prepared.link_frames import ComingFrame, EagerLinks, LendingFrames
from aiodist.schedules.plan import Recv
from aiodist.shared_memory.lane import DifferentCallsError, Lane
from aiodist.transports.base import Landing
from aiodist.work import Work


class Waited(Protocol):
    """A recipe, with the text of its calls and its frames."""

    call: bytes
    frames: LendingFrames


class MultihostCall(EagerLinks):
    """A call that waits.

    For its executor it is the `Links`, for its lane the `Rider`, and for its frames `Taking`.
    """

    __slots__ = (
        "_calls", "_coming", "_executor", "_finish", "_frames", "_lane", "_program", "call",
        "digest", "key", "seconds", "seq", "work",
    )  # fmt: skip
    place = 0

    def __init__(
        self,
        calls: Calls,
        lane: Lane,
        work: Work[Any],
        recipe: Waited,
        executor: Executor,
        program: Program,
        seconds: float,
        finish: Callable[[MultihostCall], bool],
    ) -> None:
        assert work.seq is not None
        self._calls = calls
        self._lane = lane
        self._executor = executor
        self._frames = recipe.frames
        self._program = program  # the rest, after the executor
        self._finish = finish  # ends it after all steps; False: more is left
        self._coming: dict[int, ComingFrame] = {}  # by peer
        self.work = work
        self.seq = work.seq
        self.key: Key = (None, work.seq)
        self.call = recipe.call
        self.seconds = seconds  # time limit at the call

    def begin(self) -> bool:
        """Begin to wait. False: it cannot, because the group has ended or a rank is lost."""
        calls = self._calls
        if calls.party.ended is not None or calls.party.lost():
            return False
        calls.tags.take(None)
        calls.waiting.by_key[self.key] = self
        calls.waiting.takers[self.key] = self
        calls.waiting.wait(self)
        self._executor.hand_over(self)
        if self._takes_what_came():
            self._lane.turns.add(self)
        else:
            self.to_operation()
        return True

    def _takes_what_came(self) -> bool:
        """Take the frames that came before the call waits. Return whether these were all that
        came."""
        arrivals = self._calls.arrivals
        if arrivals.is_quiet(self.key):
            return True
        phase = self._executor.phase
        memory: Any = phase.memory
        taken = self._taken()
        for peer, (receive,) in phase.prepared.receives.items():
            view = None if peer in taken else memory.due(receive.spans)
            if view is not None and arrivals.take_early(self.key, peer, self.call, view):
                coming = self._coming[peer] = ComingFrame(peer, view, self.came)
                coming.is_here = True
        return arrivals.is_quiet(self.key)

    def resume(self) -> None:
        """Go on, because something that it waits for may be there: see `turns.Rider`."""
        executor = self._executor
        try:
            try:
                has_run = executor.run()
            finally:
                self._frames.settle()
            if not has_run:
                return
            is_done = self._finish(self)
        except DifferentCallsError:
            self.to_operation()  # the operation finds that, too
            return
        except Exception as error:
            executor.close()
            self._leaves(None, failing(error))
            return
        if is_done:
            self._waits_no_more()
        else:
            self.to_operation()

    # -- its frames: see `executor.Links` ---------------------------------------------------------

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        return self._frames.send(peer, views)

    def take(self, peer: int, spans: Spans) -> bool:
        coming = self._coming.get(peer)
        if coming is None or not coming.is_here:
            return False
        del self._coming[peer]
        memory: Any = self._executor.phase.memory
        memory.arrived(spans)
        return True

    def message(self, src: int, slot: int, call: bytes, nbytes: int) -> Landing | None:
        """See `waiting_calls.Taking`."""
        phase = self._executor.phase
        receives = phase.prepared.receives.get(src)
        if slot or receives is None or call != self.call or src in self._coming:
            return None
        if src in self._taken():
            return None  # a second frame makes no sense, and the operation says so
        (receive,) = receives
        memory: Any = phase.memory
        view = memory.due(receive.spans)
        if view is None or len(view) != nbytes:
            return None
        coming = self._coming[src] = ComingFrame(src, view, self.came)
        return coming

    def came(self, src: int) -> None:
        """Go on, if the executor waits for the frame of `src`."""
        if self._executor.waiting_for == src:
            self.resume()

    def _taken(self) -> set[int]:
        """Return the peers whose frames have been taken."""
        return {step.peer for step in self._executor.done if isinstance(step, Recv)}

    # -- its end ----------------------------------------------------------------------------------

    def _waits_no_more(self) -> None:
        waiting = self._calls.waiting
        del waiting.by_key[self.key], waiting.takers[self.key]
        # Break this cycle, because only the garbage collector would free the group's memory.
        self._executor.hand_over(self._frames)

    def to_operation(self) -> Operation | None:
        """See `WaitingCall`."""
        return self._leaves(self._executor, self._program)

    def _leaves(self, executor: Executor | None, rest: Program) -> Operation | None:
        calls = self._calls
        self._waits_no_more()
        operation = calls.take_over(self.work, self.call, executor, rest, self.seconds, came={})
        if operation is not None and not operation.done:
            for coming in self._coming.values():
                coming.inflow = operation.message(coming.src, 0, len(coming.view))
                into = coming.inflow.memory
                if into is not None:
                    into[:] = coming.view  # mostly the same memory
                if coming.is_here:
                    coming.inflow.landed()
            self._lane.turns.resume_soon()
        return operation
