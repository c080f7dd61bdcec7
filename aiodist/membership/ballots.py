"""The ballots of one group: votes of members that agree, or go on without those that are lost.

A ballot is known by a context (a group in one epoch, or one made of it) and a number, and has one
outcome. It is decided once all of its voters that are alive have voted. Who is alive is for the
coordinator to say, so that the outcome is the same for all, whoever dies meanwhile. Who may still
come back to a coordinator that was away is waited for: it may have heard of an outcome.

Outcomes are remembered, for those who did not hear them before their connection broke, and for
those who vote late on what is void.

**What makes an outcome the only one.** Members must never hear different ones, or one goes on in a
next epoch of which another knows nothing. In the order of what may happen:

* *Nothing happens.* All votes come to one coordinator, which takes one event after the other. The
  event that completes a ballot closes it, so there is no second one that could. The number is each
  member's count of its own votes in that context: so all mean the same call, and where they do not
  (other words, other voters), the ballot is void, for all.
* *A voter dies.* Its vote goes with it, and it is not waited for: it was ruled lost, which is final
  (`returning.judge` refuses it for good). All who are left are judged by the same list of members.
* *A voter gives up*, by its deadline or a cancel. The ballot is void if that comes while it is
  open; else nothing happens, and the outcome is on its way. Which of the two is first is for the
  coordinator to see, and so a voter whose deadline is over waits a moment for the answer.
* *A voter votes late*, or again, as its connection broke. The outcome is there: it gets that one.
* *The coordinator restarts*. Ballots are not on disk, since those who voted know of them. Members
  vote again, under the same number; and before that they say which outcomes they have heard, which
  are the outcomes of all (`learn`). B did not hear this one::

      before    A votes   B votes   decided ──> A hears: yes    the coordinator ends
      after     B is back, votes again    ...   A is back, says: yes          B hears: yes
                                           │
                                           └─ no decision while A is absent: it may have heard one

  So the coordinator that comes back decides nothing while a voter may come back (`waits_for`):
  until then it cannot know whether there is an outcome. Who does not come back within its lease is
  lost, and what it has heard is heard by nobody who is left.
* *The outcome is a view.* It is no entry here, but the group's (`close` with None): the view is on
  disk before anybody hears of it, or, without a state file, the member that has the highest epoch
  brings it along. Whoever votes in a view that is over missed the next one, and is given that
  (`Recovery._answer_late`).

What is not covered is in the guarantees: a voter that heard an outcome, acted on it where others
see it, and died while the coordinator was away; and more outcomes than are remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from aiodist.membership.seats import Seats
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import Failed, Failure, MemberInfo
from aiodist.wire.recovery import MAX_BALLOTS, BallotResult, Cause, Purpose, Void, Vote

BallotKey = tuple[bytes, int]
"""(context, number)."""

Members = Seats[MemberInfo]
"""Living members, by connection; those who may come back, by rank."""

Outcome = BallotResult | Void

REMEMBERED = 1024
"""Outcomes that are remembered for each group."""

_DIFFER = "the ranks called different things, or differ in who they are"


@dataclass(slots=True)
class Ballot:
    """`voters`: the ids of all, in their order (empty: the whole group). `call`: what each of them
    has called. `votes`: by connection, the request and the vote, of those who are alive; `since`:
    when each has voted. The first `passed` voters have voted, or never will."""

    key: BallotKey
    voters: tuple[str, ...]
    call: str
    votes: dict[int, tuple[int, Vote]] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    passed: int = 0

    def electorate(self, members: Members) -> list[int]:
        """The connections of the voters that are alive, in their order."""
        if not self.voters:
            return sorted(members, key=lambda conn: members[conn].rank)
        return [conn for one in self.voters if (conn := members.of_id(one)) is not None]

    def waits_for(self, absent: Members) -> list[str]:
        """The ids of its voters among members that may come back."""
        return [one.id for one in absent.values() if not self.voters or one.id in self.voters]

    def is_complete(self, members: Members, absent: Members) -> bool:
        """Whether all voters have voted that are alive, or may come back.

        This is asked after each vote, so it counts. Of a part of the group it looks for a single
        voter that is missing, and goes on from that one the next time: all n votes take n steps.
        """
        if not self.voters:
            return len(self.votes) == len(members) and not absent
        while self.passed < len(self.voters):
            one = self.voters[self.passed]
            conn = members.of_id(one)
            if conn not in self.votes and (conn is not None or absent.of_id(one) is not None):
                return False
            self.passed += 1
        return True

    @property
    def vote(self) -> Vote:
        """What is called, as any one voter says it: the others have called the same."""
        return next(iter(self.votes.values()))[1]

    @property
    def purpose(self) -> Purpose:
        """What is voted on."""
        return self.vote.purpose

    @property
    def flag(self) -> bool:
        return all(vote.flag for _, vote in self.votes.values())


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome for one voter that has nothing to wait for."""

    conn: int
    request: int
    reply: Outcome | Failed


