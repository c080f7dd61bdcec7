"""One group: its joiners, its members and its losses; when it forms, and which joiners it admits.

A group forms, has a view, and is deleted when the last member of the view is gone. Joiners that
come while members of the view are missing wait. Either the other members take them in by a
rendezvous, or all members go and the joiners form the group anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiodist.membership.ballots import Ballot, Ballots
from aiodist.membership.seats import Seats
from aiodist.membership.store import KeyValueStore
from aiodist.wire.averaging import averager_of
from aiodist.wire.channels import channel_of
from aiodist.wire.limits import MAX_MEMBERS, MAX_TEXT
from aiodist.wire.messages import EpochView, Failed, Failure, JoinRequest, MemberInfo

GroupKey = tuple[str, str]
"""(name, run id)."""

REFUSED = "; refused meanwhile: "
"""In the text of a join that gave up: the processes that reached the coordinator in vain follow."""

MOST_REFUSED = 3
"""How many of them the text describes."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size that a group asks for. Fixed groups have least == most."""

    fixed: bool
    least: int
    most: int
    window: float

    @staticmethod
    def of(ask: JoinRequest) -> Size | Failed:
        """Read the size from a request to join, or say what is wrong with it."""
        if ask.size is not None:
            if ask.min_size is not None or ask.max_size is not None:
                return Failed(
                    Failure.INVALID,
                    f"size={ask.size} makes a fixed group, min_size and max_size an elastic one: "
                    "give one or the other",
                )
            return Size(True, ask.size, ask.size, 0.0)
        if ask.min_size is None and ask.max_size is None:
            return Failed(Failure.INVALID, "give size=, or min_size= and/or max_size=")
        least = ask.min_size or 1
        most = ask.max_size or MAX_MEMBERS
        if least > most:
            return Failed(Failure.INVALID, f"min_size={least} is over max_size={most}")
        return Size(False, least, most, ask.join_window)

    def __str__(self) -> str:
        if self.fixed:
            return f"size {self.most}"
        most = "" if self.most == MAX_MEMBERS else f", max_size {self.most}"
        return f"min_size {self.least}{most}"

    def matches(self, other: Size) -> bool:
        return (self.fixed, self.least, self.most) == (other.fixed, other.least, other.most)


@dataclass(frozen=True, slots=True)
class Joiner:
    """A process that asked to join and has no answer yet. `since`: seconds since the Unix epoch."""

    conn: int
    request: int
    ask: JoinRequest
    since: float

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def rank(self) -> int | None:
        return self.ask.rank


