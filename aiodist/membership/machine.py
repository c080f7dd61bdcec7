"""The membership of all groups of one coordinator: ``step(event, now) -> effects``.

No I/O, no clock, no randomness: the caller brings events and the time, and carries out the
effects in their order. The same events at the same times give the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from aiodist.membership.effects import (
    Close,
    Disconnected,
    Effect,
    Event,
    Note,
    Received,
    Send,
    Tick,
)
from aiodist.membership.epochs import Epochs
from aiodist.membership.group import Group, GroupKey, Joiner, Size, describe
from aiodist.membership.recovery import Recovery, RecoveryMessage, Ruling, Window
from aiodist.membership.store import KeyValueStore, StoreMessage
from aiodist.membership.timers import Timers
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Draining,
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    Leave,
    Left,
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

_DRAINING = Failed(
    Failure.DRAINING,
    "the coordinator is shutting down and takes no joins: join the one that follows it",
)

MAX_REASON = 512
"""Most characters that are kept of why a connection ended."""


@dataclass(frozen=True, slots=True)
class _Lease:
    conn: int


@dataclass(frozen=True, slots=True)
class _Ttl:
    group: GroupKey
    key: str


class Membership:
    """The state machine. `wall_offset`: what to add to `now` for seconds since the Unix epoch.

    A connection is of at most one group, as one member. Messages of the greeting are not for this
    machine: it sees a connection from its first request on.
    """

    def __init__(self, *, wall_offset: float = 0.0, epoch_floor: int = 0) -> None:
        self._wall_offset = wall_offset
        self._epochs = Epochs(epoch_floor)
        self._groups: dict[GroupKey, Group] = {}
        self._places: dict[int, Group] = {}
        self._timers: Timers[_Lease | Window | Ruling | _Ttl] = Timers()
        self._draining = False
        self._now = 0.0
        self._effects: list[Effect] = []
        self._handlers: dict[type[Message], Callable[[int, int, Any], None]] = {
            JoinRequest: self._on_join,
            Withdraw: self._on_withdraw,
            Leave: self._on_leave,
            Renew: self._on_renew,
            StatusRequest: self._on_status,
        }
        self._handlers.update(dict.fromkeys(get_args(StoreMessage), self._on_store))
        self._handlers.update(dict.fromkeys(get_args(RecoveryMessage), self._on_recovery))
        self._recovery = Recovery(self)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at time `now` (seconds, never going back)."""
        self._now = now
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

    def deadline(self) -> float | None:
        """When a Tick is wanted next; None: not before something else happens."""
        return self._timers.next()

    @property
    def is_empty(self) -> bool:
        """Whether there is no group at all."""
        return not self._groups

    @property
    def highest_epoch(self) -> int:
        """Given as `epoch_floor` to the machine after this one, it keeps epochs growing."""
        return self._epochs.highest

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
            if isinstance(timer, _Lease):
                group = self._places[timer.conn]
                lease = group.leases[timer.conn]
                silent.setdefault(group.key, {})[timer.conn] = f"no sign of life for {lease:g} s"
        for key, reasons in silent.items():
            self.evict(self._groups[key], reasons)
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
            elif isinstance(timer, _Ttl):
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
        since = max(0.0, self._now + self._wall_offset)
        self._admit(Joiner(conn, request, ask, since))

    def _on_withdraw(self, conn: int, request: int, _: Withdraw) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.joiners:
            return
        text = group.waiting_text()[:MAX_TEXT]
        self._forget_joiner(group, conn, "gave up waiting", gave_up=True)
        self.send(conn, request, Withdrawn(text))

    def _on_leave(self, conn: int, request: int, _: Leave) -> None:
        # First of all: whoever waited for its place may be let in by what follows.
        self.send(conn, request, Left())
        group = self._places.get(conn)
        if group is not None and conn in group.joiners:
            self._forget_joiner(group, conn, "withdrew")
        elif group is not None and group.view is not None:
            member = group.members.pop(conn)
            group.left.add(member.rank)
            self._unseat(group, conn)
            self._note("left", group, rank=member.rank)
            message = MemberLeft(group.view.epoch, (member.rank,))
            for other in group.members:
                self.send(other, 0, message)
            self._settle(group)

    def _on_renew(self, conn: int, request: int, _: Renew) -> None:
        """Every message renews the lease: nothing is left to do."""

    def _on_status(self, conn: int, request: int, _: StatusRequest) -> None:
        self.send(conn, request, Status(self.status()))

    def _on_store(self, conn: int, request: int, message: StoreMessage) -> None:
        group = self._places.get(conn)
        if group is not None and isinstance(message, StoreCancel):
            group.watchers.discard((conn, message.request))
        if group is not None and conn in group.members:
            self._effects += group.store.handle(conn, request, message)
        elif not isinstance(message, StoreCancel):
            text = "the store is for members of a group: join one first"
            self.send(conn, request, Failed(Failure.NOT_A_MEMBER, text))

    def _on_recovery(self, conn: int, request: int, message: RecoveryMessage) -> None:
        group = self._places.get(conn)
        if group is not None and conn in group.members:
            self._recovery.handle(group, conn, request, message)
        else:
            text = "votes are for members of a group: join one first"
            self.send(conn, request, Failed(Failure.NOT_A_MEMBER, text))

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
                group = self._open(key, size, describe(ask))
            failed = group.refuse(ask, size)
            if failed is None:
                self._seat(group, joiner)
                return
            self._settle(group)
        self._effects.append(
            Note("join refused", {"group": ask.group, "kind": failed.kind, "who": describe(ask)})
        )
        self.send(conn, joiner.request, failed)

    def _open(self, key: GroupKey, size: Size, opener: str) -> Group:
        name, run_id = key
        store = KeyValueStore(partial(self._set_ttl, key))
        group = self._groups[key] = Group(name, run_id, size, opener, store)
        return group

    def _seat(self, group: Group, joiner: Joiner) -> None:
        group.add(joiner)
        self._places[joiner.conn] = group
        self._renew(joiner.conn)
        self._note("waiting", group, rank=joiner.ask.rank, who=describe(joiner.ask))
        if group.is_full:
            self._form(group)
        elif group.may_form:
            self.set_timer(Window(group.key), group.size.window)
        else:
            self._recovery.joiners_changed(group)

    def _form(self, group: Group) -> None:
        self._timers.cancel(Window(group.key))
        waiting = list(group.joiners.values())
        view = group.form(self.next_epoch(group))
        self._note("formed", group, epoch=view.epoch, size=len(view.members))
        for joiner in waiting:
            self.send(joiner.conn, joiner.request, view)

    def go_on(self, group: Group, survivors: Mapping[int, int], admitted: Sequence[int]) -> None:
        """The next epoch of `group`: its members `survivors`, in that order, with the requests to
        answer, then the joiners `admitted`."""
        self.cancel_timer(Window(group.key))
        requests = dict(survivors)
        requests.update({conn: group.joiners[conn].request for conn in admitted})
        view = group.go_on(self.next_epoch(group), survivors, admitted)
        self._note("went on", group, epoch=view.epoch, size=len(view.members))
        for conn, request in requests.items():
            self.send(conn, request, view)

    def next_epoch(self, group: Group) -> int:
        """A number that no epoch of that name has had."""
        return self._epochs.take(group.name)

    def _forget_joiner(
        self, group: Group, conn: int, reason: str, *, gave_up: bool = False
    ) -> None:
        joiner = group.remove(conn, gave_up=gave_up)
        self._unseat(group, conn)
        self._note("withdrawn", group, who=describe(joiner.ask), reason=reason)
        self._settle(group)
        self._recovery.joiners_changed(group)

    def evict(self, group: Group, reasons: dict[int, str]) -> None:
        """Rule connections of one group lost, and close them."""
        for conn, reason in reasons.items():
            # First of all, as in `_on_leave`.
            self.send(conn, 0, Evicted(reason))
            self._effects.append(Close(conn, reason))
            if conn in group.joiners:
                self._forget_joiner(group, conn, reason)
        members = {conn: reason for conn, reason in reasons.items() if conn in group.members}
        if members:
            self._lose(group, members)

    def _lose(self, group: Group, reasons: dict[int, str]) -> None:
        assert group.view is not None
        ranks = []
        for conn, reason in reasons.items():
            member = group.members.pop(conn)
            group.lost[member.rank] = reason
            ranks.append(member.rank)
            self._unseat(group, conn)
            self._note("lost", group, rank=member.rank, who=describe(member), reason=reason)
        text = "; ".join(dict.fromkeys(reasons.values()))[:MAX_TEXT]
        message = MemberLost(group.view.epoch, tuple(sorted(ranks)), text)
        for other in group.members:
            self.send(other, 0, message)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Delete the group if nobody is left, and let those who waited for that form it anew.
        Else the rest may have waited for the word of those who are gone."""
        if group.view is None and not group.may_form:
            self._timers.cancel(Window(group.key))
        if group.members or (group.view is None and group.joiners):
            self._recovery.review(group)
            return
        del self._groups[group.key]
        group.store.clear()
        self._note("deleted", group)
        waiting = list(group.joiners.values())
        for joiner in waiting:
            self._unseat(group, joiner.conn)
        for joiner in waiting:
            self._admit(joiner)

    def _unseat(self, group: Group, conn: int) -> None:
        del self._places[conn]
        self._timers.cancel(_Lease(conn))
        group.forget(conn)

    # Small things.

    def set_timer(self, timer: Window | Ruling, seconds: float) -> None:
        self._timers.set(timer, self._now + seconds)

    def cancel_timer(self, timer: Window | Ruling) -> None:
        self._timers.cancel(timer)

    def _renew(self, conn: int) -> None:
        group = self._places.get(conn)
        if group is not None:
            self._timers.set(_Lease(conn), self._now + group.leases[conn])

    def _set_ttl(self, group: GroupKey, key: str, seconds: float | None) -> None:
        if seconds is None:
            self._timers.cancel(_Ttl(group, key))
        else:
            self._timers.set(_Ttl(group, key), self._now + seconds)

    def send(self, conn: int, request: int, message: Message) -> None:
        self._effects.append(Send(conn, request, message))

    def _note(self, event: str, group: Group, **fields: Any) -> None:
        run = {"run_id": group.run_id} if group.run_id else {}
        self._effects.append(Note(event, {"group": group.name, **run, **fields}))
