"""Prepared collectives of groups that span hosts, which wait as what they are, without an
operation.

Nearly each call that needs a frame of another host has to wait for it. What it waits for is known:
stamps of its own host, and one frame of each peer at most, whose lengths are known. So the call
rides the lane and takes these frames itself, and its executor goes on with each of them. Whatever
else happens to it makes an operation of it, which goes on with the same executor; the frames that
have come, or are coming, are handed over to it.
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
from aiodist.prepared.link_frames import Coming, LendingFrames
from aiodist.schedules.plan import Recv
from aiodist.shared_memory.lane import DifferentCallsError, Lane
from aiodist.transports.base import Landing
from aiodist.work import Work


class Waited(Protocol):
    """A recipe: what was called, in words, and its frames."""

    call: bytes
    digest: int
    frames: LendingFrames


class MultihostCall:
    """One call that waits. It is the `Links` of its executor, the `Rider` of its lane, and `Taking`
    its frames."""

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
        self._program = program  # what comes after the executor
        self._finish = finish  # ends it where all steps are done; False: that is not all
        self._coming: dict[int, Coming] = {}  # by peer
        self.work = work
        self.seq = work.seq
        self.key: Key = (None, work.seq)
        self.call = recipe.call
        self.digest = recipe.digest
        self.seconds = seconds  # that it had when it was called

    def begin(self) -> bool:
        """Whether it waits from here on."""
        calls = self._calls
        if calls.party.ended is not None or calls.party.lost():
            return False
        calls.tags.take(None)
        calls.waiting.by_key[self.key] = self
        calls.waiting.takers[self.key] = self
        calls.waiting.wait(self)
        self._executor.hand_over(self)
        if self._takes_what_came():
            self._lane.add(self)
        else:
            self.to_operation()
        return True

    def _takes_what_came(self) -> bool:
        """Take the frames that came before it waits. Whether that is all that came for it."""
        arrivals = self._calls.arrivals
        if arrivals.is_quiet(self.key):
            return True
        phase = self._executor.phase
        memory: Any = phase.memory
        taken = self._taken()
        for peer, (receive,) in phase.prepared.receives.items():
            view = None if peer in taken else memory.due(receive.spans)
            if view is not None and arrivals.take_early(self.key, peer, self.call, view):
                coming = self._coming[peer] = Coming(peer, view, self.came)
                coming.is_here = True
        return arrivals.is_quiet(self.key)

    def resume(self) -> None:
        """See `turns.Rider`."""
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
            self.to_operation()  # which finds that, too
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

    def may_send(self, peer: int) -> bool:
        return False  # an eager plan does not ask

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

    def grant(self, peer: int, count: int) -> None:
        raise AssertionError("an eager plan grants nothing")

    def check(self, peer: int) -> None:
        """Who is lost is for the operation to hear of."""

    def waiting(self, peer: int) -> int:
        return 0

    def message(self, src: int, slot: int, call: bytes, nbytes: int) -> Landing | None:
        """See `waiting_calls.Taking`."""
        phase = self._executor.phase
        receives = phase.prepared.receives.get(src)
        if slot or receives is None or call != self.call or src in self._coming:
            return None
        if src in self._taken():
            return None  # it makes no sense, as the operation finds
        (receive,) = receives
        memory: Any = phase.memory
        view = memory.due(receive.spans)
        if view is None or len(view) != nbytes:
            return None
        coming = self._coming[src] = Coming(src, view, self.came)
        return coming

    def came(self, src: int) -> None:
        """The frame of `src` is here."""
        if self._executor.waiting_for == src:
            self.resume()

    def _taken(self) -> set[int]:
        """The peers whose frames have been taken."""
        return {step.peer for step in self._executor.done if isinstance(step, Recv)}

    # -- its end ----------------------------------------------------------------------------------

    def _waits_no_more(self) -> None:
        waiting = self._calls.waiting
        del waiting.by_key[self.key], waiting.takers[self.key]
        # Each would keep the other, and the group's memory, until the collector runs.
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
                    into[:] = coming.view  # the same memory, mostly
                if coming.is_here:
                    coming.inflow.landed()
            self._lane.resume_soon()
        return operation
