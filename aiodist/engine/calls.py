"""The collectives of one group that were called here: each has a number, and is an operation.

Collectives of one tag are numbered in the order of their calls, so a frame says by tag and number
which one it is for. What comes of one that was not called here yet is kept (`arrivals`), and handed
over with the number. A call may have to wait for its number: as long as the ranks agree on shared
memory, or on forgetting the tag.
"""

from __future__ import annotations

import copy
import math
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
from aiodist.errors import AiodistError, CollectiveAbortedError
from aiodist.links.party import Party
from aiodist.recorder import Records
from aiodist.schedules.teams import Teams, spans_hosts
from aiodist.shared_memory.board import digest_of
from aiodist.shared_memory.lane import Lane
from aiodist.transports.base import Link, deliver
from aiodist.wire import kinds
from aiodist.work import Work

MAX_UNSOLICITED = 4 << 20
"""Most bytes that a rank sends another for collectives of which it does not know whether the other
has entered them. Beyond that it knocks first, and waits to be admitted."""

MAX_PUSHED = 8 << 20
"""Most of these, and of what the other has not granted, where ranks are far: bulk plans do not wait
for a round trip before they send their first frames."""


class Setup(Protocol):
    """What has the ranks of a host agree on shared memory. `settling`: calls have to wait for
    it."""

    settling: bool

    def begin(self) -> None:
        """Begins, unless that has been done."""
        ...


class Posting(Protocol):
    """What has collectives with a tag done in shared memory."""

    def read(self) -> None:
        """Takes all that was posted."""
        ...

    def hurry(self) -> None:
        """Takes what a rank has left there that is gone."""
        ...

    def rest(self) -> None:
        """Takes all that was posted, and has this rank woken by what comes."""
        ...

    def given_up(self) -> None:
        """Has the others hear of it that a call was given up, before they complete it."""
        ...

    def end(self) -> None:
        """Takes what was posted, and posts nothing more."""
        ...

    def close(self) -> None:
        """Lets go of all memory."""
        ...


