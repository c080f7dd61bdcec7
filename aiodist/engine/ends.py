"""How collectives end: with a result, or given up by this rank or by another one.

Whoever gives a collective up tells all others (`verdict_relay`), so that none waits in vain. And
however it ends, its memory is the user's from then on: nothing of it is sent that has not left yet,
and nothing is written to it, also where a frame has come only in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from aiodist.engine import deadlines, failures
from aiodist.engine.early import Key
from aiodist.engine.hearsay import Hearsay
from aiodist.engine.operation import Failure, Operation
from aiodist.engine.roll_call import unmarked
from aiodist.engine.verdict_relay import VerdictRelay
from aiodist.errors import AiodistError, MismatchError, ProtocolError
from aiodist.work import Work


class Called(deadlines.Collectives, Protocol):
    """The collectives of a group, `ops` being those that are pending."""

    ops: dict[Key, Operation]

    def forget(self, op: Operation, *, failed: bool) -> None:
        """Takes `op` off the books: it has ended."""
        ...

    def given_up(self, op: Operation) -> None:
        """The others were told that `op` is given up here."""
        ...


class Ends:
    """The ends of the collectives of one group."""

    def __init__(self, calls: Called) -> None:
        self._calls = calls
        self.party = calls.party
        self.relay = VerdictRelay(self.party)  # tells who gave which up
        self.hearsay = Hearsay(self.party)  # Works that wait until it is known who is lost

    # -- here -------------------------------------------------------------------------------------

    def finished(self, op: Operation, result: Any) -> None:
        """`op` has a result here, or what it returns in place of one."""
        self._calls.forget(op, failed=False)
        if isinstance(result, Failure):
            op.work.fail(result.error)
        else:
            op.work.finish(result)

    def failed(self, op: Operation, error: BaseException) -> None:
        """`op` failed here: tell the others.

        Raises `error` if it is a RecursionError: without stack nothing can be told now, and the
        call that has none left aborts the group (`Operations._overflowed`)."""
        if isinstance(error, RecursionError):
            raise error
        # It has ended before, perhaps by the word of another rank that came within this very step.
        # The first verdict counts, and the others have heard it.
        if self._calls.ops.get((op.tag, op.seq)) is not op:
            return
        if isinstance(error, AiodistError):
            self.locate(error, op)
        verdict = self.hearsay.own(failures.verdict_of(error, self.party.rank))
        self.give_up(op, verdict, failures.raised_by(error))

    def blame(self, op: Operation, src: int, error: ProtocolError) -> None:
        """What `src` sent for `op` makes no sense, which only shows now."""
        self.party.endpoint.blame(self.party.ranks[src], error)
        self.failed(op, self.party.why_lost(src) or error)

    def differ(self, op: Operation, others: Mapping[int, bytes]) -> None:
        """`others`, by rank, called something else than `op`."""
        called = {self.party.rank: op.call, **others}
        calls = {src: unmarked(call).decode(errors="replace") for src, call in called.items()}
        error = MismatchError(failures.mismatch_text(calls), calls=calls)
        self.failed(op, error)

    def cancelled(self, op: Operation, work: Work[Any]) -> None:
        """The Work of `op` was cancelled by its user."""
        if op.seq < 0:
            op.close()  # it waits for its number, under which the others will be told
        elif (loss := self.party.why_broken()) is not None:
            # Programs cancel what is pending because one operation has failed by the loss. The
            # others are told of the loss, because it is what they are to go on after.
            verdict = self.hearsay.own(failures.verdict_of(loss, self.party.rank))
            self.give_up(op, verdict, None)
        else:
            self.give_up(op, failures.cancelled(self.party.rank), None)

    def give_up(
        self, op: Operation, verdict: failures.Verdict, error: BaseException | None
    ) -> None:
        """Tell the others, and fail with `error`, if its Work has not ended yet."""
        # First of all its memory is let go of. To tell the others is to send, and to fail the Work
        # may run the code of the user: both come when nothing here reads or writes that memory any
        # more.
        self.withdraw(op)
        self.relay.tell((op.tag, op.seq), verdict)
        self._calls.given_up(op)
        if error is not None:
            op.work.fail(error)

    def withdraw(self, op: Operation) -> None:
        """Let go of all buffers of `op`: nothing is read or written for it from here on."""
        self._calls.forget(op, failed=True)
        op.close()
        party = self.party
        for peer in range(party.size):
            if peer != party.rank:
                party.discard(peer, op)

    def locate(self, error: AiodistError, op: Operation) -> None:
        """Have `error` say in which group, and in what, it happened."""
        if error.op is None:
            error.group, error.epoch = self.party.group, self.party.epoch
            error.op, error.tag, error.seq = op.work.op, op.tag, op.seq

    # -- elsewhere --------------------------------------------------------------------------------

    def end(self, op: Operation, verdict: failures.Verdict) -> None:
        """Another rank gave `op` up."""
        call = op.call.decode(errors="replace")
        self.withdraw(op)
        where = {
            "group": self.party.group,
            "epoch": self.party.epoch,
            "op": op.work.op,
            "tag": op.tag,
            "seq": op.seq,
        }
        error = verdict.error(self.party.rank, call, where)
        self.hearsay.fail(op.work, verdict, error, where)

    def not_entered(self, op: Operation) -> None:
        """A rank has not called `op` yet: who was lost and gave no word of it never completed it,
        and all wait in vain."""
        for src in self.party.lost():
            if not op.done and src not in op.heard:
                self._failed_by_loss(op, src)

    def review(self, op: Operation) -> None:
        """`op` has just entered: those who are lost and gave no word of it have not, and nor will
        they."""
        for src in self.party.lost():
            if not op.done and (src not in op.heard or op.needs(src)):
                self._failed_by_loss(op, src)

    def lose(self, src: int) -> None:
        """`src` is lost: fail what needs it."""
        # A copy, for whatever fails leaves the books.
        for op in list(self._calls.ops.values()):
            if not op.done and op.needs(src):
                self._failed_by_loss(op, src)
            elif not op.done and src not in op.heard:
                # It has entered if all others have: then it is done, there or here.
                deadlines.ask_whether_entered(self._calls, op)

    def _failed_by_loss(self, op: Operation, src: int) -> None:
        error = self.party.why_lost(src)
        assert error is not None
        self.failed(op, error)
