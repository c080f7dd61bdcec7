"""How collectives end: with a result, or because this rank or another one gave them up.

A rank that gives a collective up tells all others (`verdict_relay`), so that none waits in vain.
After any end the memory belongs to the user again. Frames that have not left are not sent, and
nothing more is written to that memory, even if a frame has arrived in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from aiodist.engine import deadlines, failures
from aiodist.engine.early import Key
from aiodist.engine.hearsay import Hearsay
from aiodist.engine.operation import NoResult, Operation
from aiodist.engine.roll_call import unmarked
from aiodist.engine.verdict_relay import VerdictRelay
from aiodist.errors import AiodistError, MismatchError, ProtocolError, despite_errors
from aiodist.links.peer import InOrder
from aiodist.work import Work

VERDICT_SECONDS = 0.25
"""Seconds for a verdict to come after the leave of a rank to which there is no link."""
STACK_OF_STEP = 100
"""Levels of the stack. A step of an operation takes fewer, without code of the user."""


class Called(deadlines.Collectives, Protocol):
    """The collectives of a group. `ops` are the pending ones."""

    ops: dict[Key, Operation]

    def forget(self, op: Operation, *, failed: bool) -> None:
        """Removes `op`, which has ended."""
        ...

    def given_up(self, op: Operation) -> None:
        """Notes that the others were told that this rank has given `op` up."""
        ...


class Ends:
    """Ends the collectives of one group."""

    def __init__(self, calls: Called) -> None:
        self._calls = calls
        self.party = calls.party
        self.relay = VerdictRelay(self.party)
        self.hearsay = Hearsay(self.party)  # holds Works until it is known which rank is lost

    # -- here -------------------------------------------------------------------------------------

    def finished(self, op: Operation, result: Any) -> None:
        """End `op` with its result, or with the error that its program returned."""
        self._calls.forget(op, failed=False)
        if isinstance(result, NoResult):
            op.work.fail(result.error)
        else:
            op.work.finish(result)

    def failed(self, op: Operation, error: BaseException) -> None:
        """Fail `op`, which failed on this rank, and tell the others.

        Raises `error` if it is a RecursionError and the stack is nearly used up here. Then it may
        have ended anywhere, and nothing can be sent, so the call at the bottom aborts the group
        (`OperationStarts._broken_off`). Otherwise code of the user has used it up, for example a
        codec, and nothing else was broken off.
        """
        if isinstance(error, RecursionError) and not _has_stack(STACK_OF_STEP):
            raise error
        # `op` may have ended before, perhaps by a verdict that came within this very step. The
        # first verdict counts, and the others have heard it.
        if self._calls.ops.get((op.tag, op.seq)) is not op:
            return
        if isinstance(error, AiodistError):
            self.locate(error, op)
        verdict = self.hearsay.own(failures.verdict_of(error, self.party))
        self.give_up(op, verdict, failures.raised_by(error))

    def blame(self, op: Operation, src: int, error: ProtocolError) -> None:
        """Fail `op`, because what `src` sent for it turns out to be nonsense."""
        self.party.endpoint.blame(self.party.ranks[src], error)
        self.failed(op, self.party.why_lost(src) or error)

    def differ(self, op: Operation, others: Mapping[int, bytes]) -> None:
        """Fail `op`, because `others` (by rank) called something else."""
        called = {self.party.rank: op.call, **others}
        calls = {src: unmarked(call).decode(errors="replace") for src, call in called.items()}
        error = MismatchError(failures.mismatch_text(calls), calls=calls)
        self.failed(op, error)

    def cancelled(self, op: Operation, work: Work[Any]) -> None:
        """End `op`, because the user cancelled its Work."""
        if op.seq < 0:
            op.close()  # the others are told once it has a number
        elif (loss := self.party.why_broken()) is not None:
            # A program cancels what is pending because one operation has failed by the loss. So
            # tell the others of the loss. They have to recover from that, and not from a
            # cancellation.
            verdict = self.hearsay.own(failures.verdict_of(loss, self.party))
            self.give_up(op, verdict, None)
        else:
            self.give_up(op, failures.cancelled(self.party.rank), None)

    def give_up(
        self, op: Operation, verdict: failures.Verdict, error: BaseException | None
    ) -> None:
        """Tell the others, and fail the Work with `error`, if it has not ended."""
        # Release the memory first. To tell the others is to send, and to fail the Work may run code
        # of the user. Nothing may read or write that memory then.
        try:
            despite_errors(
                partial(self.withdraw, op),
                partial(self.relay.tell, (op.tag, op.seq), verdict),
                partial(self._calls.given_up, op),
            )
        finally:  # because nothing else would end the Work: the operation is not listed any more
            if error is not None:
                op.work.fail(error)

    def withdraw(self, op: Operation) -> None:
        """Release all buffers of `op`. Nothing is read or written for it from here on."""
        party = self.party
        others = (peer for peer in range(party.size) if peer != party.rank)
        despite_errors(
            partial(self._calls.forget, op, failed=True),
            op.close,
            *(partial(party.discard, peer, op) for peer in others),
        )

    def locate(self, error: AiodistError, op: Operation) -> None:
        """Add the group and the operation to `error`, unless it has them."""
        if error.op is None:
            vars(error).update(self._where(op))

    def _where(self, op: Operation) -> dict[str, Any]:
        """Return the group and the operation, for an error."""
        # Tags of bytes are aiodist's own. They and their numbers mean nothing to the program.
        tag, seq = (None, None) if isinstance(op.tag, bytes) else (op.tag, op.work.seq)
        group, epoch = self.party.group, self.party.epoch
        return {"group": group, "epoch": epoch, "op": op.work.op, "tag": tag, "seq": seq}

    # -- elsewhere --------------------------------------------------------------------------------

    def end(self, op: Operation, verdict: failures.Verdict) -> None:
        """End `op`, because another rank gave it up."""
        call = op.call.decode(errors="replace")
        where = self._where(op)
        error = verdict.error(self.party.rank, call, where)
        try:
            self.withdraw(op)
        finally:
            self.hearsay.fail(op.work, verdict, error, where)

    def not_entered(self, op: Operation) -> None:
        """A rank has not called `op` yet. If a lost rank was not heard in `op`, it never completed
        it, and all ranks wait in vain. So fail `op`."""
        for src in self.party.lost():
            if not op.done and src not in op.heard:
                self._failed_by_loss(op, src)

    def review(self, op: Operation, *, has_begun: bool = False) -> None:
        """Fail `op`, which has just entered, if a lost rank was not heard in it: that rank will not
        enter. `has_begun`: it began before the loss, so that the lost rank may have completed it.
        """
        for src in self.party.lost():
            if has_begun:
                self._lose(op, src)
            elif not op.done and (src not in op.heard or op.needs(src)):
                self._failed_by_loss(op, src)

    def lose(self, src: int) -> None:
        """Fail what needs `src`, which is lost."""
        despite_errors(*(partial(self._lose, op, src) for op in self._calls.ops.values()))

    def _lose(self, op: Operation, src: int) -> None:
        if not op.done and op.needs(src):
            self._failed_by_loss(op, src)
        elif not op.done and src not in op.heard:
            # Ask the ranks that were not heard. If one has not entered `op`, all wait in vain, and
            # `op` fails (`not_entered`). If all have, it completes.
            deadlines.ask_whether_entered(self._calls, op)

    def _failed_by_loss(self, op: Operation, src: int) -> None:
        party = self.party
        error = party.why_lost(src)
        assert error is not None
        # A rank that leaves passes on verdicts first, but only over links. Without one, its leave
        # may be known here before the verdict, because the rank that gave up may still make its
        # link to this one.
        if party.link(src) is None and op.lane is None and isinstance(party.lost()[src], InOrder):
            party.loop.call_later(VERDICT_SECONDS, self.failed, op, error)
        else:
            self.failed(op, error)


def _has_stack(levels: int) -> bool:
    """Return whether so many levels of the stack are left."""
    try:
        return levels == 0 or _has_stack(levels - 1)
    except RecursionError:
        return False
