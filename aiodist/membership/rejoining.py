"""Members that come back, to a coordinator that was away or over a new connection, as the
coordinator takes them in."""

from __future__ import annotations

from aiodist.membership.books import JoinWindow
from aiodist.membership.group import Group, GroupKey, Size, describe
from aiodist.membership.recovery import Recovery
from aiodist.membership.returning import Refused, Way, check_view, judge
from aiodist.membership.seating import BEFORE, Seating
from aiodist.membership.seats import Seats
from aiodist.wire.messages import Failed, Failure, JoinRequest, View
from aiodist.wire.returning import Later, Rejoin, Rejoined, ViewWanted

ANSWER_SECONDS = 2.0
"""How long a member that was asked for its view may take before another one is asked."""

MAX_ASKED = 4096
"""Most groups at once whose view a member was asked for."""


class Rejoining:
    """The part of the state machine that judges claims to be a member."""

    def __init__(self, seating: Seating, recovery: Recovery) -> None:
        self._seating = seating
        self._books = seating.books
        self._recovery = recovery
        self._asked: dict[GroupKey, tuple[int, float]] = {}

    def gone(self, conn: int) -> None:
        """`conn` is closed: it will not say what it was asked."""
        for key, (asked, _) in list(self._asked.items()):
            if asked == conn:
                del self._asked[key]

    def handle(self, conn: int, request: int, claim: Rejoin) -> None:
        key = (claim.ask.group, claim.ask.run_id)
        group = self._books.groups.get(key)
        # What a member that comes back may find::
        #
        #     the group here             its epoch       then
        #     ─────────────────────────  ──────────────  ──────────────────────────────────────────
        #     there is none              above the last  its view is taken over (RESTORE)
        #                                that ended
        #     of the same epoch          the same view   it takes its seat, and hears who is gone
        #     of an older epoch          higher          its view is taken over; who is not in that
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
        if way is Way.RESTORE:
            if not self._has_view(conn, request, claim):
                return
            assert claim.view is not None
            group = self._adopt(key, size, claim.view, claim.ask)
        assert group is not None and group.view is not None
        self._books.share(group, claim.ask.store)
        rank = group.place_of(claim.ask.id)
        assert rank is not None
        # The seat comes before all that can be said to a member, and what it has heard before the
        # seat: from then on votes are counted with it, and an outcome that it knows of must be
        # found by then.
        # What it was told counts before its vote does: the outcome of a ballot may be among it.
        self._recovery.learn(group, claim.heard)
        self._seating.take_seat(group, conn, rank, claim.ask.lease)
        if claim.epoch == group.view.epoch:
            self._learn(group, conn, claim)
            lost, left = tuple(sorted(group.lost)), tuple(sorted(group.left))
            self._seating.send(conn, request, Rejoined(lost, left))
        else:  # it votes to go on, and gets the view that it missed
            self._seating.send(conn, request, Rejoined((), ()))
        self._seating.judge_joiners(group)
        self._recovery.review(group)

    def _has_view(self, conn: int, request: int, claim: Rejoin) -> bool:
        """Whether a claim brings the view that it is about; else one member is asked for it."""
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
        # All members of a group come back at once, each with the same view of up to 60 MiB: one is
        # asked for it, and the others come again when it is there. Should that one not say it, the
        # next that comes is asked.
        asked, until = self._asked.get(key, (conn, 0.0))
        if asked == conn or until <= self._books.now:
            self._asked[key] = (conn, self._books.now + ANSWER_SECONDS)
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            self._seating.send(conn, request, ViewWanted())
        else:
            self._seating.send(conn, request, Later())
        return False

    def _adopt(self, key: GroupKey, size: Size, view: View, ask: JoinRequest) -> Group:
        """Take over the view of a member, newer than what is known of its group."""
        self._asked.pop(key, None)
        stay: dict[str, tuple[int, float]] = {}
        group = self._books.groups.get(key)
        if group is None:
            group = self._books.open(key, size, describe(ask))
        else:
            stay = self._part(group, view)
        self._books.timers.cancel(JoinWindow(key))
        group.size = size
        self._books.formed(group, view)
        self._books.expect(group, view)
        self._seating.note("restored", group, epoch=view.epoch, size=len(view.members))
        for member in view.members:
            if member.id in stay:
                conn, lease = stay[member.id]
                self._seating.take_seat(group, conn, member.rank, lease)
        # Joiners who asked this coordinator, while another one, or the one before, had let them in.
        for joiner in list(group.joiners.values()):
            rank = group.place_of(joiner.ask.id)
            if rank is not None:  # it missed that it was let in
                del group.joiners[joiner.conn]
                self._seating.take_seat(group, joiner.conn, rank, joiner.ask.lease)
                self._seating.give_view(group, joiner.conn, joiner.request)
        return group

    def _part(self, group: Group, view: View) -> dict[str, tuple[int, float]]:
        """The members of an older view leave their seats, until those who are of `view`, too, take
        theirs: connection and lease of these, by id. The others missed that the group went on."""
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
        # A coordinator may have served the group in an older epoch, while another one, at the same
        # address in another part of a network that was cut, went on with it. Those who were in both
        # carry their seats over. But the store here was written by those who stayed behind.
        # Nobody of the newer view was here: what is in the store was written by others.
        if not stay and not group.shares:
            group.store.clear()
        return stay

    def _learn(self, group: Group, conn: int, claim: Rejoin) -> None:
        """Take over what a member knows of others that are gone: it was told by a coordinator."""
        for rank in sorted({*claim.lost} - {*group.lost} - group.left - {claim.rank}):
            if rank in group.absent:
                self._seating.give_up(group, {rank: BEFORE})
            elif (other := group.members.of_rank(rank)) is not None:
                self._seating.evict(group, {other: BEFORE})
        news = [self._books.take_absent(group, rank) for rank in sorted({*claim.left})]
        if left := [member for member in news if member is not None]:
            self._seating.have_left(group, left, but=conn)
