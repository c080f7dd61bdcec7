"""The membership of all groups of one coordinator: ``step(event, now) -> effects``.

No I/O, no clock, no randomness: the caller brings events and the time, and carries out the
effects in their order. The same events at the same times give the same effects.

A coordinator that comes back learns of its groups from the log of the one before (`restore`), or
from their members, who say of which view they are. Whoever of a view does not come back within
its lease is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, get_args

from aiodist.membership.books import Books, Lease, Return, Ttl, Window
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
from aiodist.membership.returning import Refused, Way, check_view, judge
from aiodist.membership.store import StoreMessage
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Draining,
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    Later,
    Leave,
    Left,
    MemberInfo,
    MemberLeft,
    MemberLost,
    Message,
    Rejoin,
    Rejoined,
    Renew,
    Status,
    StatusRequest,
    StoreCancel,
    View,
    ViewWanted,
    Withdraw,
    Withdrawn,
)

_DRAINING = Failed(
    Failure.DRAINING,
    "the coordinator is shutting down and takes no joins: join the one that follows it",
)

ANSWER_SECONDS = 2.0
"""How long a member that was asked for its view may take before another one is asked."""

MAX_ASKED = 4096
"""Most groups at once whose view a member was asked for."""

_BEFORE = "it was ruled lost before it came back, or before the coordinator did"

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
        self._asked: dict[GroupKey, tuple[int, float]] = {}
        self._draining = False
        self._effects: list[Effect] = []
        self._handlers: dict[type[Message], Callable[[int, int, Any], None]] = {
            JoinRequest: self._on_join,
            Rejoin: self._on_rejoin,
            Withdraw: self._on_withdraw,
            Leave: self._on_leave,
            Renew: self._on_renew,
            StatusRequest: self._on_status,
        }
        self._handlers.update(dict.fromkeys(get_args(StoreMessage), self._on_store))

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
    def _now(self) -> float:
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
        for key, (asked, _) in list(self._asked.items()):
            if asked == conn:
                del self._asked[key]
        group = self._places.get(conn)
        if group is None:
            return
        if conn in group.joiners:
            self._forget_joiner(group, conn, reason)
        else:
            self._lose(group, {conn: reason[:MAX_REASON]})

    def _on_tick(self) -> None:
        due = self._timers.pop_due(self._now)
        silent: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            if isinstance(timer, Lease):
                group = self._places[timer.conn]
                lease = group.leases[timer.conn]
                silent.setdefault(group.key, {})[timer.conn] = f"no sign of life for {lease:g} s"
        for key, reasons in silent.items():
            self._evict(self._groups[key], reasons)
        missed: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            if isinstance(timer, Return):
                lease = self._groups[timer.group].absent[timer.rank].lease
                reason = f"it did not come back to the coordinator for {lease:g} s"
                missed.setdefault(timer.group, {})[timer.rank] = reason
        for key, ranks in missed.items():
            self._give_up(self._groups[key], ranks)
        for timer in due:
            if isinstance(timer, Window):
                waiting = self._groups.get(timer.group)
                if waiting is not None and waiting.may_form:
                    self._form(waiting)
            elif isinstance(timer, Ttl):
                owner = self._groups.get(timer.group)
                if owner is not None:
                    self._effects += owner.store.expire(timer.key)

    def _on_drain(self) -> None:
        self._draining = True
        for conn, group in list(self._places.items()):
            if conn in group.members:
                self._send(conn, 0, Draining())
            else:
                joiner = group.joiners[conn]
                self._forget_joiner(group, conn, "the coordinator is draining")
                self._send(conn, joiner.request, _DRAINING)

    # Requests.

    def _on_join(self, conn: int, request: int, ask: JoinRequest) -> None:
        self._admit(Joiner(conn, request, ask, self._books.wall_time))

    def _on_withdraw(self, conn: int, request: int, _: Withdraw) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.joiners:
            return
        text = group.waiting_text()[:MAX_TEXT]
        self._forget_joiner(group, conn, "gave up waiting", gave_up=True)
        self._send(conn, request, Withdrawn(text))

    def _on_leave(self, conn: int, request: int, _: Leave) -> None:
        # First of all: whoever waited for its place may be let in by what follows.
        self._send(conn, request, Left())
        group = self._places.get(conn)
        if group is not None and conn in group.joiners:
            self._forget_joiner(group, conn, "withdrew")
        elif group is not None and group.view is not None:
            member = group.members.pop(conn)
            group.left.add(member.rank)
            self._unseat(group, conn)
            self._books.gone(group, [member], None)
            self._note("left", group, rank=member.rank)
            message = MemberLeft(group.view.epoch, (member.rank,))
            for other in group.members:
                self._send(other, 0, message)
            self._settle(group)

    def _on_renew(self, conn: int, request: int, _: Renew) -> None:
        """Every message renews the lease: nothing is left to do."""

    def _on_status(self, conn: int, request: int, _: StatusRequest) -> None:
        self._send(conn, request, Status(self.status()))

    def _on_store(self, conn: int, request: int, message: StoreMessage) -> None:
        group = self._places.get(conn)
        if group is not None and conn in group.members:
            member = group.members[conn]
            self._effects += group.store.handle(conn, request, message, member.id)
        elif not isinstance(message, StoreCancel):
            text = "the store is for members of a group: join one first"
            self._send(conn, request, Failed(Failure.NOT_A_MEMBER, text))

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
        self._effects.append(
            Note("join refused", {"group": ask.group, "kind": failed.kind, "who": describe(ask)})
        )
        self._send(conn, joiner.request, failed)

    def _seat(self, group: Group, joiner: Joiner) -> None:
        group.add(joiner)
        self._places[joiner.conn] = group
        self._renew(joiner.conn)
        self._note("waiting", group, rank=joiner.ask.rank, who=describe(joiner.ask))
        if group.is_full and self._now >= self._form_after:
            self._form(group)
        elif group.may_form:
            window = 0.0 if group.is_full else group.size.window
            self._timers.set(Window(group.key), max(self._now + window, self._form_after))

    def _joins_again(self, group: Group, joiner: Joiner) -> bool:
        """Whether it had joined over a connection that broke, maybe with the coordinator before:
        then it gets the view that it missed. While it still waits, it begins anew."""
        member_id = joiner.ask.id
        for other in group.joiners.values():
            if other.ask.id == member_id:
                self._replace(other.conn, group)
                return False
        rank = group.place_of(member_id)
        if rank is None:
            return False
        assert group.view is not None
        self._take_seat(group, joiner.conn, rank, joiner.ask.lease)
        self._send(joiner.conn, joiner.request, group.view)
        epoch = group.view.epoch
        if group.lost:
            lost = MemberLost(epoch, tuple(sorted(group.lost)), _BEFORE)
            self._send(joiner.conn, 0, lost)
        if group.left:
            self._send(joiner.conn, 0, MemberLeft(epoch, tuple(sorted(group.left))))
        self._judge_joiners(group)
        return True

    def _form(self, group: Group) -> None:
        self._timers.cancel(Window(group.key))
        waiting = list(group.joiners.values())
        view = group.form(self._books.epochs.take(group.name))
        self._books.formed(group, view)
        self._note("formed", group, epoch=view.epoch, size=len(view.members))
        for joiner in waiting:
            self._send(joiner.conn, joiner.request, view)

    def _forget_joiner(
        self, group: Group, conn: int, reason: str, *, gave_up: bool = False
    ) -> None:
        joiner = group.remove(conn, gave_up=gave_up)
        self._unseat(group, conn)
        self._note("withdrawn", group, who=describe(joiner.ask), reason=reason)
        self._settle(group)

    def _evict(self, group: Group, reasons: dict[int, str]) -> None:
        """Rule connections of one group lost, and close them."""
        for conn, reason in reasons.items():
            # First of all, as in `_on_leave`.
            self._send(conn, 0, Evicted(reason))
            self._effects.append(Close(conn, reason))
            if conn in group.joiners:
                self._forget_joiner(group, conn, reason)
        members = {conn: reason for conn, reason in reasons.items() if conn in group.members}
        if members:
            self._lose(group, members)

    def _lose(self, group: Group, reasons: dict[int, str]) -> None:
        """Members are lost, by connection."""
        gone = []
        for conn, reason in reasons.items():
            member = group.members.pop(conn)
            self._unseat(group, conn)
            gone.append((member, reason))
        self._lost(group, gone)

    def _give_up(self, group: Group, reasons: dict[int, str]) -> None:
        """Absent members are lost, by rank."""
        gone = []
        for rank, reason in reasons.items():
            member = self._books.take_absent(group, rank)
            assert member is not None
            gone.append((member, reason))
        self._lost(group, gone)
        if self._groups.get(group.key) is group:
            self._judge_joiners(group)

    def _lost(self, group: Group, gone: list[tuple[MemberInfo, str]]) -> None:
        assert group.view is not None
        for member, reason in gone:
            group.lost[member.rank] = reason
            self._note("lost", group, rank=member.rank, who=describe(member), reason=reason)
        text = "; ".join(dict.fromkeys(reason for _, reason in gone))[:MAX_TEXT]
        self._books.gone(group, [member for member, _ in gone], text)
        ranks = sorted(member.rank for member, _ in gone)
        message = MemberLost(group.view.epoch, tuple(ranks), text)
        for other in group.members:
            self._send(other, 0, message)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Delete the group if nobody is left, and let those who waited for that form it anew."""
        if group.view is None and not group.may_form:
            self._timers.cancel(Window(group.key))
        if group.members or group.absent or (group.view is None and group.joiners):
            return
        self._books.end(group)
        self._note("deleted", group)
        waiting = list(group.joiners.values())
        for joiner in waiting:
            self._unseat(group, joiner.conn)
        for joiner in waiting:
            self._admit(joiner)

    def _unseat(self, group: Group, conn: int) -> None:
        del self._places[conn]
        del group.leases[conn]
        self._timers.cancel(Lease(conn))
        group.store.drop(conn)

    # Coming back.

    def _on_rejoin(self, conn: int, request: int, claim: Rejoin) -> None:
        key = (claim.ask.group, claim.ask.run_id)
        group = self._groups.get(key)
        size = Size.of(claim.ask)
        if conn in self._places:
            failed = Failed(Failure.INVALID, "this connection has joined already")
            self._send(conn, request, failed)
            return
        if isinstance(size, Failed):
            self._send(conn, request, size)
            return
        way = judge(group, self._books.ended.get(key), claim)
        if isinstance(way, Refused):
            self._refuse_claim(conn, claim, way.reason)
            return
        if way is Way.RESTORE:
            if not self._has_view(conn, request, claim, size):
                return
            assert claim.view is not None
            group = self._adopt(key, size, claim.view, claim.ask)
        assert group is not None
        self._take_seat(group, conn, claim.rank, claim.ask.lease)
        self._learn(group, conn, claim)
        self._send(conn, request, Rejoined(tuple(sorted(group.lost)), tuple(sorted(group.left))))
        self._judge_joiners(group)

    def _refuse_claim(self, conn: int, claim: Rejoin, reason: str) -> None:
        fields = {"group": claim.ask.group, "who": describe(claim.ask), "reason": reason}
        self._effects.append(Note("return refused", fields))
        self._send(conn, 0, Evicted(reason))
        self._effects.append(Close(conn, reason))

    def _has_view(self, conn: int, request: int, claim: Rejoin, size: Size) -> bool:
        """Whether a claim brings the view that it is about; else one member is asked for it."""
        key = (claim.ask.group, claim.ask.run_id)
        if claim.view is not None:
            wrong = check_view(claim, claim.view, size.most)
            if wrong is not None:
                self._send(conn, request, Failed(Failure.INVALID, wrong))
            return wrong is None
        asked, until = self._asked.get(key, (conn, 0.0))
        if asked == conn or until <= self._now:
            self._asked[key] = (conn, self._now + ANSWER_SECONDS)
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            self._send(conn, request, ViewWanted())
        else:
            self._send(conn, request, Later())
        return False

    def _adopt(self, key: GroupKey, size: Size, view: View, ask: JoinRequest) -> Group:
        """Take over the view of a member, newer than what is known of its group."""
        self._asked.pop(key, None)
        group = self._groups.get(key)
        if group is None:
            group = self._books.open(key, size, describe(ask))
        elif group.view is not None:
            reason = f"its group goes on in epoch {view.epoch}, of which it is no member"
            for conn in list(group.members):
                self._send(conn, 0, Evicted(reason))
                self._effects.append(Close(conn, reason))
                self._unseat(group, conn)
            group.members = {}
            group.store.clear()
        self._timers.cancel(Window(key))
        group.size = size
        self._books.formed(group, view)
        self._books.expect(group, view)
        self._note("restored", group, epoch=view.epoch, size=len(view.members))
        return group

    def _take_seat(self, group: Group, conn: int, rank: int, lease: float) -> None:
        """`conn` is the connection of the member with this rank from now on."""
        member = self._books.take_absent(group, rank)
        if member is None:
            before = group.conn_of(rank)
            assert before is not None
            member = group.members.pop(before)
            self._replace(before, group)
        group.members[conn] = member
        group.leases[conn] = lease
        self._places[conn] = group
        self._renew(conn)
        self._note("back", group, rank=rank, who=describe(member))

    def _replace(self, conn: int, group: Group) -> None:
        """Forget a connection whose member has come over another one."""
        group.joiners.pop(conn, None)
        self._unseat(group, conn)
        self._effects.append(Close(conn, "its member has come over another connection"))

    def _learn(self, group: Group, conn: int, claim: Rejoin) -> None:
        """Take over what a member knows of others that are gone: it was told by a coordinator."""
        for rank in sorted({*claim.lost} - {*group.lost} - group.left - {claim.rank}):
            if rank in group.absent:
                self._give_up(group, {rank: _BEFORE})
            elif (other := group.conn_of(rank)) is not None:
                self._evict(group, {other: _BEFORE})
        news = sorted({*claim.left} & {*group.absent})
        if news:
            assert group.view is not None
            members = []
            for rank in news:
                member = self._books.take_absent(group, rank)
                assert member is not None
                members.append(member)
                group.left.add(rank)
            self._books.gone(group, members, None)
            message = MemberLeft(group.view.epoch, tuple(news))
            for other in group.members:
                if other != conn:
                    self._send(other, 0, message)

    def _judge_joiners(self, group: Group) -> None:
        """Once it is clear who has come back: may those who waited for that still wait?"""
        if group.absent or not group.joiners:
            return
        waiting, group.joiners = list(group.joiners.values()), {}
        for joiner in waiting:
            self._unseat(group, joiner.conn)
        for joiner in waiting:
            self._admit(joiner)

    # Small things.

    def _renew(self, conn: int) -> None:
        group = self._places.get(conn)
        if group is not None:
            self._timers.set(Lease(conn), self._now + group.leases[conn])

    def _keep(self, record: Record) -> None:
        self._effects.append(Keep(record))

    def _send(self, conn: int, request: int, message: Message) -> None:
        self._effects.append(Send(conn, request, message))

    def _note(self, event: str, group: Group, **fields: Any) -> None:
        run = {"run_id": group.run_id} if group.run_id else {}
        self._effects.append(Note(event, {"group": group.name, **run, **fields}))
