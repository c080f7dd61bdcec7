"""The ballots of one group: votes by which members agree, or go on after a loss.

A ballot has a context (a group in one epoch, or a subgroup), a number, and one outcome. It is
decided when all of its living voters have voted. The coordinator alone says which voters live, so
that all members get the same outcome, even if some die meanwhile. After a restart, the coordinator
also waits for voters that may come back, because they may have heard an outcome before.

Outcomes are remembered for members that lost their connection before they heard one, and for
members that vote late on a void ballot.

**Why an outcome is unique.** If two members heard different outcomes, one would go on in an epoch
of which the other knows nothing. These cases could break that:

* *No failure.* One coordinator gets all votes and handles one event after the other. The event that
  completes a ballot also closes it. The number of a ballot is each member's own count of votes in
  that context, so that equal numbers mean the same call. If calls or voters differ, the ballot is
  void for all.
* *A voter dies.* Its vote is dropped and the ballot no longer waits for it. The loss is final,
  because `returning.judge` refuses that member from then on.
* *A voter gives up*, by its deadline or a cancel. An open ballot becomes void. If the ballot is
  closed, nothing happens, because its outcome is already in flight. The coordinator alone sees
  which came first, so a voter waits a moment for the answer after its deadline.
* *A voter refuses*, because its call has wrong arguments. The ballot becomes void, also if the
  others have voted.
* *A voter votes late*, or again after its connection broke. It gets the outcome that there is.
* *The coordinator restarts*. Ballots are not written to disk, because their voters know them.
  Members vote again under the same number. Before that they report the outcomes that they have
  heard, which become the outcomes of all (`learn`). In this example B did not hear the outcome::

      before    A votes   B votes   decided ──> A hears: yes    the coordinator ends
      after     B is back, votes again    ...   A is back, says: yes          B hears: yes
                                           │
                                           └─ no decision while A is absent: it may have heard one

  So a coordinator that comes back decides nothing while a voter is absent (`waits_for`). A voter
  that does not come back within its lease is lost, and then its outcome binds no living member.
* *The outcome is a view.* The group keeps it, not this module (`close` with None). The view is on
  disk before any member hears of it. Without a state file, the member with the highest epoch brings
  it back. A member that votes in an older view has missed the next one, and gets it
  (`Recovery._answer_late`).

Two cases are not covered, as the guarantees say. A voter may hear an outcome, act on it in public,
and die while the coordinator is away. And a group may have more outcomes than are remembered.
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
"""Living members by connection, or absent members by rank."""

Outcome = BallotResult | Void

REMEMBERED = 1024
"""The number of outcomes that are remembered for each group."""

_DIFFER = "the ranks called different things, or differ in who they are"


@dataclass(slots=True)
class Ballot:
    """One open ballot.

    `voters`: their ids in order (empty: the whole group). `call`: what each of them has called.
    `votes`: by connection, the request and the vote of each living voter. `since`: when it voted.
    The first `passed` voters have voted, or never will.
    """

    key: BallotKey
    voters: tuple[str, ...]
    call: str
    votes: dict[int, tuple[int, Vote]] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    passed: int = 0

    def electorate(self, members: Members) -> list[int]:
        """The connections of the living voters, in their order."""
        if not self.voters:
            return sorted(members, key=lambda conn: members[conn].rank)
        return [conn for one in self.voters if (conn := members.of_id(one)) is not None]

    def waits_for(self, absent: Members) -> list[str]:
        """The ids of absent voters, which may come back."""
        return [one.id for one in absent.values() if not self.voters or one.id in self.voters]

    def is_complete(self, members: Members, absent: Members) -> bool:
        """Whether all voters have voted that are alive, or may come back.

        This is asked after each vote, so it must be cheap. For the whole group it compares two
        counts. For a subgroup it looks for the first missing voter, and starts from that one the
        next time: all n votes together take n steps.
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
        """The call, in the words of any one voter, because all voters have called the same."""
        return next(iter(self.votes.values()))[1]

    @property
    def purpose(self) -> Purpose:
        return self.vote.purpose

    @property
    def flag(self) -> bool:
        return all(vote.flag for _, vote in self.votes.values())


@dataclass(frozen=True, slots=True)
class Answer:
    conn: int
    request: int
    reply: Outcome | Failed