@dataclass(slots=True)
class GroupState:
    """The state of one group, and decisions about it. The machine carries them out.

    `opener`: the first process that asked for the group. `joiners`, `members`, `leases` (seconds):
    by connection, joiners in order of arrival. `gave_up`: member id → rank, of processes that
    stopped waiting since the group began to form. `refused`: the last processes that were refused
    since then, and why. `removed`: by id, why members of earlier views were lost, if that happened
    since the coordinator started.

    `absent`: by rank, members of the view that have not come back since the coordinator started, or
    since the whole group fell silent. Until one of them is heard, the group is `cut_off`.

    `shares`: the name of the store that it shares with other groups. `broken`: by the ids of two
    members, why the link between them failed. `watchers`: by connection, the requests to be told
    how many joiners wait. `ranks`: by id, the ranks of the view. `restored`: a member brought the
    view back to a coordinator that had lost it.
    """

    name: str
    run_id: str
    size: Size
    opener: str
    store: KeyValueStore
    view: EpochView | None = None
    joiners: Seats[Joiner] = field(default_factory=Seats[Joiner])
    members: Seats[MemberInfo] = field(default_factory=Seats[MemberInfo])
    absent: Seats[MemberInfo] = field(default_factory=Seats[MemberInfo])
    leases: dict[int, float] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    gave_up: dict[str, int | None] = field(default_factory=dict)
    ballots: Ballots = field(default_factory=Ballots)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    watchers: dict[int, set[int]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    cut_off: bool = False
    shares: str = ""
    restored: bool = False

    @property
    def key(self) -> GroupKey:
        return self.name, self.run_id

    def refuse(self, ask: JoinRequest, size: Size) -> Failed | None:
        """Why a joiner cannot even wait; None if it can."""
        if not size.matches(self.size):
            return refusal(
                Failure.SIZE_MISMATCH,
                f"asked to join with {size}, but the group was opened with {self.size} by "
                f"{self.opener}; {self._progress()}: ask for the same on all ranks",
            )
        if ask.store != self.shares:
            return refusal(
                Failure.INVALID,
                f"asked for the store {ask.store!r} ('': that of the group alone), but the group "
                f"has {self.shares!r}: ask for the same on all ranks",
            )
        if ask.rank is not None and ask.rank >= size.most:
            return refusal(
                Failure.SIZE_MISMATCH,
                f"rank {ask.rank} is outside of a group with {size}: expected 0 to {size.most - 1}",
            )
        # A fixed group with a loss lets joiners wait. The members may take them in by a rendezvous,
        # or all members end and the group forms anew.
        if self.size.fixed and self._is_complete:
            return refusal(
                Failure.COMPLETE,
                f"the group is complete and healthy since epoch {self.epoch}: all "
                f"{self.size.most} ranks are members; use another group name, or end one of them",
            )
        # More joiners of an elastic group wait for its first rendezvous.
        if self.size.fixed and self.is_full:
            return refusal(
                Failure.COMPLETE,
                f"all {self.size.most} ranks have come, and the group is about to form",
            )
        holder = self._holder(ask.rank)
        if holder is not None:
            return refusal(
                Failure.RANK_TAKEN,
                f"rank {ask.rank} is held by {holder}; {self._progress()}: give each process a "
                "rank of its own, or none to have one assigned",
            )
        if len(self.joiners) >= MAX_MEMBERS:
            return refusal(Failure.INVALID, f"{MAX_MEMBERS} joiners wait already, the limit")
        return None

    def note_refused(self, ask: JoinRequest, failed: Failed) -> None:
        """Remember a refusal, because those that wait for this process must hear of it."""
        if self.view is None:
            self.refused[describe(ask)] = failed.text.partition(";")[0]
            if len(self.refused) > MOST_REFUSED:
                del self.refused[next(iter(self.refused))]

    @property
    def epoch(self) -> int | None:
        """The epoch of the view; None before there is one."""
        return None if self.view is None else self.view.epoch

    @property
    def _is_complete(self) -> bool:
        """Whether the view has all members that the group asks for, and all of them live."""
        return self.view is not None and len(self.members) >= self.size.most

    @property
    def is_full(self) -> bool:
        """Whether the group forms now, without waiting for the join window."""
        return self.view is None and len(self.joiners) >= self.size.most

    @property
    def may_form(self) -> bool:
        """Whether the group forms if no process joins during the join window."""
        return self.view is None and len(self.joiners) >= self.size.least

    def is_unreachable(self, rank: int) -> bool:
        """Whether another member has reported that its link to this absent one is broken."""
        return any(self.absent[rank].id in pair for pair in self.broken)

    def add(self, joiner: Joiner) -> None:
        """Let a joiner wait after `refuse` has returned None for it."""
        self.joiners[joiner.conn] = joiner
        self.refused.pop(describe(joiner.ask), None)
        self.leases[joiner.conn] = joiner.ask.lease
        for other_id, rank in list(self.gave_up.items()):
            if other_id == joiner.ask.id or (rank is not None and rank == joiner.ask.rank):
                del self.gave_up[other_id]

    def form(self, epoch: int) -> EpochView:
        """Make the joiners the members of `epoch`, in order of arrival as far as there is room.

        Requested ranks are given if they are below the size (in an elastic group they may not be).
        The other joiners get the lowest free ranks, in order of arrival.
        """
        arrived = list(self.joiners.items())
        joiners = Seats(dict(arrived[: self.size.most]))
        self.joiners = Seats(dict(arrived[self.size.most :]))
        count = len(joiners)
        # Example of four joiners: A asks for rank 2, B for none, C for 0, D for 9. A gets 2 and C
        # gets 0. B and D get what is left in the order in which they came, 1 and 3.
        #
        # An elastic group may form with fewer members than the highest requested rank. A joiner
        # that asked for such a rank gets a free one, because ranks have no gaps.
        free = iter([rank for rank in range(count) if joiners.of_rank(rank) is None])
        for conn, joiner in joiners.items():
            ask = joiner.ask
            rank = ask.rank if ask.rank is not None and ask.rank < count else next(free)
            self.members[conn] = _member(joiner, rank)
        return self._of_members(epoch)

    def go_on(self, epoch: int, survivors: Iterable[int], admitted: Iterable[int]) -> EpochView:
        """Make the next view: all members in the order of `survivors`, then the `admitted`
        joiners."""
        self.members = Seats(
            {conn: replace(self.members[conn], rank=rank) for rank, conn in enumerate(survivors)}
        )
        for conn in admitted:
            self.members[conn] = _member(self.joiners.pop(conn), len(self.members))
        assert self.view is not None
        # Some of them may live, and come back to hear why they were removed.
        self.removed |= {self.view.members[rank].id: why for rank, why in self.lost.items()}
        while len(self.removed) > MAX_MEMBERS:
            del self.removed[next(iter(self.removed))]
        self.lost = {}
        self.left = set()
        return self._of_members(epoch)

    def _of_members(self, epoch: int) -> EpochView:
        ranked = tuple(sorted(self.members.values(), key=lambda member: member.rank))
        return self.install(EpochView(self.name, epoch, ranked))

    def install(self, view: EpochView) -> EpochView:
        self.view = view
        self.ranks = view.ranks
        self.ballots.new_view()
        self.gave_up, self.refused = {}, {}
        return view

    def place_of(self, member_id: str) -> int | None:
        """The rank of a member in the view; None if it has none, or is gone."""
        rank = self.ranks.get(member_id)
        return None if rank in self.lost or rank in self.left else rank

    @property
    def ranked(self) -> dict[int, MemberInfo]:
        """The members by connection, in the order of their ranks."""
        return dict(sorted(self.members.items(), key=lambda item: item[1].rank))

    def bounds(self, rendezvous: Ballot) -> tuple[int, int]:
        """The least and the greatest number of members of the next epoch.

        If only one is given, the other one gives way to it.
        """
        vote = rendezvous.vote
        least, most = vote.least or self.size.least, vote.most or self.size.most
        return (least, max(least, most)) if vote.most is None else (min(least, most), most)

    def remove(self, conn: int, *, gave_up: bool) -> Joiner:
        """Remove a joiner. `gave_up`: remember that it had come."""
        joiner = self.joiners.pop(conn)
        # Later error texts then do not list its rank as missing.
        if gave_up and self.view is None and len(self.gave_up) < MAX_MEMBERS:
            self.gave_up[joiner.ask.id] = joiner.ask.rank
        return joiner

    def forget(self, conn: int) -> None:
        """Forget all about a connection that is no longer a member or joiner."""
        del self.leases[conn]
        self.store.drop(conn)
        self.ballots.gone(conn)
        self.watchers.pop(conn, None)

    def waiting_text(self) -> str:
        """Why the group has not taken its joiners yet."""
        if self.view is None:
            text = f"the group is not complete: {self._progress()}"
            refused = [f"{who}: {why}" for who, why in self.refused.items()]
            return text + REFUSED + "; ".join(refused) if refused else text
        gone = [f"rank {rank} is lost ({reason})" for rank, reason in sorted(self.lost.items())[:4]]
        if self.left:
            gone.append(f"{ranks_text(self.left)} left")
        if self.absent:
            gone.append(f"{ranks_text(self.absent)} may still come back to this coordinator")
        why = "; ".join(gone) or "it is elastic"
        return (
            f"the group runs in epoch {self.view.epoch} ({why}) and takes waiting joiners at its "
            "next rendezvous, or when its last member is gone"
        )

    def status(self) -> dict[str, Any]:
        """Describe the group in plain data.

        `epoch` and `size` are None while the group forms for the first time. `waiting`: in order of
        arrival, the processes that asked to join and have no answer. `channel` and `averager`: the
        channel or averager whose participants are its members, or "".
        """
        return {
            "name": self.name,
            "run_id": self.run_id,
            "wanted": str(self.size),
            "epoch": self.epoch,
            "size": None if self.view is None else len(self.view.members),
            "members": [
                {**_who(member), "joined_at": member.joined_at} for member in self.ranked.values()
            ],
            "waiting": [_who(joiner.ask) for joiner in self.joiners.values()],
            "lost": {str(rank): reason for rank, reason in sorted(self.lost.items())},
            "left": sorted(self.left),
            "absent": sorted(self.absent),
            "store": {"keys": len(self.store.values), "bytes": self.store.nbytes},
            "channel": channel_of(self.name),
            "averager": averager_of(self.name),
        }

    @property
    def _asked(self) -> list[int | None]:
        """The requested ranks of all processes that have come since the group began to form."""
        return [one.ask.rank for one in self.joiners.values()] + list(self.gave_up.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of a fixed group that have not come yet, if each process asks for a rank."""
        asked = self._asked
        # A joiner that gave up counts as having come. A launcher that reads this looks for the
        # machine that never started.
        if self.view is not None or not self.size.fixed or None in asked:
            return ()
        return tuple(sorted(set(range(self.size.most)) - {*asked}))

    def _holder(self, rank: int | None) -> str | None:
        if rank is None:
            return None
        if (conn := self.members.of_rank(rank)) is not None:
            return f"member {describe(self.members[conn])}"
        if (conn := self.joiners.of_rank(rank)) is not None:
            joiner = self.joiners[conn]
            return f"{describe(joiner.ask)}, which waits for the group to become complete"
        return None

    def _progress(self) -> str:
        """How many processes have joined, of how many, and which ranks are missing."""
        if self.view is not None:
            return (
                f"epoch {self.view.epoch} has {len(self.members)} of {len(self.view.members)} "
                f"members alive{self._awaited()}"
            )
        asked = self._asked
        wanted = str(self.size.most) if self.size.fixed else f"at least {self.size.least}"
        text = f"{len(asked)} of {wanted} have joined"
        if self.gave_up:
            text += f" ({len(self.gave_up)} of them gave up waiting)"
        if self.size.fixed and None not in asked:
            if missing := self.missing:
                text += f"; missing: {ranks_text(missing)}"
        elif self.size.fixed and len(asked) < self.size.most:
            text += f"; missing: any {self.size.most - len(asked)} (ranks are assigned)"
        return text

    def _awaited(self) -> str:
        if not self.absent:
            return ""
        lease = max(member.lease for member in self.absent.values())
        return f", and {ranks_text(self.absent)} may come back for {lease:g} s at most"


def _member(joiner: Joiner, rank: int) -> MemberInfo:
    ask = joiner.ask
    return MemberInfo(
        rank=rank,
        id=ask.id,
        host=ask.host,
        pid=ask.pid,
        name=ask.name,
        metadata=ask.metadata,
        joined_at=round(joiner.since, 2),  # more digits would make views larger
        host_id=ask.host_id,
        addresses=ask.addresses,
        lease=ask.lease,
    )


def _who(one: JoinRequest | MemberInfo) -> dict[str, Any]:
    return {key: getattr(one, key) for key in ("rank", "id", "host", "pid", "name")}


def refusal(kind: Failure, text: str) -> Failed:
    """Make a Failed whose text is short enough to be sent, whatever names it contains."""
    return Failed(kind, text[:MAX_TEXT])


def describe(who: JoinRequest | MemberInfo) -> str:
    name = f"{who.name!r} " if who.name else ""
    return f"{name}(pid {who.pid} on {who.host or 'an unknown host'})"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``; "" for none. At most sixteen stretches are listed."""
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in stretches[:16]]
    if len(stretches) > len(shown):
        shown.append("...")
    if not stretches:
        return ""
    single = len(stretches) == 1 and stretches[0][0] == stretches[0][1]
    return f"{'rank' if single else 'ranks'} {', '.join(shown)}"
