"""The membership of all groups of one coordinator: ``step(event, now) -> effects``.

No I/O, no clock, no randomness: the caller brings events and the time, and carries out the
effects in their order. The same events at the same times give the same effects.

A coordinator that comes back learns of its groups from the log of the one before (`restore`), or
from their members, who say of which view they are. Whoever of a view does not come back within
its lease is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, get_args

from aiodist.membership.books import Answers, Books, Lease, Return, Ruling, Ttl, Window
from aiodist.membership.effects import (
    Close,
    Disconnected,
    Effect,
    Event,
    Keep,
    Note,
    Received,
    Send,
    Tick,
)
from aiodist.membership.group import Group, GroupKey, Joiner, Size, describe
from aiodist.membership.records import Record
from aiodist.membership.recovery import Recovery, RecoveryMessage
from aiodist.membership.rejoining import BEFORE, Rejoining
from aiodist.membership.seats import Seats
from aiodist.membership.silence import RETURN_SECONDS
from aiodist.membership.store import StoreMessage
from aiodist.membership.survey import Survey
from aiodist.wire.activity import Activity, SeenRequest
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Abort,
    Draining,
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    Leave,
    Left,
    MemberInfo,
    MemberLeft,
    MemberLost,
    Message,
    Renew,
    Status,
    StatusRequest,
    StoreCancel,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import Cause, GiveUpVote, NextView
from aiodist.wire.returning import Rejoin

_DRAINING = Failed(
    Failure.DRAINING,
    "the coordinator is shutting down and takes no joins: join the one that follows it",
)

MAX_REASON = 512
"""Most characters that are kept of why a connection ended."""


class Membership:
    """The state machine. `wall_offset`: what to add to `now` for seconds since the Unix epoch.

    `keep`: emit `Keep` effects. `form_after`: no group forms before that time, so that members of
    groups that a coordinator before this one served can come back first.

    A connection is of at most one group, as one member. Messages of the greeting are not for this
    machine: it sees a connection from its first request on.
    """

    def __init__(
        self, *, wall_offset: float = 0.0, keep: bool = False, form_after: float = -inf
    ) -> None:
        self._books = Books(wall_offset, self._keep if keep else None)
        self._groups = self._books.groups
        self._timers = self._books.timers
        self._form_after = form_after
        self._places: dict[int, Group] = {}
        self._draining = False
        self._effects: list[Effect] = []
        self._recovery = Recovery(self)
        self._rejoining = Rejoining(self, self._books, self._recovery)
        self._survey = Survey(self, self._books)
        self._handlers: dict[type[Message], Callable[[int, int, Any], None]] = {
            JoinRequest: self._on_join,
            Withdraw: self._on_withdraw,
            Leave: self._on_leave,
            Abort: self._on_leave,
            Renew: self._on_renew,
            StatusRequest: self._on_status,
            Activity: self._survey.heard,
            SeenRequest: self._on_seen_request,
        }
        self._handlers.update(dict.fromkeys(get_args(StoreMessage), self._on_store))
        self._handlers.update(dict.fromkeys(get_args(RecoveryMessage), self._on_recovery))
        self._handlers[Rejoin] = self._rejoining.handle

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at time `now` (seconds, never going back)."""
        self._books.now = now
        effects: list[Effect] = []
        self._effects = effects
        match event:
            case Received(conn, request, message):
                self._on_message(conn, request, message)
            case Disconnected(conn, reason):
                self._on_disconnected(conn, reason)
            case Tick():
                self._on_tick()
            case _:
                self._on_drain()
        return effects

    @property
    def now(self) -> float:
        """The time of the present step."""
        return self._books.now

    def restore(self, records: Iterable[Record], now: float) -> None:
        """Take in what the machine before wrote down. To be called once, before the first step.
        Raises ValueError for records that make no sense."""
        self._books.now = now
        self._books.replay(records)

    def records(self) -> Iterator[Record]:
        """All that a machine after this one has to know. No step may come while it is iterated."""
        return self._books.records()

    def deadline(self) -> float | None:
        """When a Tick is wanted next; None: not before something else happens."""
        return self._timers.next()

    @property
    def is_empty(self) -> bool:
        """Whether there is no group at all."""
        return not self._groups

    def status(self) -> dict[str, Any]:
        """What there is, as plain data (for each group: see `Group.status`)."""
        return {
            "draining": self._draining,
            "groups": [group.status() for group in self._groups.values()],
        }

    # Events.

    def _on_message(self, conn: int, request: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            reason = f"a member does not send {type(message).__name__} messages"
            self._on_disconnected(conn, reason)
            self._effects.append(Close(conn, reason))
            return
        self._renew(conn)
        handler(conn, request, message)

    def _on_disconnected(self, conn: int, reason: str) -> None:
        self._rejoining.gone(conn)
        group = self._places.get(conn)
        if group is None:
            self._survey.gone(conn)
            return
        if conn in group.joiners:
            self._forget_joiner(group, conn, reason)
        else:
            self._lose(group, {conn: reason[:MAX_REASON]})

    def _on_tick(self) -> None:
        due = self._timers.pop_due(self.now)
        silent: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            if isinstance(timer, Lease):
                group = self._places[timer.conn]
                lease = group.leases[timer.conn]
                silent.setdefault(group.key, {})[timer.conn] = f"no sign of life for {lease:g} s"
        for key, reasons in silent.items():
            if self._books.is_cut_off(self._groups[key]):
                self._cut_off(self._groups[key])
            else:
                self.evict(self._groups[key], reasons)
        missed: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            if isinstance(timer, Return):
                group = self._groups[timer.group]
                limit = RETURN_SECONDS if group.cut_off else group.absent[timer.rank].lease
                reason = f"it did not come back to the coordinator for {limit:g} s"
                missed.setdefault(timer.group, {})[timer.rank] = reason
        for key, ranks in missed.items():
            self.give_up(self._groups[key], ranks)
        for timer in due:
            if isinstance(timer, Window):
                waiting = self._groups.get(timer.group)
                if waiting is not None and waiting.may_form:
                    self._form(waiting)
                elif waiting is not None:
                    self._recovery.window_over(waiting)
            elif isinstance(timer, Ruling):
                divided = self._groups.get(timer.group)
                if divided is not None:
                    self._recovery.rule(divided)
            elif isinstance(timer, Answers):
                self._survey.over()
            elif isinstance(timer, Ttl):
                owner = self._groups.get(timer.group)
                if owner is not None:
                    self._effects += owner.store.expire(timer.key)

    def _on_drain(self) -> None:
        self._draining = True
        for conn, group in list(self._places.items()):
            if conn in group.members:
                self.send(conn, 0, Draining())
            else:
                joiner = group.joiners[conn]
                self._forget_joiner(group, conn, "the coordinator is draining")
                self.send(conn, joiner.request, _DRAINING)

    # Requests.

    def _on_join(self, conn: int, request: int, ask: JoinRequest) -> None:
        self._admit(Joiner(conn, request, ask, self._books.wall_time))

    def _on_withdraw(self, conn: int, request: int, _: Withdraw) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.joiners:
            return
        withdrawn = Withdrawn(group.waiting_text()[:MAX_TEXT], group.missing)
        self._forget_joiner(group, conn, "gave up waiting", gave_up=True)
        self.send(conn, request, withdrawn)

    def _on_leave(self, conn: int, request: int, message: Leave | Abort) -> None:
        # First of all: whoever waited for its place may be let in by what follows.
        self.send(conn, request, Left())
        group = self._places.get(conn)
        if group is not None and conn in group.joiners:
            self._forget_joiner(group, conn, "withdrew")
        elif group is not None and isinstance(message, Abort):
            self._lose(group, {conn: f"it aborted: {message.reason}"[:MAX_REASON]}, "aborted")
        elif group is not None and group.view is not None:
            member = group.members.pop(conn)
            group.left.add(member.rank)
            self.unseat(group, conn)
            self._books.gone(group, [member], None)
            self.note("left", group, rank=member.rank)
            left = MemberLeft(group.view.epoch, (member.rank,))
            for other in group.members:
                self.send(other, 0, left)
            self._settle(group)

    def _on_renew(self, conn: int, request: int, _: Renew) -> None:
        """Every message renews the lease. That its loop is busy, another one would have said."""
        self._survey.forget(conn)

    def _on_status(self, conn: int, request: int, message: StatusRequest) -> None:
        if message.ask_members:
            self._survey.ask_all(conn, request, self.status)
        else:
            self.send(conn, request, Status(self.status()))

    def _on_seen_request(self, conn: int, request: int, message: SeenRequest) -> None:
        group = self._places.get(conn)
        if group is not None and conn in group.members:
            self._survey.ask_some(conn, request, group, message)
        else:
            self._not_a_member(conn, request, "what others are doing is said to members")

    def _on_store(self, conn: int, request: int, message: StoreMessage) -> None:
        group = self._places.get(conn)
        if group is not None and isinstance(message, StoreCancel):
            group.watchers.get(conn, set()).discard(message.request)
        if group is not None and conn in group.members:
            member = group.members[conn]
            self._effects += group.store.handle(conn, request, message, member.id)
        elif not isinstance(message, StoreCancel):
            self._not_a_member(conn, request, "the store is for members of a group")

    def _on_recovery(self, conn: int, request: int, message: RecoveryMessage) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.members:
            self._not_a_member(conn, request, "votes are for members of a group")
        elif isinstance(message, GiveUpVote) and message.cause is Cause.TIMEOUT:
            self._ask_before_void(group, conn, request, message)
        else:
            self._recovery.handle(group, conn, request, message)

    def _ask_before_void(self, group: Group, conn: int, request: int, message: GiveUpVote) -> None:
        """Ask those who have not voted what they are doing: then the vote is void, unless it is
        decided by then."""
        key = (message.context, message.number)
        missing = group.ballots.missing(group.members, key)

        def give_up() -> None:  # not called once `conn` is no member any more
            self._recovery.handle(group, conn, request, message, self._survey.words(group))

        self._survey.ask(conn, missing, give_up)

    def _not_a_member(self, conn: int, request: int, text: str) -> None:
        self.send(conn, request, Failed(Failure.NOT_A_MEMBER, f"{text}: join one first"))

    # Changes.

    def _admit(self, joiner: Joiner) -> None:
        """Refuse a joiner, or let it wait; form the group if it is the last that was missing."""
        conn, ask = joiner.conn, joiner.ask
        key = (ask.group, ask.run_id)
        size = Size.of(ask)
        group = self._groups.get(key)
        failed: Failed | None
        if self._draining:
            failed = _DRAINING
        elif conn in self._places:
            failed = Failed(Failure.INVALID, "this connection has joined already")
        elif isinstance(size, Failed):
            failed = size
        else:
            if group is None:
                group = self._books.open(key, size, describe(ask))
            elif self._joins_again(group, joiner):
                return
            failed = group.refuse(ask, size)
            if failed is None:
                self._seat(group, joiner)
                return
            self._settle(group)
        self.refused("join refused", ask, kind=failed.kind)
        self.send(conn, joiner.request, failed)

    def _seat(self, group: Group, joiner: Joiner) -> None:
        group.add(joiner)
        self._books.got_word(group)
        self._places[joiner.conn] = group
        self._renew(joiner.conn)
        self.note("waiting", group, rank=joiner.ask.rank, who=describe(joiner.ask))
        if group.is_full and self.now >= self._form_after:
            self._form(group)
        elif group.may_form:
            window = 0.0 if group.is_full else group.size.window
            self._timers.set(Window(group.key), max(self.now + window, self._form_after))
        else:
            self._recovery.joiners_changed(group)

    def _joins_again(self, group: Group, joiner: Joiner) -> bool:
        """Whether it had joined over a connection that broke, maybe with the coordinator before:
        then it gets the view that it missed. While it still waits, it begins anew."""
        member_id = joiner.ask.id
        waiting = group.joiners.of_id(member_id)
        if waiting is not None:
            self._replace(waiting, group)
            return False
        rank = group.place_of(member_id)
        if rank is None:
            return False
        self.take_seat(group, joiner.conn, rank, joiner.ask.lease)
        self.give_view(group, joiner.conn, joiner.request)
        self.judge_joiners(group)
        self._recovery.review(group)
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

    def _form(self, group: Group) -> None:
        self._timers.cancel(Window(group.key))
        waiting = list(group.joiners.values())
        view = group.form(self.next_epoch(group))
        self._books.formed(group, view)
        self.note("formed", group, epoch=view.epoch, size=len(view.members))
        for joiner in waiting:
            self.send(joiner.conn, joiner.request, view)

    def go_on(self, group: Group, survivors: Mapping[int, int], admitted: Sequence[int]) -> None:
        """The next epoch of `group`: its members `survivors`, in that order, with the requests to
        answer, then the joiners `admitted`.

        The survivors have the view that was: the context of the vote that they have cast is its
        digest. So they are told what has changed, and only the joiners the view itself.
        """
        self.cancel_timer(Window(group.key))
        before = group.view
        assert before is not None
        requests = {conn: group.joiners[conn].request for conn in admitted}
        view = group.go_on(self.next_epoch(group), survivors, admitted)
        self._books.formed(group, view)
        self.note("went on", group, epoch=view.epoch, size=len(view.members))
        change = NextView.between(before, view)
        for conn, request in survivors.items():
            self.send(conn, request, change)
        for conn, request in requests.items():
            self.send(conn, request, view)

    def next_epoch(self, group: Group) -> int:
        """A number that no epoch of that name has had."""
        return self._books.epochs.take(group.name)

    def _forget_joiner(
        self, group: Group, conn: int, reason: str, *, gave_up: bool = False
    ) -> None:
        joiner = group.remove(conn, gave_up=gave_up)
        self.unseat(group, conn)
        self.note("withdrawn", group, who=describe(joiner.ask), reason=reason)
        self._settle(group)
        self._recovery.joiners_changed(group)

    def evict(self, group: Group, reasons: dict[int, str]) -> None:
        """Rule connections of one group lost, and close them."""
        for conn, reason in reasons.items():
            # First of all, as in `_on_leave`.
            self.turn_away(conn, reason)
            if conn in group.joiners:
                self._forget_joiner(group, conn, reason)
        members = {conn: reason for conn, reason in reasons.items() if conn in group.members}
        if members:
            self._lose(group, members)

    def _lose(self, group: Group, reasons: dict[int, str], event: str = "lost") -> None:
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
            member = self._books.take_absent(group, rank)
            assert member is not None
            gone.append((member, reason))
        self._lost(group, gone)
        if self._groups.get(group.key) is group:
            self.judge_joiners(group)

    def _lost(self, group: Group, gone: list[tuple[MemberInfo, str]], event: str = "lost") -> None:
        assert group.view is not None
        for member, reason in gone:
            group.lost[member.rank] = reason
            self.note(event, group, rank=member.rank, who=describe(member), reason=reason)
        text = "; ".join(dict.fromkeys(reason for _, reason in gone))[:MAX_TEXT]
        self._books.gone(group, [member for member, _ in gone], text)
        ranks = sorted(member.rank for member, _ in gone)
        message = MemberLost(group.view.epoch, tuple(ranks), text)
        for other in group.members:
            self.send(other, 0, message)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Delete the group if nobody is left, and let those who waited for that form it anew.
        Else the rest may have waited for the word of those who are gone."""
        if group.view is None and not group.may_form:
            self._timers.cancel(Window(group.key))
        if group.members or group.absent or (group.view is None and group.joiners):
            self._recovery.review(group)
            return
        self._books.end(group)
        self.note("deleted", group)
        waiting = list(group.joiners.values())
        for joiner in waiting:
            self.unseat(group, joiner.conn)
        for joiner in waiting:
            self._admit(joiner)

    def unseat(self, group: Group, conn: int) -> None:
        del self._places[conn]
        self._timers.cancel(Lease(conn))
        group.forget(conn)
        self._survey.gone(conn)

    # Coming back.

    def take_seat(self, group: Group, conn: int, rank: int, lease: float) -> None:
        """`conn` is the connection of the member with this rank from now on."""
        member = self._books.take_absent(group, rank)
        if member is None:
            before = group.members.of_rank(rank)
            assert before is not None
            member = group.members.pop(before)
            self._replace(before, group)
        group.members[conn] = member
        group.leases[conn] = lease
        self._places[conn] = group
        self._renew(conn)
        self._books.got_word(group)
        self.note("back", group, rank=rank, who=describe(member))

    def _cut_off(self, group: Group) -> None:
        """Nobody of a group is heard any more, as if this coordinator had gone away, and maybe it
        has: all may come back, over other connections. Nobody is told that it was evicted, for
        that may be read when it is back."""
        self.note("silent", group, ranks=len(group.members), waiting=len(group.joiners))
        for conn in list(group.leases):
            self._effects.append(Close(conn, "nobody of its group was heard any more"))
            if conn in group.members:
                member = group.members.pop(conn)
                group.absent[member.rank] = member
                self.unseat(group, conn)
        self._books.await_word(group)
        for conn in list(group.joiners):
            self._forget_joiner(group, conn, "nobody of its group was heard any more")

    def _replace(self, conn: int, group: Group) -> None:
        """Forget a connection whose member has come over another one."""
        group.joiners.pop(conn, None)
        self.unseat(group, conn)
        self._effects.append(Close(conn, "its member has come over another connection"))

    def judge_joiners(self, group: Group) -> None:
        """Once it is clear who has come back: may those who waited for that still wait?"""
        if group.absent or not group.joiners:
            return
        waiting, group.joiners = list(group.joiners.values()), Seats()
        for joiner in waiting:
            self.unseat(group, joiner.conn)
        for joiner in waiting:
            self._admit(joiner)

    # Small things.

    def set_timer(self, timer: Window | Ruling, seconds: float) -> None:
        self._timers.set(timer, self.now + seconds)

    def cancel_timer(self, timer: Window | Ruling) -> None:
        self._timers.cancel(timer)

    def _renew(self, conn: int) -> None:
        group = self._places.get(conn)
        if group is not None:
            self._timers.set(Lease(conn), self.now + group.leases[conn])

    def _keep(self, record: Record) -> None:
        self._effects.append(Keep(record))

    def has_seat(self, conn: int) -> bool:
        """Whether a connection is of a group."""
        return conn in self._places

    def turn_away(self, conn: int, reason: str) -> None:
        """Tell who came over a connection that it is a member no more, and close it."""
        self.send(conn, 0, Evicted(reason[:MAX_TEXT]))  # it may hold what a member has said
        self._effects.append(Close(conn, reason))

    def send(self, conn: int, request: int, message: Message) -> None:
        self._effects.append(Send(conn, request, message))

    def refused(self, event: str, ask: JoinRequest, **fields: Any) -> None:
        """Note that somebody was not let in."""
        who = describe(ask)
        self._effects.append(Note(event, {"group": ask.group, **fields, "who": who}))

    def note(self, event: str, group: Group, **fields: Any) -> None:
        run = {"run_id": group.run_id} if group.run_id else {}
        self._effects.append(Note(event, {"group": group.name, **run, **fields}))