class Ballots:
    """All ballots of one group that somebody waits for, and what came of those before."""

    def __init__(self) -> None:
        self._ballots: dict[BallotKey, Ballot] = {}
        self.voted: dict[int, dict[BallotKey, Ballot]] = {}
        """The ballots in which each connection has voted."""
        self._outcomes: dict[BallotKey, tuple[tuple[str, ...] | None, Outcome]] = {}
        """With the voters of each; None: not known, it was heard of from a member."""

    def cast(
        self, members: Members, conn: int, request: int, vote: Vote, now: float = 0.0
    ) -> list[Answer]:
        """Member `conn` votes: who hears what of it now."""
        wrong = self._refuse(members, conn, vote)
        if wrong is not None:
            return [Answer(conn, request, wrong)]
        key, own = (vote.context, vote.number), members[conn].id
        voters, known = self._outcomes.get(key, (None, None))
        if known is not None:
            if voters is not None and voters != vote.members:  # it was decided among others
                known = Void(Cause.MISMATCH, _DIFFER, own, {own: vote.call})
            return [Answer(conn, request, known)]
        ballot = self._ballots.get(key)
        if ballot is None:
            ballot = self._ballots[key] = Ballot(key, vote.members, vote.call)
        differs = vote.members != ballot.voters
        if not differs:  # one list of them is kept, not one of each voter
            vote = replace(vote, members=ballot.voters)
        ballot.votes[conn] = (request, vote)
        ballot.since.setdefault(conn, now)
        self.voted.setdefault(conn, {})[key] = ballot
        # Voters need not all be there when the first one votes, and the first may even vote in
        # vain: it loses its connection, and votes for something else when it is back. So the ballot
        # takes its words from whoever is in it alone, and all who come later are measured by these.
        # All votes in a ballot call the same, or it would be void: so one text stands for all. A
        # voter that is alone in it may have voted before, over this connection, for something else.
        if len(ballot.votes) == 1:
            ballot.call = vote.call
        if differs or vote.call != ballot.call:
            ids = {members[one].id: its.call for one, (_, its) in ballot.votes.items()}
            void = Void(Cause.MISMATCH, _DIFFER, own, ids)
            return self.close(ballot, void)
        return []

    def give_up(
        self,
        members: Members,
        absent: Members,
        conn: int,
        key: BallotKey,
        cause: Cause,
        text: str,
        seen: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """`conn`, which has voted, waits no more. Nothing happens where there is nothing to void:
        the outcome is on its way. `seen`: what members are doing, by id."""
        ballot = self._ballots.get(key)
        # Two words of one voter may cross with the outcome. If the ballot is closed, its outcome
        # was sent before this word was read, and stands. If this one has not voted (its vote came
        # over another connection that broke), it cannot give up what it has not begun.
        if ballot is None or conn not in ballot.votes:
            return []
        missing = [members[one].id for one in ballot.electorate(members) if one not in ballot.votes]
        missing += ballot.waits_for(absent)
        details = {one: (seen or {}).get(one, "") for one in missing}
        void = Void(cause, text[:MAX_TEXT], members[conn].id, details)
        return self.close(ballot, void)

    def of(self, conn: int) -> list[Ballot]:
        """The ballots in which it has voted, and that are not decided."""
        return list(self.voted.get(conn, {}).values())

    def missing(self, members: Members, key: BallotKey) -> list[int]:
        """The living voters that have not voted."""
        ballot = self._ballots.get(key)
        if ballot is None:
            return []
        return [one for one in ballot.electorate(members) if one not in ballot.votes]

    def gone(self, conn: int) -> None:
        """Nothing comes over `conn` any more: its member is lost, or votes again over another."""
        for key, ballot in self.voted.pop(conn, {}).items():
            del ballot.votes[conn]
            del ballot.since[conn]
            ballot.passed = 0  # its voter may be alive, and is waited for again
            if not ballot.votes:
                del self._ballots[key]

    def new_view(self) -> None:
        """Others are members now, maybe voters that were not known until now."""
        for ballot in self._ballots.values():
            ballot.passed = 0

    def decided(
        self, members: Members, absent: Members, key: BallotKey | None = None
    ) -> Iterator[Ballot]:
        """The ballots in which all living voters have voted, or of them that with this `key`; each
        is to be taken by `close`."""
        return (one for one in self._open(key) if one.is_complete(members, absent))

    def of_another_view(self, context: bytes, key: BallotKey | None = None) -> Iterator[Ballot]:
        """The ballots of the whole group that are not of the view that `context` names, or of them
        that with this `key`."""
        return (one for one in self._open(key) if not one.voters and one.key[0] != context)

    def _open(self, key: BallotKey | None) -> Iterator[Ballot]:
        for one in list(self._ballots) if key is None else [key]:
            ballot = self._ballots.get(one)  # maybe closed with one before it
            if ballot is not None:
                yield ballot

    def close(self, ballot: Ballot, outcome: Outcome | None) -> list[Answer]:
        """The ballot is over, with this outcome (None: a view, which is the group's)."""
        del self._ballots[ballot.key]
        for conn in ballot.votes:
            del self.voted[conn][ballot.key]
        if outcome is None:
            return []
        self._remember(ballot.key, ballot.voters, outcome)
        return [Answer(conn, request, outcome) for conn, (request, _) in ballot.votes.items()]

    def learn(self, key: BallotKey, outcome: Outcome) -> list[Answer]:
        """A member has heard that outcome: so it is that of all."""
        ballot = self._ballots.get(key)
        if ballot is not None:
            return self.close(ballot, outcome)
        self._remember(key, None, outcome)
        return []

    def _remember(self, key: BallotKey, voters: tuple[str, ...] | None, outcome: Outcome) -> None:
        self._outcomes.pop(key, None)
        self._outcomes[key] = voters, outcome
        if len(self._outcomes) > REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def _refuse(self, members: Members, conn: int, vote: Vote) -> Failed | None:
        own = members[conn].id
        if vote.members and own not in vote.members:
            return Failed(Failure.INVALID, "a vote among others: the sender is none of the voters")
        if vote.purpose is Purpose.RENDEZVOUS and vote.members:
            return Failed(Failure.INVALID, "a rendezvous is of the whole group")
        if len(self.voted.get(conn, ())) >= MAX_BALLOTS:
            return Failed(Failure.INVALID, f"{MAX_BALLOTS} votes are under way, the limit")
        return None
