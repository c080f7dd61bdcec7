"""Who has which seat: joiners are taken in, members leave or are lost, and the others are told.

This is the part of the state machine that changes groups. What asks for a change is in `machine`
(requests, ends of connections, time) and in `recovery` and `rejoining` (what members decide, and
who comes back). Each change ends with `settle`, for it may be what others waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiodist.membership.books import Books, JoinWindow, Lease
from aiodist.membership.effects import Close, Effect, Keep, Note, Send
from aiodist.membership.group import Group, Joiner, Size, describe
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
    """The groups, and who is in them.

    `places`: the group that a connection is of, as a member or as a joiner. `effects`: those of the
    present step, in their order. `draining`: no more joins. For `wall_offset`, `keep` and
    `form_after`, see `Membership`.
    """

    def __init__(self, wall_offset: float, keep: bool, form_after: float) -> None:
        # The groups, as they are kept.
        written = (lambda record: self.effects.append(Keep(record))) if keep else None
        self.books = Books(wall_offset, written)
        self.places: dict[int, Group] = {}
        self.effects: list[Effect] = []
        self.draining = False
        # What is done of members who have come or gone, and of joiners: both by `Recovery`.
        self.review: Callable[[Group], None]
        self.joiners_changed: Callable[[Group], None]
        self.survey = Survey(self.send, self.books)  # what members say that they are doing
        self.stalls = Stalls(self.send, self.note, self.books, self.survey)
        self._timers = self.books.timers  # those of the books
        self._form_after = form_after

    @property
    def now(self) -> float:
        """The time of the present step."""
        return self.books.now

    def admit(self, joiner: Joiner) -> None:
        """Refuse a joiner, or let it wait; form the group if it is the last that was missing."""
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
            failed = group.refuse(ask, size)
            if failed is None:
                self._seat(group, joiner)
                return
            self.settle(group)
        self.refused("join refused", ask, kind=failed.kind)
        self.send(conn, joiner.request, failed)

    def _seat(self, group: Group, joiner: Joiner) -> None:
        group.add(joiner)
        self.books.got_word(group)
        self.places[joiner.conn] = group
        self.renew(joiner.conn)
        self.note("waiting", group, rank=joiner.ask.rank, who=describe(joiner.ask))
        # A coordinator that has just started may have served this group before, and its members
        # may be about to say so: until `form_after`, the window is kept open for them.
        if group.is_full and self.now >= self._form_after:
            self.form(group)
        elif group.may_form:
            window = 0.0 if group.is_full else group.size.window
            self._timers.set(JoinWindow(group.key), max(self.now + window, self._form_after))
        else:
            self.joiners_changed(group)

    def _joins_again(self, group: Group, joiner: Joiner) -> bool:
        """Whether it had joined over a connection that broke, maybe with the coordinator before:
        then it gets the view that it missed. While it still waits, it begins anew."""
        member_id = joiner.ask.id
        waiting = group.joiners.of_id(member_id)
        if waiting is not None:
            self._replace(waiting, group)
            return False
        # It was let in, and its connection broke before it was told: it asks as if it were new.
        rank = group.place_of(member_id)
        if rank is None:
            return False
        self.take_seat(group, joiner.conn, rank, joiner.ask.lease)
        self.give_view(group, joiner.conn, joiner.request)
        self.judge_joiners(group)
        self.review(group)
        return True

    def give_view(self, group: Group, conn: int, request: int) -> None:
        """Tell a member the view that it missed, and who of it is gone."""
        assert group.view is not None
        epoch = group.view.epoch
        self.send(conn, request, group.view)
        if group.lost:
            self.send(conn, 0, MemberLost(epoch, tuple(sorted(group.lost)), BEFORE))
        if group.left:
            self.send(conn, 0, MemberLeft(epoch, tuple(sorted(group.left))))

    def form(self, group: Group) -> None:
        self._timers.cancel(JoinWindow(group.key))
        waiting = list(group.joiners.values())
        view = group.form(self.books.epochs.take(group.name))
        self.books.formed(group, view)
        self.note("formed", group, epoch=view.epoch, size=len(view.members))
        self.stalls.over(group)
        for joiner in waiting:
            self.send(joiner.conn, joiner.request, view)

    def go_on(self, group: Group, survivors: Mapping[int, int], admitted: Sequence[int]) -> None:
        """The next epoch of `group`: its members `survivors`, in that order, with the requests to
        answer, then the joiners `admitted`.

        The survivors have the view that was: the context of the vote that they have cast is its
        digest. So they are told what has changed, and only the joiners the view itself.
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

    def forget_joiner(self, group: Group, conn: int, reason: str, *, gave_up: bool = False) -> None:
        joiner = group.remove(conn, gave_up=gave_up)
        self.unseat(group, conn)
        self.note("withdrawn", group, who=describe(joiner.ask), reason=reason)
        self.settle(group)
        self.joiners_changed(group)

    def evict(self, group: Group, reasons: dict[int, str]) -> None:
        """Rule connections of one group lost, and close them."""
        for conn, reason in reasons.items():
            # First of all, as in `_on_leave`.
            self.turn_away(conn, reason)
            if conn in group.joiners:
                self.forget_joiner(group, conn, reason)
        members = {conn: reason for conn, reason in reasons.items() if conn in group.members}
        if members:
            self.lose(group, members)

    def lose(self, group: Group, reasons: dict[int, str], event: str = "lost") -> None:
        """Members are lost, by connection; `event` is how that is noted."""
        gone = []
        for conn, reason in reasons.items():
            member = group.members.pop(conn)
            self.unseat(group, conn)
            gone.append((member, reason))
        self._lost(group, gone, event)

    def give_up(self, group: Group, reasons: dict[int, str]) -> None:
        """Absent members are lost, by rank."""
        gone = []
        for rank, reason in reasons.items():
            member = self.books.take_absent(group, rank)
            assert member is not None
            gone.append((member, reason))
        self._lost(group, gone)
        # Those who were lost may have been the last: then the group was deleted, and who waited is
        # in a new one of that name already.
        if self.books.groups.get(group.key) is group:
            self.judge_joiners(group)

    def _lost(self, group: Group, gone: list[tuple[MemberInfo, str]], event: str = "lost") -> None:
        assert group.view is not None
        for member, reason in gone:
            group.lost[member.rank] = reason
            self.note(event, group, rank=member.rank, who=describe(member), reason=reason)
        # Everybody's state is changed before anybody is told, and each is told of all who went:
        # whoever reads the message decides with what is in it, and a second message for the same
        # cause would have it go on twice.
        # One message for all of them, with each reason once: where a host goes down, its ranks go
        # for one reason, and thousands of others are told.
        text = "; ".join(dict.fromkeys(reason for _, reason in gone))[:MAX_TEXT]
        self.books.gone(group, [member for member, _ in gone], text)
        ranks = sorted(member.rank for member, _ in gone)
        message = MemberLost(group.view.epoch, tuple(ranks), text)
        for other in group.members:
            self.send(other, 0, message)
        self.settle(group)

    def left(self, group: Group, conn: int) -> None:
        """A member has left in order."""
        member = group.members.pop(conn)
        self.unseat(group, conn)
        self.note("left", group, rank=member.rank)
        self.have_left(group, [member])
        self.settle(group)

    def have_left(self, group: Group, members: Sequence[MemberInfo], but: int = -1) -> None:
        """Members have left: write that down, and tell the others, `but` for one connection."""
        assert group.view is not None
        ranks = tuple([member.rank for member in members])
        group.left.update(ranks)
        self.books.gone(group, members, None)
        told = MemberLeft(group.view.epoch, ranks)
        for other in group.members:
            if other != but:
                self.send(other, 0, told)

    def settle(self, group: Group) -> None:
        """Delete the group if nobody is left, and let those who waited for that form it anew.
        Else the rest may have waited for the word of those who are gone."""
        # The end of every change, since whoever went may be what others waited for. The order is:
        # first the votes of those who are left, as a ballot that is decided now may change the
        # group once more. Only a group of which nobody is left is deleted; its joiners, who waited
        # for just that, form it anew. A group whose members are all absent is not empty: they may
        # come back, and must find their seats.
        # Too few are left to form it when the window is over.
        if group.view is None and not group.may_form:
            self._timers.cancel(JoinWindow(group.key))
        if group.members or group.absent or (group.view is None and group.joiners):
            self.review(group)
            return
        self.books.end(group)
        self.note("deleted", group)
        self._admit_again(group)

    def unseat(self, group: Group, conn: int) -> None:
        del self.places[conn]
        self._timers.cancel(Lease(conn))
        group.forget(conn)
        self.survey.gone(conn)
        self.stalls.gone(group, conn)

    # Coming back.

    def take_seat(self, group: Group, conn: int, rank: int, lease: float) -> None:
        """`conn` is the connection of the member with this rank from now on."""
        # Who sits where may change while both connections are open::
        #
        #     old connection  ──── a member ────────┐ its end has not been seen yet
        #     new connection           Rejoin ──────┴──> takes the seat; the old one is closed by us
        #
        # Were the old one merely left to end, its end would be taken for the death of the member,
        # who would be ruled lost over a connection that it has given up itself.
        # It was absent; or it has come over a new connection before the end of its old one was
        # seen, which must not count as its death any more.
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

    def cut_off(self, group: Group) -> None:
        """Nobody of a group is heard any more, as if this coordinator had gone away, and maybe it
        has: all may come back, over other connections. Nobody is told that it was evicted, for
        that may be read when it is back."""
        self.note("silent", group, ranks=len(group.members), waiting=len(group.joiners))
        for conn in list(group.leases):
            self.effects.append(Close(conn, "nobody of its group was heard any more"))
            if conn in group.members:
                member = group.members.pop(conn)
                group.absent[member.rank] = member
                self.unseat(group, conn)
        # First all seats, then the timers of the absent, and the joiners last: to forget one of
        # these settles the group, which must find its members absent and not gone, or it would be
        # deleted.
        self.books.await_word(group)
        for conn in list(group.joiners):
            self.forget_joiner(group, conn, "nobody of its group was heard any more")

    def _replace(self, conn: int, group: Group) -> None:
        """Forget a connection whose member has come over another one."""
        group.joiners.pop(conn, None)
        self.unseat(group, conn)
        self.effects.append(Close(conn, "its member has come over another connection"))

    def judge_joiners(self, group: Group) -> None:
        """Once it is clear who has come back: may those who waited for that still wait?"""
        if not group.absent:
            self._admit_again(group)

    def _admit_again(self, group: Group) -> None:
        """Whoever waits asks anew."""
        # All are unseated before the first is admitted: the same name may be a new group from here
        # on, and none of them may be found in the old one.
        waiting, group.joiners = list(group.joiners.values()), Seats()
        for joiner in waiting:
            self.unseat(group, joiner.conn)
        for joiner in waiting:
            self.admit(joiner)

    # Small things.

    def renew(self, conn: int) -> None:
        group = self.places.get(conn)
        if group is not None:
            self._timers.set(Lease(conn), self.now + group.leases[conn])

    def turn_away(self, conn: int, reason: str) -> None:
        """Tell who came over a connection that it is a member no more, and close it."""
        self.send(conn, 0, Evicted(reason[:MAX_TEXT]))  # it may hold what a member has said
        self.effects.append(Close(conn, reason))

    def send(self, conn: int, request: int, message: Message) -> None:
        self.effects.append(Send(conn, request, message))

    def refused(self, event: str, ask: JoinRequest, **fields: Any) -> None:
        """Note that somebody was not let in."""
        who = describe(ask)
        self.effects.append(Note(event, {"group": ask.group, **fields, "who": who}))

    def note(self, event: str, group: Group, **fields: Any) -> None:
        run = {"run_id": group.run_id} if group.run_id else {}
        self.effects.append(Note(event, {"group": group.name, **run, **fields}))
