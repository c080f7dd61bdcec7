"""The ballots of one group: votes of members that agree, or go on without those that are lost.

A ballot is known by a context (a group in one epoch, or one made of it) and a number, and has one
outcome. It is decided once all of its voters that are alive have voted. Who is alive is for the
coordinator to say, so that the outcome is the same for all, whoever dies meanwhile. What is void
stays void: late voters are told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import Failed, Failure, MemberInfo
from aiodist.wire.recovery import MAX_BALLOTS, Cause, Purpose, Void, Vote

BallotKey = tuple[bytes, int]
"""(context, number)."""

Members = dict[int, MemberInfo]
"""Living members, by connection."""


@dataclass(slots=True)
class Ballot:
    """`voters`: the ids of all, in their order (empty: the whole group). `votes`: by connection,
    the request and the vote, of those who are alive. `told`: who knows that it is void."""

    key: BallotKey
    voters: tuple[str, ...]
    votes: dict[int, tuple[int, Vote]] = field(default_factory=dict)
    void: Void | None = None
    told: set[int] = field(default_factory=set)

    def electorate(self, members: Members) -> list[int]:
        """The connections of the voters that are alive, in their order."""
        if not self.voters:
            return sorted(members, key=lambda conn: members[conn].rank)
        by_id = {member.id: conn for conn, member in members.items()}
        return [by_id[one] for one in self.voters if one in by_id]

    @property
    def purpose(self) -> Purpose:
        """What is voted on."""
        [(_, vote), *_] = self.votes.values()
        return vote.purpose

    @property
    def flag(self) -> bool:
        return all(vote.flag for _, vote in self.votes.values())


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome for one voter that has nothing to wait for."""

    conn: int
    request: int
    reply: Void | Failed


class Ballots:
    """All ballots of one group that somebody waits for, or has not heard the end of."""

    def __init__(self) -> None:
        self._ballots: dict[BallotKey, Ballot] = {}

    def cast(self, members: Members, conn: int, request: int, vote: Vote) -> list[Answer]:
        """Member `conn` votes: who hears what of it now."""
        wrong = self._refuse(members, conn, vote)
        if wrong is not None:
            return [Answer(conn, request, wrong)]
        key = (vote.context, vote.number)
        ballot = self._ballots.setdefault(key, Ballot(key, vote.members))
        if ballot.void is not None:
            ballot.told.add(conn)
            self._clean(members)
            return [Answer(conn, request, ballot.void)]
        ballot.votes[conn] = (request, vote)
        asked = {one.call for _, one in ballot.votes.values()}
        if len(asked) > 1 or vote.members != ballot.voters:
            ids = {members[one].id: its.call for one, (_, its) in ballot.votes.items()}
            text = "the ranks called different things, or differ in who they are"
            return self._make_void(members, ballot, Cause.MISMATCH, text, conn, ids)
        return []

    def give_up(
        self, members: Members, conn: int, key: BallotKey, cause: Cause, text: str
    ) -> list[Answer]:
        """`conn`, which has voted, waits no more. Nothing happens where there is nothing to void:
        the outcome is on its way."""
        ballot = self._ballots.get(key)
        if ballot is None or ballot.void is not None or conn not in ballot.votes:
            return []
        details = {
            members[one].id: "" for one in ballot.electorate(members) if one not in ballot.votes
        }
        return self._make_void(members, ballot, cause, text, conn, details)

    def gone(self, members: Members, conn: int) -> None:
        """`conn` is no member any more."""
        for ballot in self._ballots.values():
            ballot.votes.pop(conn, None)
            ballot.told.discard(conn)
        self._clean(members)

    def decided(self, members: Members) -> Iterator[Ballot]:
        """The ballots in which all living voters have voted; each is forgotten once it is taken
        by `close`."""
        for ballot in list(self._ballots.values()):
            if ballot.votes and ballot.votes.keys() >= {*ballot.electorate(members)}:
                yield ballot

    def close(self, ballot: Ballot) -> None:
        """Everybody is told the outcome."""
        del self._ballots[ballot.key]

    def supersede(self, members: Members, text: str) -> list[Answer]:
        """The group has another view: what its members of before vote on together is void. To be
        called while they are its members."""
        answers: list[Answer] = []
        for ballot in list(self._ballots.values()):
            if ballot.voters:
                continue
            if ballot.votes:
                by = next(iter(ballot.votes))
                answers += self._make_void(members, ballot, Cause.CANCELLED, text, by, {})
            self._ballots.pop(ballot.key, None)
        return answers

    def _refuse(self, members: Members, conn: int, vote: Vote) -> Failed | None:
        own = members[conn].id
        if vote.members and own not in vote.members:
            return Failed(Failure.INVALID, "a vote among others: the sender is none of the voters")
        if vote.purpose is Purpose.RENDEZVOUS and vote.members:
            return Failed(Failure.INVALID, "a rendezvous is of the whole group")
        open_ones = sum([conn in ballot.votes for ballot in self._ballots.values()])
        if open_ones >= MAX_BALLOTS:
            return Failed(Failure.INVALID, f"{MAX_BALLOTS} votes are under way, the limit")
        return None

    def _make_void(
        self,
        members: Members,
        ballot: Ballot,
        cause: Cause,
        text: str,
        by: int,
        details: dict[str, str],
    ) -> list[Answer]:
        ballot.void = Void(cause, text[:MAX_TEXT], members[by].id, details)
        ballot.told = set(ballot.votes)
        answers = [
            Answer(conn, request, ballot.void) for conn, (request, _) in ballot.votes.items()
        ]
        ballot.votes = {}
        self._clean(members)
        return answers

    def _clean(self, members: Members) -> None:
        """Forget the void ballots of which all living voters have heard, and those without any
        voter."""
        for key, ballot in list(self._ballots.items()):
            waiting = bool(ballot.votes)
            if ballot.void is not None:
                waiting = not ballot.told.issuperset(ballot.electorate(members))
            if not waiting:
                del self._ballots[key]
