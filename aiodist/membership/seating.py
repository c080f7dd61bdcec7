"""Seats: joiners are admitted, members leave or are lost, and the others are told.

Only this part of the state machine changes groups. `machine` asks it to (for requests, closed
connections, time), and so do `recovery` and `rejoining` (for decisions of members, and for
returns). Each change ends with `settle`, because other members may have waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiodist.membership.books import Books, JoinWindow, LeaseTimer
from aiodist.membership.effects import Close, Effect, Keep, Note, SendMessage
from aiodist.membership.group import GroupState, Joiner, Size, describe
from aiodist.membership.seats import Seats
from aiodist.membership.stalls import Stalls
from aiodist.membership.survey import Survey
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    MemberInfo,
    MemberLeft,
    MemberLost,
    Message,
)
from aiodist.wire.recovery import NextView

DRAINING = Failed(
    Failure.DRAINING,
    "the coordinator is shutting down and takes no joins: join the one that follows it",
)

BEFORE = "it was ruled lost before it came back, or before the coordinator did"


class Seating:
    """The groups, and the seats of their members.

    `places`: the group of each connection, of members and joiners. `effects`: of the present step,
    in order. `draining`: no more joins. For `wall_offset`, `keep` and `form_after`, see
    `Membership`.
    """

    def __init__(self, wall_offset: float, keep: bool, form_after: float) -> None:
        written = (lambda record: self.effects.append(Keep(record))) if keep else None
        self.books = Books(wall_offset, written)
        self.places: dict[int, GroupState] = {}
        self.effects: list[Effect] = []
        self.draining = False
        # Called after members or joiners came or went; set by `Recovery`.
        self.review: Callable[[GroupState], None]
        self.joiners_changed: Callable[[GroupState], None]
        self.survey = Survey(self.send, self.books)  # what members say that they are doing
        self.stalls = Stalls(self.send, self.note, self.books, self.survey)
        self._timers = self.books.timers
        self._form_after = form_after

    @property
    def now(self) -> float:
        return self.books.now

    def admit(self, joiner: Joiner) -> None:
        """Refuse a joiner or let it wait. Form the group if no one else is missing."""
        conn, ask = joiner.conn, joiner.ask
        key = (ask.group, ask.run_id)
        size = Size.of(ask)
        group = self.books.groups.get(key)
        failed: Failed | None
        if self.draining:
            failed = DRAINING
        elif conn in self.places:
            failed = Failed(Failure.INVALID, "this connection has joined already")
        elif isinstance(size, Failed):
            failed = size
        else:
            if group is None:
                group = self.books.open(key, size, describe(ask))
                self.books.share(group, ask.store)
            elif self._joins_again(group, joiner):
                return
            # A request that is refused shows as well that this coordinator can be reached.
            self.books.got_word(group)
            failed = group.refuse(ask, size)
            if failed is None:
                self._seat(group, joiner)
                return
            group.note_refused(ask, failed)
            self.settle(group)
        self.refused("join refused", ask, kind=failed.kind)
        self.send(conn, joiner.request, failed)

    def _seat(self, group: GroupState, joiner: Joiner) -> None:
        group.add(joiner)
        self.places[joiner.conn] = group
        self.renew(joiner.conn)
        self.note("waiting", group, rank=joiner.ask.rank, who=describe(joiner.ask))
        # A coordinator that has just started may have served this group before. Keep the window
        # open until `form_after`, because members may be about to come back.
        if group.is_full and self.now >= self._form_after:
            self.form(group)
        elif group.may_form:
            window = 0.0 if group.is_full else group.size.window
            self._timers.set(JoinWindow(group.key), max(self.now + window, self._form_after))
        else:
            self.joiners_changed(group)

    def _joins_again(self, group: GroupState, joiner: Joiner) -> bool:
        """Whether the joiner had joined before, over a connection that broke.

        If it was admitted, it gets the view that it missed, or hears that it was ruled lost
        meanwhile. If it still waits, it starts anew.
        """
        member_id = joiner.ask.id
        waiting = group.joiners.of_id(member_id)
        if waiting is not None:
            self._replace(waiting, group)
            return False
        # It was admitted, but its connection broke before it heard that.
        rank = group.ranks.get(member_id)
        if rank is None:
            return False
        if group.place_of(member_id) is None:
            # It has to join anew, with a new id. Views are compared by ids, so no one would see the
            # change if the lost id came back in the next view.
            self.turn_away(joiner.conn, group.lost.get(rank, BEFORE))
            return True
        self.books.share(group, joiner.ask.store)
        self.take_seat(group, joiner.conn, rank, joiner.ask.lease)
        self.give_view(group, joiner.conn, joiner.request)
        self.judge_joiners(group)
        self.review(group)
        return True

    def give_view(self, group: GroupState, conn: int, request: int) -> None:
        """Send a member the view that it missed, and the losses since."""
        assert group.view is not None
        epoch = group.view.epoch
        self.send(conn, request, group.view)
        if group.lost:
            self.send(conn, 0, MemberLost(epoch, tuple(sorted(group.lost)), BEFORE))
        if group.left:
            self.send(conn, 0, MemberLeft(epoch, tuple(sorted(group.left))))

    def form(self, group: GroupState) -> None:
        self._timers.cancel(JoinWindow(group.key))
        waiting = list(group.joiners.values())
        view = group.form(self.books.epochs.take(group.name))
        self.books.formed(group, view)
        self.note("formed", group, epoch=view.epoch, size=len(view.members))
        self.stalls.over(group)
        for joiner in waiting:
            if joiner.conn in group.members:
                self.send(joiner.conn, joiner.request, view)

    def go_on(
        self, group: GroupState, survivors: Mapping[int, int], admitted: Sequence[int]
    ) -> None:
        """Begin the next epoch of `group`.

        `survivors`: its members in their new order, with the requests to answer. `admitted`:
        joiners. The survivors have the last view, because the context of their vote is its digest.
        So they get only the changes. Joiners get the view itself.
        """
        self._timers.cancel(JoinWindow(group.key))
        before = group.view
        assert before is not None
        requests = {conn: group.joiners[conn].request for conn in admitted}
        view = group.go_on(self.books.epochs.take(group.name), survivors, admitted)
        self.books.formed(group, view)
        self.note("went on", group, epoch=view.epoch, size=len(view.members))
        for conn in admitted:
            self.stalls.gone(group, conn)
        change = NextView.between(before, view)
        for conn, request in survivors.items():
            self.send(conn, request, change)
        for conn, request in requests.items():
            self.send(conn, request, view)

    def forget_joiner(
        self, group: GroupState, conn: int, reason: str, *, gave_up: bool = False
    ) -> None:
        joiner = group.remove(conn, gave_up=gave_up)
        self.unseat(group, conn)
        self.note("withdrawn", group, who=describe(joiner.ask), reason=reason)
        self.settle(group)
        self.joiners_changed(group)

    def evict(self, group: GroupState, reasons: dict[int, str]) -> None:
        """Rule connections of one group lost, and close them."""
        for conn, reason in reasons.items():
            # Tell it first, as in `_on_leave`.
            self.turn_away(conn, reason)
            if conn in group.joiners:
                self.forget_joiner(group, conn, reason)
        members = {conn: reason for conn, reason in reasons.items() if conn in group.members}
        if members:
            self.lose(group, members)

    def lose(self, group: GroupState, reasons: dict[int, str], event: str = "lost") -> None:
        """Members are lost, by connection. `event`: the name of this event in the log."""
        gone = []
        for conn, reason in reasons.items():
            member = group.members.pop(conn)
            self.unseat(group, conn)
            gone.append((member, reason))
        self._lost(group, gone, event)

    def give_up(self, group: GroupState, reasons: dict[int, str]) -> None:
        """Absent members are lost, by rank."""
        gone = []
        for rank, reason in reasons.items():
            member = self.books.take_absent(group, rank)
            assert member is not None
            gone.append((member, reason))
        self._lost(group, gone)
        # If these were the last members, the group was deleted, and its joiners are in a new group.
        if self.books.groups.get(group.key) is group:
            self.judge_joiners(group)

    def _lost(
        self, group: GroupState, gone: list[tuple[MemberInfo, str]], event: str = "lost"
    ) -> None:
        assert group.view is not None
        for member, reason in gone:
            group.lost[member.rank] = reason
            said = {"rank": member.rank, "who": describe(member), "reason": reason}
            self.note(event, group, member=member.id, **said)
        # Change all state before any member is told, and tell all losses in one message, because a
        # receiver acts on it at once. Each reason appears once: if a host fails, its ranks are lost
        # for one reason, and thousands of others are told.
        text = "; ".join(dict.fromkeys(reason for _, reason in gone))[:MAX_TEXT]
        self.books.gone(group, [member for member, _ in gone], text)
        ranks = sorted(member.rank for member, _ in gone)
        message = MemberLost(group.view.epoch, tuple(ranks), text)
        for other in group.members:
            self.send(other, 0, message)
        self.settle(group)

    def left(self, group: GroupState, conn: int) -> None:
        """A member has left in order."""
        member = group.members.pop(conn)
        self.unseat(group, conn)
        self.note("left", group, member=member.id, rank=member.rank)
        self.have_left(group, [member])
        self.settle(group)

    def have_left(self, group: GroupState, members: Sequence[MemberInfo], but: int = -1) -> None:
        assert group.view is not None
        ranks = tuple([member.rank for member in members])
        group.left.update(ranks)
        self.books.gone(group, members, None)
        told = MemberLeft(group.view.epoch, ranks)
        for other in group.members:
            if other != but:
                self.send(other, 0, told)

    def settle(self, group: GroupState) -> None:
        """Finish a change: review the votes of the members that are left, or delete an empty group.

        Joiners of a deleted group form it anew.
        """
        # Votes are reviewed after every change, because the ballot may have waited for a member
        # that is gone. A group whose members are all absent is not empty: they may come back and
        # need their seats.
        #
        # If too few joiners are left, the end of the join window must not form the group.
        if group.view is None and not group.may_form:
            self._timers.cancel(JoinWindow(group.key))
        if group.members or group.absent or (group.view is None and group.joiners):
            self.review(group)
            return
        self.books.end(group)
        self.note("deleted", group)
        self._admit_again(group)

    def unseat(self, group: GroupState, conn: int) -> None:
        del self.places[conn]
        self._timers.cancel(LeaseTimer(conn))
        group.forget(conn)
        self.survey.gone(conn)
        self.stalls.gone(group, conn)

    # Returns.

    def take_seat(self, group: GroupState, conn: int, rank: int, lease: float) -> None:
        # The old connection may still be open when the member comes over a new one::
        #
        #     old connection  ──── a member ────────┐ its end has not been seen yet
        #     new connection           Rejoin ──────┴──> takes the seat; the old one is closed by us
        #
        # We close the old connection ourselves. If we waited for its end, that would count as the
        # death of the member. If the member was absent, there is no old connection.
        member = self.books.take_absent(group, rank)
        if member is None:
            before = group.members.of_rank(rank)
            assert before is not None
            member = group.members.pop(before)
            self._replace(before, group)
        group.members[conn] = member
        group.leases[conn] = lease
        self.places[conn] = group
        self.renew(conn)
        self.books.got_word(group)
        self.note("back", group, rank=rank, who=describe(member))

    def cut_off(self, group: GroupState) -> None:
        """A whole group has fallen silent, maybe because this coordinator is unreachable.

        Its members become absent and may come back over new connections. No one is told of an
        eviction, because members may read that message when the network is back.
        """
        self.note("silent", group, ranks=len(group.members), waiting=len(group.joiners))
        for conn in list(group.leases):
            self.effects.append(Close(conn, "all of its group fell silent"))
            if conn in group.members:
                member = group.members.pop(conn)
                group.absent[member.rank] = member
                self.unseat(group, conn)
        # Joiners come last. Forgetting one settles the group, and the group would be deleted if its
        # members were not marked absent by then.
        self.books.await_word(group)
        for conn in list(group.joiners):
            self.forget_joiner(group, conn, "all of its group fell silent")

    def _replace(self, conn: int, group: GroupState) -> None:
        """Forget a connection whose member has come over another one."""
        group.joiners.pop(conn, None)
        self.unseat(group, conn)
        self.effects.append(Close(conn, "its member has come over another connection"))

    def judge_joiners(self, group: GroupState) -> None:
        """Ask joiners again once all members have come back or are lost."""
        if not group.absent:
            self._admit_again(group)

    def _admit_again(self, group: GroupState) -> None:
        # Unseat all before the first is admitted, because the same name may now be a new group.
        waiting, group.joiners = list(group.joiners.values()), Seats()
        for joiner in waiting:
            self.unseat(group, joiner.conn)
        for joiner in waiting:
            self.admit(joiner)
        if waiting and not group.joiners:  # else the last one that waits again has told
            self.joiners_changed(group)

    # Helpers.

    def renew(self, conn: int) -> None:
        group = self.places.get(conn)
        if group is not None:
            self._timers.set(LeaseTimer(conn), self.now + group.leases[conn])

    def turn_away(self, conn: int, reason: str) -> None:
        """Tell a process that it is no longer a member, and close its connection."""
        self.send(conn, 0, Evicted(reason[:MAX_TEXT]))  # the reason may quote a member
        self.effects.append(Close(conn, reason))

    def send(self, conn: int, request: int, message: Message) -> None:
        self.effects.append(SendMessage(conn, request, message))

    def refused(self, event: str, ask: JoinRequest, **fields: Any) -> None:
        """Note that a process was refused."""
        who = describe(ask)
        self.effects.append(Note(event, {"group": ask.group, **fields, "who": who}))

    def note(self, event: str, group: GroupState, *, member: str = "", **fields: Any) -> None:
        run = {"run_id": group.run_id} if group.run_id else {}
        self.effects.append(Note(event, {"group": group.name, **run, **fields}, member))
