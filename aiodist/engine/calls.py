"""The collectives of one group that this rank has called. Each has a number and an operation.

Collectives of one tag are numbered in the order of their calls, so that frames can name them by tag
and number. Frames of a collective that was not called here yet are kept (`arrivals`), and handed
over once it has its number. A call waits for its number while the ranks agree on forgetting its
tag. While they agree on shared memory, calls without a tag are *held*, because it is not decided
which of them have a lane. They have numbers, and may be given up, but do not start.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from aiodist.engine import deadlines, failures
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.early import Key
from aiodist.engine.ends import Ends
from aiodist.engine.executor import Executor
from aiodist.engine.operation import Operation, Program, Start, refused
from aiodist.engine.tags import SETUP_TAG, Sends, TagCounts
from aiodist.engine.waiting_calls import WaitingCalls
from aiodist.errors import AiodistError, CollectiveAbortedError, ProtocolError, despite_errors
from aiodist.links.party import Party
from aiodist.recorder import Records
from aiodist.schedules.teams import Teams, spans_hosts
from aiodist.shared_memory.lane import Lane
from aiodist.transports.base import deliver
from aiodist.wire import kinds
from aiodist.work import Work

MAX_UNSOLICITED = 4 << 20
"""The most bytes that a rank sends to a peer for collectives that the peer may not have entered.
Above that, the rank knocks first and waits to be admitted."""

MAX_PUSHED = 8 << 20
"""The most bytes, including those above, that a rank sends before the peer has granted them. Only
ranks that are far apart do so, because then bulk plans need no round trip before their first
frames."""


class Setup(Protocol):
    """Has the ranks of a host agree on shared memory. `over`: they have, or never will."""

    over: bool

    def begin(self) -> None:
        """Begins, unless it has begun before."""
        ...


class Posting(Protocol):
    """Runs collectives with a tag in shared memory."""

    def read(self) -> None:
        """Takes everything that was posted."""
        ...

    def hurry(self) -> None:
        """Takes what a rank left there before it was lost."""
        ...

    def rest(self) -> None:
        """Takes everything that was posted. From then on, new posts wake this rank."""
        ...

    def given_up(self) -> None:
        """Makes the others hear that a call was given up before they complete it."""
        ...

    def end(self) -> None:
        """Takes what was posted, and stops posting."""
        ...

    def close(self) -> None:
        """Releases all memory."""
        ...


class Calls:
    """The collectives of one group: the `Host` of its operations."""

    def __init__(
        self, party: Party, *, teams: Teams, records: Records, op_timeout: float, way: int = 0
    ) -> None:
        """`way`: the bytes that are in flight, and not acknowledged, while the wire is busy."""
        self.party = party
        self.pushes = min(way, MAX_PUSHED)  # see `Host`
        self.teams = teams  # the ranks of each host
        self.records = records
        self.tags = TagCounts(party.rank, party.size)
        self.ops: dict[Key, Operation] = {}
        """The pending collectives that have a number."""
        self.deferred: list[Operation] = []
        """The collectives that wait for a number, in the order of their calls."""
        self.held_from: int | None = None
        """Collectives without a tag are held from this number on. None: they are not."""
        self._held: deque[Operation] = deque()  # in the order of their numbers; some have ended
        self.lane: Lane | None = None  # the shared memory, once the ranks have agreed on it
        # makes that memory at the first call; None: there is none to make
        self.setup: Setup | None = None
        self.posting: Posting | None = None  # posts collectives with a tag there
        self.ends = Ends(self)
        self.waiting = WaitingCalls(party.loop, records, self.ends.cancelled)
        self.arrivals = Arrivals(self)
        self._op_timeout = op_timeout  # seconds, for calls without a timeout
        self._unsolicited = [0] * party.size  # bytes by peer, see MAX_UNSOLICITED
        # The rest of what an operation needs of its host:
        self.finished, self.failed = self.ends.finished, self.ends.failed
        # For a peer that sent nonsense, or called something else:
        self.blame, self.differ = self.ends.blame, self.ends.differ

    # -- from the group ---------------------------------------------------------------------------

    def launch(
        self,
        op: str,
        call: str,
        start: Start,
        *,
        tag: object = None,
        timeout: float | None = None,
        nbytes: int = 0,
        place: int = 0,
        settles: bool = False,
    ) -> Work[Any]:
        """Start a collective. `call` says in words what all ranks must agree on. `settles`: see
        `aiodist.phases.base.Call`."""
        party = self.party
        if self.setup is not None and not isinstance(tag, bytes):  # not for aiodist's own
            self.setup.begin()
            if settles and tag is None and not self.setup.over:
                self.hold()
        lane = self.lane
        alone = tag is None and not spans_hosts(self.teams)
        if not alone or lane is None or self.tags.upcoming(None) < lane.first:
            # If a peer has given this collective up, its verdict may have arrived behind its
            # contribution. In shared memory alone, all ranks see the abort word.
            party.endpoint.poll()
        party.check_open()
        work: Work[Any] = Work.begin(party.loop, op, tag, None, nbytes)
        operation = Operation(self, work, tag, call.encode(), start, party.size, place)
        self._begun(operation)
        work._on_cancel = partial(self.ends.cancelled, operation)
        if self.is_frozen(tag):
            self.deferred.append(operation)
        else:
            if self._enter(operation):
                operation.advance()
                self.ends.review(operation)
            if tag is not None and self.posting is not None and not operation.done:
                self.posting.rest()  # missing data may be posted
            if not operation.done and operation.waiting_for is not None:
                party.endpoint.progress.inline(
                    lambda: operation.done,
                    lambda: None if (peer := operation.waiting_for) is None else party.link(peer),
                )
        # Most small collectives are done by now, and need no timer. So this comes last.
        deadlines.arm(self, operation, self._op_timeout if timeout is None else timeout)
        return work

    def forgo(self, op: str, tag: object, error: BaseException) -> None:
        """Use up the number of a collective whose call raises `error`, because its arguments are
        bad.

        The other ranks hear at once that this collective will not take place.
        """
        party = self.party
        if self.setup is not None and not isinstance(tag, bytes):  # not for aiodist's own
            self.setup.begin()
        work: Work[Any] = Work.begin(party.loop, op, tag)
        operation = Operation(self, work, tag, f"{op}(?)".encode(), refused, party.size)
        self._begun(operation)
        operation.close()
        verdict = failures.verdict_of(error, party)
        if verdict.reason in (failures.LOST, "timeout", "mismatch"):
            work.fail(error)  # of an earlier step of the call: the others get an error like it
        else:
            by, text = verdict.rank, verdict.text
            refused_for = f"the call was refused: {text}"
            work.fail(party.error(CollectiveAbortedError, refused_for, rank=by, reason=text))
        work.exception()  # mark it as seen: the call raises the other error
        failures.mark_forgone(error)
        if self.is_frozen(tag):
            self.deferred.append(operation)
        else:
            self._enter(operation)

    # A collective that began within its call becomes an operation if it has to wait. Its first
    # steps are done, and the executor goes on with the next step. `prepared.express` explains
    # why that is right in shared memory. Over links, frames were already sent, and some were taken
    # directly from a link. The operation can go on for these reasons:
    #
    # * The frames are those of the plan, byte for byte, on the same links and in the same order. So
    #   a peer sees no difference. Only their number has to be passed on, because a slot is the
    #   number of a frame between two ranks. `Exchange.catch_up` counts the frames that were sent
    #   and received, so the next frame of a peer has the slot that is due.
    # * A peer that sent a frame has entered (`heard`). What was sent to other peers counts as
    #   unasked (`may_send`) until they say something. An operation would have counted the same.
    # * Unlike on a lane, links were read meanwhile, because the expected frame may be behind
    #   others. Frames of this number were kept as early frames, because no operation had the number
    #   yet. `_enter` takes the number and hands them over: a verdict ends the operation, and frames
    #   are delivered in their slots. A frame is either taken by the call or kept, never both
    #   (`take_early`).
    # * Nothing was pending when the call began (`is_idle`), and no call can come in between. So
    #   `_enter` takes the number that the frames already name. A rank that asks meanwhile
    #   hears that this one has entered, and the tag is not forgotten (`TagCounts.begin`).
    # * No rank was lost when the call began. If one is by now, it may have completed the collective
    #   before (`Ends.review`).
    # * The executor and its memory stay the same, with the partial results of the finished steps.
    #   So no reduction is repeated or left out. Only the source of frames changes
    #   (`Executor.hand_over`).
    #
    # If the group has ended by what was read, no operation is made, because nothing would end it.

    def take_over(
        self,
        work: Work[Any],
        call: bytes,
        executor: Executor | None,
        rest: Program,
        seconds: float,
        *,
        came: Mapping[int, memoryview] | None = None,
        lane: Lane | None = None,
    ) -> Operation | None:
        """Make an operation of a collective that began within its call.

        Its first phase is under way in `executor`, and `rest` has the phases after it. Without an
        executor, `rest` has all phases.

        `came`: the first frames of other ranks, if the collective already has its number. `lane`:
        the lane of the collective, if that does not follow from its number.
        """
        operation = Operation(self, work, work.tag, call, lambda _: rest, self.party.size)
        if lane is not None:
            operation.lane = lane
            operation.heard.update(lane.others)  # all have entered it there
        if work.record is None:
            self.records.begin(work, call)
        if self.party.ended is not None:  # by a frame that came while we looked for another one
            if lane is not None:
                lane.leave(operation, failed=True)
            work.fail(copy.copy(self.party.ended))
            return None
        work._on_cancel = partial(self.ends.cancelled, operation)
        if executor is not None:
            operation.carry_on(executor)
        wrong: dict[int, ProtocolError] = {}
        for src, data in (came or {}).items():
            try:
                deliver(operation.message(src, 0, len(data)), (data,), len(data))
            except ProtocolError as error:
                wrong[src] = error
        if self._enter(operation, has_number=came is not None, has_begun=True):
            operation.advance()
            # A waiting call has entered before, perhaps before a rank was lost that had completed
            # it. That loss makes it an operation, and `rank_lost` checks it.
            if came is None:
                self.ends.review(operation, has_begun=True)
        deadlines.arm(self, operation, seconds, 0.0 if came is None else work.elapsed)
        work.for_user(self.records.unseen)
        for src, why in wrong.items():
            self.party.endpoint.blame(self.party.ranks[src], why)
        return operation

    def _begun(self, op: Operation) -> None:
        if op.tag != SETUP_TAG:
            self.records.begin(op.work, op.call)
        else:  # aiodist's own, which the user does not know
            self.records.started(op.work)

    # -- numbers ----------------------------------------------------------------------------------

    def is_frozen(self, tag: object) -> bool:
        """Return whether a call with `tag` has to wait for its number."""
        # The tag may be free again while earlier calls still wait for COMMIT.
        if tag in self.tags.frozen:
            return True
        return bool(self.deferred) and any(op.tag == tag for op in self.deferred)

    def _enter(
        self, operation: Operation, *, has_number: bool = False, has_begun: bool = False
    ) -> bool:
        """Give `operation` its number, unless its Work has one, and then what came early for it.

        `has_begun`: it began within its call. No rank was lost then.

        True: the caller has to advance and review the operation. It does not run in here.
        """
        tag = operation.tag
        seq = operation.work.seq if has_number else self.tags.take(tag)
        assert seq is not None
        operation.seq = operation.work.seq = seq
        if operation.done and operation.work.record is not None:
            operation.work.record.numbered(seq)
        if operation.work.trace is not None:
            operation.work.trace("entered", operation.work, None)
        key = (tag, seq)
        # List it before it gets its early frames. They may end it, and only a listed operation can
        # be ended (`Ends.failed`).
        self.ops[key] = operation
        lane, is_held = self.lane, tag is None and self.held_from is not None
        if is_held:
            self._held.append(operation)
        elif lane is not None and tag is None and seq >= lane.first:
            operation.lane = lane
        verdict, early = self.arrivals.take(key)
        if verdict is not None:
            self.ends.end(operation, verdict)
            return False
        if operation.done:  # given up while it waited for its number
            error = operation.work.error
            if error is None:
                self.ends.cancelled(operation, operation.work)
            else:
                verdict = self.ends.hearsay.own(failures.verdict_of(error, self.party))
                self.ends.give_up(operation, verdict, None)
            return False
        if early is not None and not self.arrivals.replay(operation, early):
            return False
        if operation.lane is None and not is_held:
            operation.start()
            return True
        if operation.lane is not None:
            operation.lane.turns.add(operation)
            if operation.lane.is_broken and not operation.done:
                error = self.party.why_broken()
                assert error is not None
                self.failed(operation, error)
        if not has_number:
            self.ends.review(operation, has_begun=has_begun)
        return False

    def hold(self) -> int:
        """Hold collectives without a tag from now on. Return the number of the first one that is
        held, perhaps since an earlier call."""
        if self.held_from is None:
            self.held_from = self.tags.upcoming(None)
        return self.held_from

    def release(self) -> None:
        """Start what was held, because it is decided whether there is a lane."""
        lane = self.lane
        # A call that comes meanwhile is held behind the others, because lanes need their order.
        while self._held:
            operation = self._held.popleft()
            if lane is not None and operation.seq >= lane.first:
                operation.lane = lane
                if operation.done:
                    lane.leave(operation, failed=True)  # the others must pass over it, too
                else:
                    lane.turns.add(operation)
            elif not operation.done:
                operation.start()
                operation.advance()
            self.ends.review(operation)
        self.held_from = None

    def undefer(self) -> None:
        """Enter the operations whose tags are free again."""
        # Empty the list first: an operation that enters may end, and then the program may call the
        # next one.
        deferred, self.deferred = self.deferred, []
        for operation in deferred:
            if self.is_frozen(operation.tag):
                self.deferred.append(operation)
            elif self._enter(operation):
                operation.advance()
                self.ends.review(operation)
        if self.posting is not None and self.ops:
            self.posting.rest()

    def find(self, key: Key) -> Operation | None:
        """Return the pending collective with this tag and number."""
        found = self.ops.get(key)
        if found is None:
            found = self.waiting.operation(key)
            if found is not None and found.done:
                return None
        return found

    def forget(self, op: Operation, *, failed: bool) -> None:
        """Remove `op`, which has ended."""
        if op.unsolicited:
            for peer in list(op.unsolicited):
                self.refund(op, peer)
        if self.ops.pop((op.tag, op.seq), None) is not None:
            self.ended(op.tag, failed=failed)
            if op.lane is not None:
                op.lane.leave(op, failed=failed)
        if op.timer is not None:
            op.timer.cancel()
            op.timer = None

    def given_up(self, op: Operation) -> None:
        """Note that this rank has given `op` up, and has told the others."""
        if op.tag is not None and self.posting is not None:
            self.posting.given_up()

    def ended(self, tag: object, *, failed: bool = False) -> None:
        self.tags.release(tag, failed=failed)
        if self.tags.many:
            self.forget_tags()

    def forget_tags(self) -> None:
        """If there are many idle tags, start an agreement on which of them to forget."""
        self._send_about_tags(self.tags.propose())

    def _send_about_tags(self, sends: Sends) -> None:
        for rank, fields in sends:
            self.party.say(rank, kinds.TAGS, *fields)

    def about_tags(self, src: int, fields: Sequence[Any]) -> None:
        """Handle a TAGS frame of `src`. Raises ProtocolError."""
        sends, thawed = self.tags.heard(src, fields)
        self._send_about_tags(sends)
        if thawed:
            self._thaw()

    def _thaw(self) -> None:
        """Do what had to wait for the end of the round about tags."""
        self.arrivals.thaw()
        self.undefer()

    # -- what an operation asks for ---------------------------------------------------------------

    def may_send(self, op: Operation, peer: int, nbytes: int) -> bool:
        """Return whether `nbytes` may go to `peer`, which may not have entered `op`."""
        used = self._unsolicited[peer]
        if used and used + nbytes > MAX_UNSOLICITED:
            if peer not in op.knocked:  # asked repeatedly, until the peer admits it
                op.knocked.add(peer)
                self.party.say(peer, kinds.KNOCK, op.tag, op.seq)
            return False
        self.goes_unasked(op, peer, nbytes)
        return True

    def may_push(self, op: Operation, peer: int, nbytes: int) -> bool:
        """Return whether `nbytes` may go to `peer` before its grant."""
        if self._unsolicited[peer] + nbytes > self.pushes:
            return False
        self.goes_unasked(op, peer, nbytes)
        return True

    def goes_unasked(self, op: Operation, peer: int, nbytes: int) -> None:
        """Count `nbytes` that go to `peer`, or have gone, although it may not have entered `op` and
        may have no memory for them."""
        self._unsolicited[peer] += nbytes
        op.unsolicited[peer] = op.unsolicited.get(peer, 0) + nbytes

    def refund(self, op: Operation, peer: int) -> None:
        """Count nothing for `peer` any more: it has entered `op`, and has granted everything."""
        self._unsolicited[peer] -= op.unsolicited.pop(peer, 0)

    # -- ends -------------------------------------------------------------------------------------

    def rank_lost(self, src: int) -> None:
        """Fail what needs `src`, because that rank is lost."""
        # The order matters. First, no tag stays frozen: calls that waited for one enter now, and
        # fail below like all others. Then the lane goes on, because it may still have everything
        # that an operation needs from the lost rank.
        self.tags.disband()
        self._thaw()
        if self.posting is not None:
            self.posting.end()
        self.waiting.settle()
        if self.lane is not None:
            self.lane.hurry()  # its data is still in shared memory
        if self.posting is not None:
            self.posting.hurry()
        self.ends.lose(src)
        if self.lane is not None:
            self.lane.break_off()
        self.ends.relay.lose(src)

    def close(self, error: AiodistError, *, abort: bool) -> None:
        """Fail everything that is pending. With `abort`, tell the others."""

        def end(op: Operation) -> None:
            if abort:
                verdict = failures.Verdict("aborted", error.message, self.party.rank)
                self.ends.give_up(op, verdict, copy.copy(error))
            else:
                withdraw = partial(self.ends.withdraw, op)
                despite_errors(withdraw, partial(op.work.fail, copy.copy(error)))

        despite_errors(
            self.tags.disband,
            self._thaw,
            *((self.posting.end,) if self.posting is not None else ()),
            self.waiting.settle,
            lambda: despite_errors(*(partial(end, op) for op in self.ops.values())),
            partial(self.ends.hearsay.close, error),
            partial(self.ends.relay.leave, abort=abort),
        )

    def clear(self) -> None:
        """Release everything, because the group has ended here."""
        if self.posting is not None:
            self.posting.close()
            self.posting = None
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        self._held.clear()
        self.arrivals.clear()
        self.ends.relay.clear()

    @property
    def called(self) -> int:
        """How many collectives were called, without those by which ranks agree on shared memory."""
        return self.tags.called - self.tags.upcoming(SETUP_TAG)

    @property
    def pending(self) -> list[Work[Any]]:
        """The Works that are not done, without aiodist's own."""
        operations = [*self.ops.values(), *self.deferred]
        works = [op.work for op in operations if op.tag != SETUP_TAG]
        waiting = [call.work for call in self.waiting.by_key.values()]
        return works + waiting + self.ends.hearsay.held
