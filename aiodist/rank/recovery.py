"""Recovery after a loss: `Group.agree`, `shrink` and `rendezvous`.

The coordinator decides. Each group numbers its ballots, and each ballot has one outcome for all.
Ranks that the coordinator ruled lost have no vote, so a ballot ends even if ranks die meanwhile.
The outcome is received independently of the call: if a call was cancelled while the next epoch was
on its way, the next call finds it.

A new epoch is a new context, with an id of its own, on the existing links. So groups that were made
in an earlier epoch go on beside it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from aiodist.engine import failures
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupRevokedError,
)
from aiodist.rank.actor import RankActor
from aiodist.rank.context import Context
from aiodist.rank.deriving import another
from aiodist.wire.frames import pack_fields
from aiodist.wire.limits import MAX_MEMBERS, MAX_TEXT
from aiodist.wire.messages import EpochView, Message
from aiodist.wire.recovery import (
    MAX_BALLOTS,
    BallotResult,
    Cause,
    GiveUpVote,
    Purpose,
    Void,
    Vote,
)

MAX_SENT = MAX_BALLOTS // 2
"""The most votes that a rank has under way in all of its groups. Further ones wait in line.

Each group may have one under way beyond that. Ranks may call in their groups in different orders,
so they could fill all places with votes that wait for each other.
"""

LAST_WORD_SECONDS = 2.0
"""Seconds that a vote whose time is over waits for the coordinator to say which ranks were
missing."""

Outcome = EpochView | BallotResult | Void

_AGREE = Vote(b"", 0, Purpose.AGREE).call


class Recovery:
    """Recovery of one group in one epoch. `ids` are the member ids of its ranks."""

    def __init__(self, actor: RankActor, context: Context, ids: Sequence[str]) -> None:
        self.is_root = actor.context is context
        """Whether this is the group that `connect` gave, in its epoch, and not one made of it."""
        self._actor = actor
        self._context = context
        self._ids = tuple(ids)
        self._number = 0  # of the next ballot; all ranks count alike
        self._unsent: dict[int, Vote] = {}  # by number, until the loop has turned and has sent them
        self._line: dict[int, asyncio.Future[Outcome]] = {}  # of unsent votes that need a place
        self._sent: set[int] = set()  # numbers of votes that are under way
        # The vote that leads to the next epoch. A later call goes on with it.
        self._under_way: tuple[Vote, asyncio.Future[Outcome]] | None = None
        self._has_gone_on = False  # the next epoch has begun, and this one takes no votes

    def check_root(self, method: str) -> None:
        """Raises RuntimeError for a group that was made of another."""
        if not self.is_root:
            raise RuntimeError(
                f"call {method} on the group that connect() returned, because processes can join "
                f"only that group; {self._context.group!r} was made of it"
            )

    async def agree(self, flag: bool, seconds: float) -> bool:
        """Return the AND of the flags of all living ranks."""
        self._check()
        vote = self._new_vote(Purpose.AGREE, flag=flag)
        outcome = await self._wait(vote, self._cast(vote), seconds)
        if isinstance(outcome, Void):
            raise self._error(outcome, vote)
        assert isinstance(outcome, BallotResult)
        return outcome.flag

    def _change_to_no(self, vote: Vote) -> None:
        """Vote False, because the call of `vote` has ended without a verdict.

        The others get a verdict, as if this rank had said no. No effect if it is decided already.
        """
        no = replace(vote, flag=False)
        if vote.number in self._unsent:
            self._unsent[vote.number] = no
        else:
            self._actor.control.amend(vote, no)

    @contextmanager
    def checking(self, purpose: Purpose) -> Iterator[None]:
        """Check the arguments of a call. If they are wrong, the calls of the other ranks fail."""
        try:
            yield
        except (TypeError, ValueError) as error:
            self._check()
            # If a vote is under way, the others go on with that one, or call again.
            under_way = self._under_way
            if purpose is Purpose.AGREE or under_way is None or _is_void(under_way[1]):
                text = failures.verdict_of(error, self._context).text
                self._cast(replace(self._new_vote(purpose), refusal=text[:MAX_TEXT]))
            raise

    async def go_on(
        self,
        purpose: Purpose,
        seconds: float,
        *,
        least: int | None = None,
        most: int | None = None,
    ) -> Context:
        """Return the context of the next epoch: of the survivors, and at a rendezvous of
        joiners."""
        self._check()
        # Others may still work in this epoch, and would wait for this rank in vain. So they hear
        # that it is over, unless the coordinator is gone for good. There is no next epoch then.
        if self._actor.control.is_open:
            self._context.revoke(self._context.rank)
        deadline = self._actor.loop.time() + seconds
        is_stale = self._under_way is not None  # of a call that was cancelled or ran out of time
        while True:
            if self._under_way is None:
                vote = self._new_vote(purpose, least=least, most=most)
                self._under_way = (vote, self._cast(vote))
            under_way = vote, outcome = self._under_way
            try:
                found = await self._wait(
                    vote, outcome, deadline - self._actor.loop.time(), asked=seconds
                )
            finally:
                # An undecided vote stays, for the next call. A failed one leads nowhere.
                if _is_void(outcome) and self._under_way is under_way:
                    self._under_way = None
            self._check()
            if not isinstance(found, Void):
                break
            # This rank votes again if that vote became void for a reason of an earlier call, or
            # because it met calls of `agree`. Those raise GroupRevokedError, or were given up, and
            # their ranks come.
            met_agree = found.cause is Cause.MISMATCH and _AGREE in found.details.values()
            if self._actor.loop.time() >= deadline or not (is_stale or met_agree):
                raise self._error(found, vote)
            is_stale = False
        self._has_gone_on = True
        return self._of_view(found) if isinstance(found, EpochView) else self._of_survivors(found)

    # Votes.

    def _check(self) -> None:
        """Raises the reason if votes are impossible."""
        ended = self._context.ended
        if self._has_gone_on:
            text = "this group has gone on: use the one that shrink() or rendezvous() gave"
            raise self._context.error(GroupRevokedError, text)
        if ended is None or isinstance(ended, GroupRevokedError):
            ended = self._actor.ended  # a revoked context does not hear that this rank has left
        if ended is not None:
            raise copy.copy(ended)

    # How a vote runs, and what may cut it short::
    #
    #     call -> _cast ---- Vote ----> coordinator ---- outcome ----> _hear -> `outcome` is set
    #               |                                                              |
    #             _wait  <---------------------------------------------------------'
    #               |- cancelled (not `agree`), or out of time: GiveUpVote
    #               '- `agree` ends without a verdict: a Vote for False replaces the first one
    #                  (neither has an effect if it is decided by then)
    #
    # `_hear` does not need the caller. A view that comes is adopted even if its call was cancelled,
    # because the other ranks go on with it and connect to this one. The next call gets what the
    # cancelled one would have got (`go_on`).
    #
    # A rank that gives up has to say so, because a vote waits for all living ranks. This is a
    # request: the coordinator may have decided a moment before, and that decision stands for all.
    # The request may be lost with its connection, and the vote is sent again. This does no harm to
    # a vote for the next epoch, because a later call finds the outcome. For `agree` it would, so
    # that vote says False by then.

    def _new_vote(
        self,
        purpose: Purpose,
        *,
        flag: bool = True,
        least: int | None = None,
        most: int | None = None,
    ) -> Vote:
        number, self._number = self._number, self._number + 1
        voters = () if self.is_root else self._ids
        return Vote(self._context.id, number, purpose, flag, voters, least, most)

    def _cast(self, vote: Vote) -> asyncio.Future[Outcome]:
        """Send a vote. Returns its outcome, which need not be awaited."""
        outcome: asyncio.Future[Outcome] = self._actor.loop.create_future()
        # Before the vote, because new members may hear of its outcome sooner than this rank, and
        # connect.
        self._expect(vote, True)
        # When the loop turns, because the vote may decide as soon as it is sent. A call of `agree`
        # that is cancelled before that votes False.
        self._unsent[vote.number] = vote
        self._actor.loop.call_soon(self._line_up, vote.number, outcome)
        return outcome

    def _line_up(self, number: int, outcome: asyncio.Future[Outcome]) -> None:
        """Send a vote once there is a place for it."""
        self._line[number] = outcome
        self._admit()

    def _admit(self) -> None:
        """Send the votes in line for which there are places, in their order."""
        while self._line and (not self._sent or self._actor.votes < MAX_SENT):
            number = next(iter(self._line))
            self._send(number, self._line.pop(number))

    def _send(self, number: int, outcome: asyncio.Future[Outcome]) -> None:
        vote = self._unsent.pop(number)
        try:
            reply = self._actor.control.begin(vote)
        except AiodistError as error:  # the membership has ended meanwhile
            outcome.set_exception(error)
            outcome.exception()  # marks it as retrieved
            self._expect(vote, False)
        else:
            self._actor.votes += 1
            self._sent.add(number)
            reply.add_done_callback(partial(self._hear, vote, outcome))

    def _give_up(self, give_up: GiveUpVote) -> None:
        """Send it behind its vote, which needs no place in line, because this ends it at once."""
        if (outcome := self._line.pop(give_up.number, None)) is not None:
            self._send(give_up.number, outcome)
        self._actor.control.tell(give_up)

    def _expect(self, vote: Vote, is_expecting: bool) -> None:
        if vote.purpose is Purpose.RENDEZVOUS:
            self._actor.endpoint.expect(is_expecting)

    def _hear(
        self, vote: Vote, outcome: asyncio.Future[Outcome], reply: asyncio.Future[Message]
    ) -> None:
        """Take in the outcome. A view becomes the newest, even if no call waits for it."""
        try:
            found = reply.result()
            if isinstance(found, EpochView):
                self._note_gone([one.id for one in found.members], found.epoch)
                self._actor.adopt(found)
            elif isinstance(found, BallotResult) and vote.purpose is Purpose.SHRINK:
                self._note_gone(found.members, found.epoch)
            elif not isinstance(found, (BallotResult, Void)):
                raise self._actor.control.unexpected(found)
            outcome.set_result(found)
        except Exception as error:
            outcome.set_exception(error)
            outcome.exception()  # marks it as retrieved
        self._expect(vote, False)
        self._actor.votes -= 1
        self._sent.remove(vote.number)
        self._admit()

    def _note_gone(self, stay: Iterable[str], epoch: int) -> None:
        """Note which ranks are not in the next epoch, of which the ids in `stay` are members.

        This rank may not have heard of all losses, because the old group hears no more of them once
        it is revoked. The endpoint forgets the reasons when it adopts the next view.
        """
        known, members = self._context.lost(), {*stay}
        for rank, one in enumerate(self._ids):
            if one not in members:
                reason = known.get(rank, f"epoch {epoch} began without it")
                self._context.gone.setdefault(rank, reason)

    async def _wait(
        self,
        vote: Vote,
        outcome: asyncio.Future[Outcome],
        seconds: float,
        asked: float | None = None,
    ) -> Outcome:
        """Wait for the outcome for `seconds`, which are the rest of those that were `asked` for.

        A call that stops waiting makes the vote void, or for `agree` False, unless the vote is
        decided already.
        """
        give_up = GiveUpVote(vote.context, vote.number, Cause.CANCELLED, "the call was cancelled")
        try:
            done, _ = await asyncio.wait(
                {outcome}, timeout=None if seconds == math.inf else seconds
            )
            if not done:
                limit = seconds if asked is None else asked
                text = f"{vote.call} was not decided within {limit:g} s"
                give_up = GiveUpVote(vote.context, vote.number, Cause.TIMEOUT, text)
                control = self._actor.control
                self._give_up(give_up)
                if absence := control.absence:
                    text += f"; {absence}{self._what_to_do(vote)}"
                else:
                    done, _ = await asyncio.wait({outcome}, timeout=LAST_WORD_SECONDS)
                    text += self._no_answer(limit)
                if not done:
                    if vote.purpose is Purpose.AGREE:
                        self._change_to_no(vote)
                    raise self._context.error(CollectiveTimeoutError, text, op=vote.purpose.value)
        except asyncio.CancelledError:
            if vote.purpose is not Purpose.AGREE:
                self._actor.loop.call_soon(self._give_up, give_up)  # behind `_line_up`
            else:
                self._change_to_no(vote)
            raise
        try:
            return outcome.result()
        except CoordinatorLostError as error:
            text = f"{error.message}; members can no longer change: start all ranks again"
            where: dict[str, Any] = {"op": vote.purpose.value, "seq": vote.number}
            raise self._context.error(CoordinatorLostError, text, **where) from None

    def _error(self, void: Void, vote: Vote) -> AiodistError:
        """Return the error that a void vote stands for."""
        ranks = {one: rank for rank, one in enumerate(self._ids)}
        if void.by not in ranks:
            return self._actor.control.unexpected(void)
        details = {ranks[one]: str(text) for one, text in void.details.items() if one in ranks}
        text = void.text
        if void.cause is Cause.TIMEOUT and details:  # else the text says how many have joined
            text += missing_text(details) + self._what_to_do(vote)
        elif void.cause is Cause.MISMATCH:
            if vote.purpose is Purpose.AGREE:
                for rank, call in details.items():
                    if call != _AGREE:
                        text = f"rank {rank} has called {call}: do the same, or close the group"
                        return self._context.error(
                            GroupRevokedError, text, op=vote.purpose.value, seq=vote.number
                        )
            text = failures.mismatch_text({self._context.rank: vote.call, **details})
        verdict = failures.Verdict(void.cause.value, text, ranks[void.by], details)
        where = {
            "group": self._context.group,
            "epoch": self._context.epoch,
            "op": vote.purpose.value,
            "seq": vote.number,
        }
        return verdict.error(self._context.rank, vote.call, where)

    def _no_answer(self, limit: float) -> str:
        """Say that the coordinator does not answer a vote that has run out of time."""
        # Before the vote it may have had nothing to say.
        control = self._actor.control
        silence = max(LAST_WORD_SECONDS, min(control.silence, limit + LAST_WORD_SECONDS))
        it = "it" if control.returns else "it, or the rank or launcher that it lives in,"
        return (
            f"; the coordinator at {control.address} has not answered for {silence:.0f} s: {it} "
            "may be stopped or cut off"
        )

    def _what_to_do(self, vote: Vote) -> str:
        """Say what can be called once `vote` has run out of time."""
        if vote.purpose is Purpose.AGREE:
            return ""
        return f"; the group is revoked: call shrink(){' or rendezvous()' * self.is_root}"

    # The next epoch.

    def _of_view(self, view: EpochView) -> Context:
        actor = self._actor
        # The view was for a call that gave up. It was adopted nevertheless, and another epoch may
        # have begun since.
        if view.epoch != actor.view.epoch:
            raise self._context.error(GroupRevokedError, f"epoch {actor.view.epoch} has begun")
        actor.context = self._make(view.context, view.epoch, actor.roots)
        return actor.context

    def _of_survivors(self, verdict: BallotResult) -> Context:
        """Make the next context of a group that was made of another."""
        roots = dict(zip(self._ids, self._context.ranks, strict=True))
        if self._ids[self._context.rank] not in verdict.members or {*verdict.members} - {*roots}:
            raise self._actor.control.unexpected(verdict)
        own = _id(pack_fields(self._context.id, verdict.epoch, *verdict.members))
        return self._make(own, verdict.epoch, [roots[one] for one in verdict.members])

    def _make(self, id: bytes, epoch: int, roots: Sequence[int]) -> Context:
        old, layout = self._context, self._actor.layout(roots)
        return another(old, id=id, group=old.group, epoch=epoch, ranks=roots, layout=layout)


def _is_void(outcome: asyncio.Future[Outcome]) -> bool:
    """Whether a vote has ended without a decision."""
    if not outcome.done():
        return False
    return outcome.exception() is not None or isinstance(outcome.result(), Void)


def check_sizes(least: int | None, most: int | None) -> None:
    """Raises TypeError or ValueError for sizes that no rendezvous takes."""
    for label, size in (("min_size", least), ("max_size", most)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(f"{label} is an int or None, not {size!r}")
        if size is not None and not 1 <= size <= MAX_MEMBERS:
            raise ValueError(f"{label} is from 1 to {MAX_MEMBERS}, not {size}")
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_size={least} is over max_size={most}")


def missing_text(missing: Mapping[int, str]) -> str:
    """Name the ranks that have not voted, and what each is doing."""
    each = [f"rank {rank} ({text or 'no answer'})" for rank, text in sorted(missing.items())]
    return f": not called by {', '.join(each)}"


def _id(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