class Ballots:
    """The open ballots of one group, and the outcomes of earlier ones."""

    def __init__(self) -> None:
        self._ballots: dict[BallotKey, Ballot] = {}
        self.voted: dict[int, dict[BallotKey, Ballot]] = {}
        """The open ballots in which each connection has voted."""
        self.gathering: Ballot | None = None
        """The open ballot of a rendezvous that all members have called, and that waits for
        joiners."""
        self._outcomes: dict[BallotKey, tuple[tuple[str, ...] | None, str, Outcome]] = {}
        """Each outcome with its voters and their call. If a member reported it, they are unknown:
        None and ""."""

    def cast(
        self, members: Members, conn: int, request: int, vote: Vote, now: float = 0.0
    ) -> list[Answer]:
        """Count a vote of member `conn`, and return the answers that this causes."""
        wrong = self._refuse(members, conn, vote)
        if wrong is not None:
            return [Answer(conn, request, wrong)]
        key, own = (vote.context, vote.number), members[conn].id
        voters, called, known = self._outcomes.get(key, (None, "", None))
        if known is not None:
            if voters is not None and voters != vote.members:  # it was decided with other voters
                known = Void(Cause.MISMATCH, _DIFFER, own, {own: vote.call})
            elif (
                called not in ("", vote.call)
                and isinstance(known, Void)
                and known.cause is not Cause.MISMATCH
            ):
                # Another call was given up. Its reason means nothing to this one.
                known = Void(Cause.MISMATCH, _DIFFER, known.by, {known.by: called})
            return [Answer(conn, request, known)]
        ballot = self._ballots.get(key)
        if ballot is None:
            ballot = self._ballots[key] = Ballot(key, vote.members, vote.call)
        differs = vote.members != ballot.voters
        if not differs:  # keep one list of voters, not one for each vote
            vote = replace(vote, members=ballot.voters)
        ballot.votes[conn] = (request, vote)
        ballot.since.setdefault(conn, now)
        self.voted.setdefault(conn, {})[key] = ballot
        # All votes in a ballot must call the same, or it is void, so one text describes all. A
        # voter that is alone in the ballot sets that text. This includes a voter that voted here
        # before, lost its connection, and now votes for something else.
        if len(ballot.votes) == 1:
            ballot.call = vote.call
        if vote.refusal and vote.purpose is ballot.purpose and not differs:
            if vote.purpose is Purpose.RENDEZVOUS:
                ballot.call = ""  # its sizes may be what is wrong, so they are not compared
            return self.close(ballot, Void(Cause.CANCELLED, vote.refusal, own))
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
        """Stop waiting: `conn` gives up a ballot in which it has voted.

        Return nothing if no open ballot can become void, because its outcome is already in flight.
        `seen`: what members are doing, by id.
        """
        ballot = self._ballots.get(key)
        # A message to give up may cross with the outcome. If the ballot is closed, its outcome was
        # sent before and stands. If this connection has not voted, its vote came over another
        # connection that broke, so there is nothing to give up.
        if ballot is None or conn not in ballot.votes:
            return []
        missing = [members[one].id for one in ballot.electorate(members) if one not in ballot.votes]
        missing += ballot.waits_for(absent)
        details = {one: (seen or {}).get(one, "") for one in missing}
        void = Void(cause, text[:MAX_TEXT], members[conn].id, details)
        return self.close(ballot, void)

    def of(self, conn: int) -> list[Ballot]:
        """The open ballots in which `conn` has voted."""
        return list(self.voted.get(conn, {}).values())

    def missing(self, members: Members, key: BallotKey) -> list[int]:
        """The living voters that have not voted."""
        ballot = self._ballots.get(key)
        if ballot is None:
            return []
        return [one for one in ballot.electorate(members) if one not in ballot.votes]

    def gone(self, conn: int) -> None:
        """Drop the votes of a connection, because its member is lost or will vote over another
        one."""
        for key, ballot in self.voted.pop(conn, {}).items():
            del ballot.votes[conn]
            del ballot.since[conn]
            ballot.passed = 0  # its voter may be alive, so the ballot waits for it again
            self._waits_no_more(ballot)  # until the remaining votes are reviewed
            if not ballot.votes:
                del self._ballots[key]

    def new_view(self) -> None:
        """Look at all voters again, because some may have become members."""
        for ballot in self._ballots.values():
            ballot.passed = 0
        self.gathering = None

    def decided(
        self, members: Members, absent: Members, key: BallotKey | None = None
    ) -> Iterator[Ballot]:
        """Yield the complete ballots, or of these the one with `key`. The caller closes each."""
        return (one for one in self._open(key) if one.is_complete(members, absent))

    def of_another_view(self, context: bytes, key: BallotKey | None = None) -> Iterator[Ballot]:
        """Yield the ballots of the whole group in another view than `context`, or of these the one
        with `key`."""
        return (one for one in self._open(key) if not one.voters and one.key[0] != context)

    def _open(self, key: BallotKey | None) -> Iterator[Ballot]:
        for one in list(self._ballots) if key is None else [key]:
            ballot = self._ballots.get(one)  # it may have been closed together with an earlier one
            if ballot is not None:
                yield ballot

    def close(self, ballot: Ballot, outcome: Outcome | None) -> list[Answer]:
        """Close a ballot with an outcome (None: a view, which the group keeps)."""
        del self._ballots[ballot.key]
        self._waits_no_more(ballot)
        for conn in ballot.votes:
            del self.voted[conn][ballot.key]
        if outcome is None:
            return []
        self._remember(ballot.key, ballot.voters, ballot.call, outcome)
        return [Answer(conn, request, outcome) for conn, (request, _) in ballot.votes.items()]

    def _waits_no_more(self, ballot: Ballot) -> None:
        if self.gathering is ballot:
            self.gathering = None

    def learn(self, key: BallotKey, outcome: Outcome) -> list[Answer]:
        """Take over an outcome that a member has heard, because it must be the outcome of all."""
        ballot = self._ballots.get(key)
        if ballot is not None:
            return self.close(ballot, outcome)
        self._remember(key, None, "", outcome)
        return []

    def _remember(
        self, key: BallotKey, voters: tuple[str, ...] | None, call: str, outcome: Outcome
    ) -> None:
        self._outcomes.pop(key, None)
        self._outcomes[key] = voters, call, outcome
        if len(self._outcomes) > REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def _refuse(self, members: Members, conn: int, vote: Vote) -> Failed | None:
        own = members[conn].id
        if vote.members and own not in vote.members:
            return Failed(Failure.INVALID, "the sender is not among the voters of this ballot")
        if vote.purpose is Purpose.RENDEZVOUS and vote.members:
            return Failed(Failure.INVALID, "a rendezvous is of the whole group")
        voted = self.voted.get(conn, {})
        if len(voted) >= MAX_BALLOTS and (vote.context, vote.number) not in voted:
            return Failed(Failure.INVALID, f"{MAX_BALLOTS} votes are under way, the limit")
        return None
