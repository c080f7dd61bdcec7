"""Members that come back: to a coordinator that was away, or over a new connection."""

from __future__ import annotations

from aiodist.membership.books import JoinWindow
from aiodist.membership.group import GroupKey, GroupState, Size, describe
from aiodist.membership.recovery import RecoveryRules
from aiodist.membership.returning import HowToReturn, Refused, check_view, judge
from aiodist.membership.seating import BEFORE, Seating
from aiodist.membership.seats import Seats
from aiodist.wire.messages import EpochView, Failed, Failure, JoinRequest
from aiodist.wire.returning import Later, Rejoin, Rejoined, ViewWanted

ANSWER_SECONDS = 2.0
"""Seconds that a member has to send its view before another one is asked."""

MAX_ASKED = 4096
"""The number of groups for which a member may be asked at once."""


class Rejoining:
    """The part of the state machine that judges claims to be a member."""

    def __init__(self, seating: Seating, recovery: RecoveryRules) -> None:
        self._seating = seating
        self._books = seating.books
        self._recovery = recovery
        self._asked: dict[GroupKey, tuple[int, float]] = {}

    def gone(self, conn: int) -> None:
        """Forget that `conn` was asked for a view, because it is closed."""
        for key, (asked, _) in list(self._asked.items()):
            if asked == conn:
                del self._asked[key]

    def handle(self, conn: int, request: int, claim: Rejoin) -> None:
        key = (claim.ask.group, claim.ask.run_id)
        group = self._books.groups.get(key)
        # The cases of a returning member::
        #
        #     the group here             its epoch       then
        #     ─────────────────────────  ──────────────  ──────────────────────────────────────────
        #     there is none              above the last  its view is taken over (RESTORE)
        #                                that ended
        #     of the same epoch          the same view   it takes its seat, and hears who is gone
        #     of an older epoch          higher          its view is taken over; members not in it
        #                                                missed that the group went on: evicted
        #     of a newer one, with it    lower           it takes its seat; its vote gets the view
        #     of a newer, without it     lower           evicted
        size = Size.of(claim.ask)
        if conn in self._seating.places:
            failed = Failed(Failure.INVALID, "this connection has joined already")
            self._seating.send(conn, request, failed)
            return
        if isinstance(size, Failed):
            self._seating.send(conn, request, size)
            return
        way = judge(group, self._books.ended.get(key), claim)
        if isinstance(way, Refused):
            self._seating.refused("return refused", claim.ask, reason=way.reason)
            self._seating.turn_away(conn, way.reason)
            return
        if way is HowToReturn.RESTORE:
            if not self._has_view(conn, request, claim):
                return
            assert claim.view is not None
            group = self._adopt(key, size, claim.view, claim.ask)
        assert group is not None and group.view is not None
        self._books.share(group, claim.ask.store)
        rank = group.place_of(claim.ask.id)
        assert rank is not None
        # Outcomes that the member has heard come first, because its votes must find them. Then it
        # takes its seat, and only then hears anything as a member.
        self._recovery.learn(group, claim.heard)
        self._seating.take_seat(group, conn, rank, claim.ask.lease)
        if claim.epoch == group.view.epoch:
            self._learn(group, conn, claim)
            lost, left = tuple(sorted(group.lost)), tuple(sorted(group.left))
            self._seating.send(conn, request, Rejoined(lost, left))
        else:  # it will vote to go on, and get the view that it missed
            self._seating.send(conn, request, Rejoined((), ()))
        self._seating.judge_joiners(group)
        self._recovery.review(group)

    def _has_view(self, conn: int, request: int, claim: Rejoin) -> bool:
        """Whether a claim brings its view. If not, ask one member of the group for it."""
        key = (claim.ask.group, claim.ask.run_id)
        if claim.view is not None:
            wrong = check_view(claim, claim.view)
            if wrong is not None:
                self._seating.send(conn, request, Failed(Failure.INVALID, wrong))
            return wrong is None
        # A coordinator without a state file knows nothing, and n members come back within a
        # second::
        #
        #     0: Rejoin ──> ViewWanted ──> Rejoin with the view ──> adopted       Rejoined
        #     1: Rejoin ──> Later ...... (a moment) ...... Rejoin ──────────────> Rejoined
        #     2: Rejoin ──> Later ...... (a moment) ...... Rejoin ──────────────> Rejoined
        #
        # Each member could send the same view of up to 60 MiB. So one is asked, and the others try
        # again later. If that one does not send it, the next that comes is asked.
        asked, until = self._asked.get(key, (conn, 0.0))
        if asked == conn or until <= self._books.now:
            self._asked[key] = (conn, self._books.now + ANSWER_SECONDS)
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            self._seating.send(conn, request, ViewWanted())
        else:
            self._seating.send(conn, request, Later())
        return False

    def _adopt(self, key: GroupKey, size: Size, view: EpochView, ask: JoinRequest) -> GroupState:
        """Take over the view of a member, which is newer than what is known of its group."""
        self._asked.pop(key, None)
        stay: dict[str, tuple[int, float]] = {}
        group = self._books.groups.get(key)
        if group is None:
            group = self._books.open(key, size, describe(ask))
        else:
            stay = self._part(group, view)
        self._books.timers.cancel(JoinWindow(key))
        group.size = size
        group.restored = True
        self._books.formed(group, view)
        self._books.expect(group, view)
        self._seating.note("restored", group, epoch=view.epoch, size=len(view.members))
        for member in view.members:
            if member.id in stay:
                conn, lease = stay[member.id]
                self._seating.take_seat(group, conn, member.rank, lease)
        # Joiners of this coordinator may be members of that view: another coordinator admitted
        # them.
        for joiner in list(group.joiners.values()):
            rank = group.place_of(joiner.ask.id)
            if rank is not None:  # it missed that it was admitted
                del group.joiners[joiner.conn]
                self._seating.take_seat(group, joiner.conn, rank, joiner.ask.lease)
                self._seating.give_view(group, joiner.conn, joiner.request)
        return group

    def _part(self, group: GroupState, view: EpochView) -> dict[str, tuple[int, float]]:
        """Unseat the members of an older view.

        Return the connection and lease, by id, of those that are also in `view`. The others missed
        that the group went on.
        """
        ids = {member.id for member in view.members}
        stay: dict[str, tuple[int, float]] = {}
        reason = f"its group goes on in epoch {view.epoch}, of which it is no member"
        members, group.members = group.members, Seats()
        for conn, member in members.items():
            if member.id in ids:
                stay[member.id] = (conn, group.leases[conn])
            else:
                self._seating.turn_away(conn, reason)
                self._seating.unseat(group, conn)
        # In a partitioned network two coordinators with one address may have served this group.
        # Members of both views keep their seats. If there are none, the store was written by others
        # and is cleared.
        if not stay and not group.shares:
            group.store.clear()
        return stay

    def _learn(self, group: GroupState, conn: int, claim: Rejoin) -> None:
        """Take over losses that a member heard of from an earlier coordinator."""
        for rank in sorted({*claim.lost} - {*group.lost} - group.left - {claim.rank}):
            if rank in group.absent:
                self._seating.give_up(group, {rank: BEFORE})
            elif (other := group.members.of_rank(rank)) is not None:
                self._seating.evict(group, {other: BEFORE})
        news = [self._books.take_absent(group, rank) for rank in sorted({*claim.left})]
        if left := [member for member in news if member is not None]:
            self._seating.have_left(group, left, but=conn)