class Calls:
    """The collectives of one group: the `Host` of its operations."""

    def __init__(
        self, party: Party, *, teams: Teams, records: Records, op_timeout: float, way: int = 0
    ) -> None:
        """`way`: bytes that have left and are not answered for, where the wire is busy."""
        self.party = party
        self.pushes = min(way, MAX_PUSHED)  # see `Host`
        self.teams = teams  # the ranks of each host
        self.records = records  # hear of each of them
        self.tags = TagCounts(party.rank, party.size)  # the numbers of collectives
        self.ops: dict[Key, Operation] = {}
        """The collectives that are pending and have a number."""
        self.deferred: list[Operation] = []
        """The collectives that wait for a number, in the order of their calls."""
        self.lane: Lane | None = None  # where they share memory, once that is agreed on
        self.setup: Setup | None = None  # has that made, beside the first of them; None: nothing
        self.posting: Posting | None = None  # has those with a tag posted there
        self.ends = Ends(self)  # how they end, here and elsewhere
        self.waiting = WaitingCalls(party.loop, records, self.ends.cancelled)
        self.arrivals = Arrivals(self)  # takes what comes for them
        self._op_timeout = op_timeout  # seconds for one that was given no timeout
        self._unsolicited = [0] * party.size  # bytes by peer, see MAX_UNSOLICITED
        # The rest of what an operation needs of its host:
        self.finished, self.failed = self.ends.finished, self.ends.failed
        # Where a peer has sent nonsense, or has called something else.
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
    ) -> Work[Any]:
        """Start a collective; `call` says, in words, what all ranks must agree on."""
        party = self.party
        if self.setup is not None and not isinstance(tag, bytes):  # such are aiodist's own
            self.setup.begin()
        if not self._goes_on_lane(tag):
            # If a peer has given it up already, its word may have arrived, behind its contribution.
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
                self.posting.rest()  # what is missing may be posted
            if not operation.done:
                party.endpoint.progress.inline(
                    lambda: operation.done, lambda: self._link_of(operation.waiting_for)
                )
        # Last of all, for most small ones are done by now, and need no timer.
        self._arm(operation, self._op_timeout if timeout is None else timeout)
        return work

    def forgo(self, op: str, tag: object, error: BaseException) -> None:
        """The collective `op` was called with what it cannot take, and the call raises `error`. It
        uses up its number, and the others hear at once that it will not be."""
        party = self.party
        if self.setup is not None and not isinstance(tag, bytes):  # such are aiodist's own
            self.setup.begin()
        work: Work[Any] = Work.begin(party.loop, op, tag)
        operation = Operation(self, work, tag, f"{op}(?)".encode(), refused, party.size)
        self._begun(operation)
        operation.close()
        verdict = failures.verdict_of(error, party.rank)
        text = f"the call was refused: {verdict.text}"
        work.fail(party.error(CollectiveAbortedError, text, rank=verdict.rank, reason=verdict.text))
        work.exception()  # seen: the caller has the other
        failures.mark_forgone(error)
        if self.is_frozen(tag):
            self.deferred.append(operation)
        else:
            self._enter(operation)

    # A collective that is begun within its call becomes an operation when what it waits for does
    # not come. Its first steps are done then, and stay done: the executor goes on with the next
    # one. Why that is right in shared memory, `prepared.express` says. Over links it has sent
    # frames then, and has taken some straight from a link. Why the operation can go on there:
    #
    # * The frames are those of the plan, byte for byte, and travel on the same links in the same
    #   order. So a peer cannot tell who sent them, and all that has to be told is how many: a slot
    #   is the number of a frame between two ranks, and `Exchange.catch_up` counts what was sent
    #   and what has come. The next frame of a peer has the slot that is due.
    # * Who was heard has entered (`heard`), and to who was not, what was sent counts as unasked
    #   (`may_send`), until a word of it comes: both as if an operation had done it.
    # * Unlike on a lane, links were read meanwhile, as a frame that is looked for may stand behind
    #   others. What belongs to this number could not be handed to an operation, as there was none:
    #   it was kept like all that comes early, as the number is not taken yet. `_enter` takes the
    #   number and hands over what was kept: a verdict ends the operation, frames are delivered in
    #   their slots. A frame is either taken by the call or kept, never both (`take_early`).
    # * Nothing was pending when it began (`is_idle`), and no call comes in between, so the number
    #   that `_enter` takes is the one that the frames already name.
    # * The executor and its memory are the same as before, with the partial results where the plan
    #   has them at that step: no reduction is done again, and none is left out. Only whom it asks
    #   for frames is another one from here on (`Executor.hand_over`).
    #
    # If the group has ended by what was read, there is no operation: nothing would hear of it.

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
        """A collective that was begun within its call is an operation from here on. Its first phase
        is under way in `executor`, and `rest` is what comes after that; without an executor, it is
        all there is.

        `came`: of one that has its number, the first frames of others, by rank. `lane`: where it is
        under way, if that is no matter of its number.
        """
        operation = Operation(self, work, work.tag, call, lambda _: rest, self.party.size)
        if lane is not None:
            operation.lane = lane
            operation.heard.update(lane.others)  # they have met there
        if work.record is None:
            self._begun(operation)
        if self.party.ended is not None:  # by what came while we looked for a frame
            if lane is not None:
                lane.leave(operation, failed=True)
            work.fail(copy.copy(self.party.ended))
            return None
        work._on_cancel = partial(self.ends.cancelled, operation)
        if executor is not None:
            operation.carry_on(executor)
            for peer, nbytes in executor.sent():
                if peer not in operation.heard:
                    self.goes_unasked(operation, peer, nbytes)
        for src, data in (came or {}).items():
            deliver(operation.message(src, 0, len(data)), (data,), len(data))
        if self._enter(operation, has_number=came is not None):
            operation.advance()
            # One that waited had entered before, perhaps before somebody was lost, who may have
            # been done with it: `rank_lost`, by which it is an operation now, looks at it.
            if came is None:
                self.ends.review(operation)
        self._arm(operation, seconds, 0.0 if came is None else work.elapsed)
        work.for_user(self.records.unseen)
        return operation

    def _arm(self, operation: Operation, seconds: float, passed: float = 0.0) -> None:
        if not operation.done and seconds != math.inf:
            deadlines.arm(self, operation, seconds, passed)

    def _begun(self, op: Operation) -> None:
        if op.tag != SETUP_TAG:
            self.records.begin(op.work, op.call)
        else:  # aiodist's own, of which the user knows nothing
            self.records.started(op.work)

    def _link_of(self, peer: int | None) -> Link | None:
        return None if peer is None else self.party.link(peer)

    # -- numbers ----------------------------------------------------------------------------------

    def _goes_on_lane(self, tag: object) -> bool:
        """Whether the next call with `tag` runs in shared memory alone, where its abort word is
        seen by all. (Those that were called while ranks agreed on that memory run over links.)"""
        lane = self.lane
        if tag is not None or lane is None or spans_hosts(self.teams):
            return False
        return self.tags.upcoming(None) >= lane.first

    def is_frozen(self, tag: object) -> bool:
        """Whether a call with `tag` has to wait for its number."""
        if tag is None:
            return self.setup is not None and self.setup.settling
        # A tag may be free again while those that were called before wait for COMMIT.
        if tag in self.tags.frozen:
            return True
        return bool(self.deferred) and any(op.tag == tag for op in self.deferred)

    def _enter(self, operation: Operation, *, has_number: bool = False) -> bool:
        """Give `operation` its number, unless its Work has one, and what came before it. True: it
        is at its first step, and the caller is to have it go on, and reviewed. (So it does not run
        below this.)"""
        tag = operation.tag
        seq = operation.work.seq if has_number else self.tags.take(tag)
        assert seq is not None
        operation.seq = operation.work.seq = seq
        if operation.work.trace is not None:
            operation.work.trace("entered", operation.work, None)
        key = (tag, seq)
        # It is listed before what came early is handed to it. That may end it, and only what is
        # listed can be ended (`Ends.failed`).
        self.ops[key] = operation
        lane = self.lane
        if lane is not None and tag is None and seq >= lane.first:
            operation.lane = lane
            operation.digest = digest_of(operation.call)
        verdict, early = self.arrivals.take(key)
        if verdict is not None:
            self.ends.end(operation, verdict)
            return False
        if operation.done:  # given up while it waited for its number
            error = operation.work.error
            if error is None:
                self.ends.cancelled(operation, operation.work)
            else:
                verdict = failures.verdict_of(error, self.party.rank)
                self.ends.give_up(operation, verdict, None)
            return False
        if early is not None and not self.arrivals.replay(operation, early):
            return False
        if operation.lane is None:
            operation.start()
            return True
        operation.lane.add(operation)
        if operation.lane.is_broken and not operation.done:
            error = self.party.why_broken()
            assert error is not None
            self.failed(operation, error)
        if not has_number:
            self.ends.review(operation)
        return False

    def undefer(self) -> None:
        """Let those in whose tag is free again."""
        # Emptied first, since an operation that enters may end, and by that let the program call
        # the next one.
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
        """The collective that is pending with this tag and number."""
        found = self.ops.get(key)
        if found is None:
            found = self.waiting.operation(key)
            if found is not None and found.done:
                return None
        return found

    def forget(self, op: Operation, *, failed: bool) -> None:
        """`op` has ended."""
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
        """The others were told that `op` is given up here."""
        if op.tag is not None and self.posting is not None:
            self.posting.given_up()

    def ended(self, tag: object, *, failed: bool = False) -> None:
        """A collective with `tag` has ended."""
        self.tags.release(tag, failed=failed)
        if self.tags.many:
            self.forget_tags()

    def forget_tags(self) -> None:
        """There are many idle tags: have the ranks agree which of them can be forgotten."""
        self._send_about_tags(self.tags.propose())

    def _send_about_tags(self, sends: Sends) -> None:
        for rank, fields in sends:
            self.party.say(rank, kinds.TAGS, *fields)

    def about_tags(self, src: int, fields: Sequence[Any]) -> None:
        """A TAGS frame of `src` has come. Raises ProtocolError."""
        sends, thawed = self.tags.heard(src, fields)
        self._send_about_tags(sends)
        if thawed:
            self._thaw()

    def _thaw(self) -> None:
        """The round about tags is over: do what had to wait for its end."""
        self.arrivals.thaw()
        self.undefer()

    @property
    def setting_up(self) -> Operation | None:
        """The collective by which ranks agree on shared memory, if one is pending."""
        return next((op for op in self.ops.values() if op.tag == SETUP_TAG), None)

    # -- what an operation asks for ---------------------------------------------------------------

    def may_send(self, op: Operation, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer`, of which nobody knows whether it has entered `op`."""
        used = self._unsolicited[peer]
        if used and used + nbytes > MAX_UNSOLICITED:
            if peer not in op.knocked:  # this is asked again and again, until it is admitted
                op.knocked.add(peer)
                self.party.say(peer, kinds.KNOCK, op.tag, op.seq)
            return False
        self.goes_unasked(op, peer, nbytes)
        return True

    def may_push(self, op: Operation, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer` that it has not granted yet."""
        if self._unsolicited[peer] + nbytes > self.pushes:
            return False
        self.goes_unasked(op, peer, nbytes)
        return True

    def goes_unasked(self, op: Operation, peer: int, nbytes: int) -> None:
        """So many bytes go to `peer`, or have gone, of which nobody knows whether it has entered
        `op`, and has memory for them."""
        self._unsolicited[peer] += nbytes
        op.unsolicited[peer] = op.unsolicited.get(peer, 0) + nbytes

    def refund(self, op: Operation, peer: int) -> None:
        """`peer` has entered `op`, and has granted all that has gone to it."""
        self._unsolicited[peer] -= op.unsolicited.pop(peer, 0)

    # -- ends -------------------------------------------------------------------------------------

    def rank_lost(self, src: int) -> None:
        """`src` is gone: fail what needs it."""
        # The order matters. No tag is frozen any more, so calls that waited for one enter, and are
        # failed below as all others are. The lane goes on before anything is failed: what the lost
        # rank had written is still there, and may be all that an operation needs.
        self.tags.disband()
        self._thaw()
        if self.posting is not None:
            self.posting.end()
        self.waiting.settle()
        if self.lane is not None:
            self.lane.hurry()  # what it has left in shared memory can still be taken
        if self.posting is not None:
            self.posting.hurry()
        self.ends.lose(src)
        if self.lane is not None:
            self.lane.break_off()
        self.ends.relay.lose(src)

    def close(self, error: AiodistError, *, abort: bool) -> None:
        """Fail all that is pending. With `abort`, tell the others."""
        self.tags.disband()
        self._thaw()
        if self.posting is not None:
            self.posting.end()
        self.waiting.settle()
        for op in list(self.ops.values()):
            if abort:
                verdict = failures.Verdict("aborted", error.message, self.party.rank)
                self.ends.give_up(op, verdict, copy.copy(error))
            else:
                self.ends.withdraw(op)
                op.work.fail(copy.copy(error))
        self.ends.hearsay.close(error)
        self.ends.relay.leave(abort=abort)

    def clear(self) -> None:
        """The group has ended here: let go of everything."""
        if self.posting is not None:
            self.posting.close()
            self.posting = None
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        self.arrivals.clear()
        self.ends.relay.clear()

    @property
    def called(self) -> int:
        """How many were called, but for how ranks agree on shared memory."""
        return self.tags.called - self.tags.upcoming(SETUP_TAG)

    @property
    def pending(self) -> list[Work[Any]]:
        """Works that are not done, but for aiodist's own, of which the user knows nothing."""
        operations = [*self.ops.values(), *self.deferred]
        works = [op.work for op in operations if op.tag != SETUP_TAG]
        waiting = [call.work for call in self.waiting.by_key.values()]
        return works + waiting + self.ends.hearsay.held
