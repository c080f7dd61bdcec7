"""The membership of all groups of one coordinator: ``step(event, now) -> effects``.

The machine has no I/O, no clock and no randomness. The caller brings events and the time, and
carries out the effects in their order. The same events at the same times give the same effects.

A restarted coordinator learns of its groups from the log of the one before (`restore`), or from
members, which say what their view is. A member of a view that does not come back within its lease
is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, get_args

from aiodist.membership import channels
from aiodist.membership.averaging import Averaging
from aiodist.membership.books import Answers, JoinWindow, LeaseTimer, Return, RoundDue, Ttl
from aiodist.membership.effects import (
    Close,
    Disconnected,
    Drain,
    Effect,
    Event,
    Received,
    Tick,
)
from aiodist.membership.group import GroupKey, GroupState, Joiner
from aiodist.membership.records import Record
from aiodist.membership.recovery import RecoveryMessage, RecoveryRules
from aiodist.membership.rejoining import Rejoining
from aiodist.membership.seating import DRAINING, Seating
from aiodist.membership.silence import RETURN_SECONDS
from aiodist.membership.store import StoreMessage
from aiodist.wire.activity import Activity, SeenRequest, Stalled
from aiodist.wire.averaging import AveragingRequest
from aiodist.wire.channels import PUBLISHED
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Abort,
    Draining,
    Failed,
    Failure,
    JoinRequest,
    Leave,
    Left,
    Message,
    Renew,
    Status,
    StatusRequest,
    StoreCancel,
    StoreDelete,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import Cause, GiveUpVote, Unreachable
from aiodist.wire.returning import Rejoin

MAX_REASON = 512
"""The number of characters that are kept of why a connection ended."""


class Membership:
    """The state machine.

    `wall_offset`: what to add to `now` for seconds since the Unix epoch, until `set_wall_offset` is
    called. `keep`: emit `Keep` effects. `form_after`: no group forms before that time, so that
    members of groups of an earlier coordinator can come back first. `returns`: whether members come
    back over new connections. If not, those that fall silent are lost, even if it is all of them.

    A connection is of at most one group, as one member. The greeting is done elsewhere: the machine
    sees a connection from its first request on.
    """

    def __init__(
        self,
        *,
        wall_offset: float = 0.0,
        keep: bool = False,
        form_after: float = -inf,
        returns: bool = True,
    ) -> None:
        self._returns = returns
        # Holds the state. Recovery, rejoining and the survey work on it.
        self._seating = Seating(wall_offset, keep, form_after)
        self._books = self._seating.books  # what is kept over restarts, and the timers
        self._groups = self._books.groups  # by name and run id
        self._places = self._seating.places  # connection -> its group
        self._recovery = RecoveryRules(self._seating)  # ballots and epochs
        self._survey = self._seating.survey  # what members say that they are doing
        self._averaging = Averaging(self._seating)
        self._rejoining = Rejoining(self._seating, self._recovery)
        # By type of message; called with (connection, request, message).
        self._handlers: dict[type[Message], Callable[[int, int, Any], None]] = {
            JoinRequest: self._on_join,
            Withdraw: self._on_withdraw,
            Leave: self._on_leave,
            Abort: self._on_leave,
            Renew: self._on_renew,
            StatusRequest: self._on_status,
            Activity: self._survey.heard,
            SeenRequest: self._on_seen_request,
            Stalled: self._on_stalled,
        }
        self._handlers.update(dict.fromkeys(get_args(StoreMessage), self._on_store))
        self._handlers.update(dict.fromkeys(get_args(RecoveryMessage), self._on_recovery))
        self._handlers.update(dict.fromkeys(get_args(AveragingRequest), self._on_averaging))
        self._handlers[Rejoin] = self._rejoining.handle

    def step(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at time `now` (seconds, never going back)."""
        self._books.now = now
        effects: list[Effect] = []
        self._seating.effects = effects
        match event:
            case Received(conn, request, message):
                self._on_message(conn, request, message)
            case Disconnected(conn, reason):
                self._on_disconnected(conn, reason)
            case Tick():
                self._on_tick()
            case Drain(gave_up):
                self._on_drain(gave_up=gave_up)
        return effects

    def set_wall_offset(self, offset: float) -> None:
        """Use `offset` from now on, because the wall clock may have been set."""
        self._books.wall_offset = offset

    def restore(self, records: Iterable[Record], now: float) -> None:
        """Take in the records of an earlier machine. Call this once, before the first step.

        Raises ValueError if the records are inconsistent.
        """
        self._books.now = now
        self._books.replay(records)

    def records(self) -> Iterator[Record]:
        """Yield all that a later machine needs to know. Do not call `step` during the iteration."""
        yield from self._books.records()
        yield from self._averaging.records()

    def deadline(self) -> float | None:
        """When the next Tick is due; None: not before another event."""
        return self._books.timers.next()

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def status(self) -> dict[str, Any]:
        """Describe everything in plain data (for each group, see `GroupState.status`)."""
        return {
            "draining": self._seating.draining,
            "groups": [group.status() for group in self._groups.values()],
            "channels": channels.status(self._groups.values()),
            "averagers": self._averaging.status(),
        }

    # Events.

    def _on_message(self, conn: int, request: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            # A peer that breaks the protocol cannot be trusted with the rest of it.
            reason = f"a member does not send {type(message).__name__} messages"
            self._on_disconnected(conn, reason)
            self._seating.effects.append(Close(conn, reason))
            return
        # Every message is a sign of life, even one that is refused below.
        self._seating.renew(conn)
        handler(conn, request, message)
        if self._averaging.silent:
            self._averaging.got_word(self._places.get(conn))

    def _on_disconnected(self, conn: int, reason: str) -> None:
        # What the end of a connection means depends on its role. If it was asked for a view,
        # another member must bring that. If it is a joiner, it just stops waiting. If it is a
        # member, it is lost, because a member that closes in order has said Leave before.
        self._rejoining.gone(conn)
        group = self._places.get(conn)
        if group is None:
            self._survey.gone(conn)
            return
        if conn in group.joiners:
            self._seating.forget_joiner(group, conn, reason)
        else:
            self._seating.lose(group, {conn: reason[:MAX_REASON]})

    def _on_tick(self) -> None:
        # The order matters. Losses come first, so that no group forms or goes on with a member that
        # is lost in the same tick. All losses of one group come together, so that the others are
        # told once, and a group that is silent as a whole is recognized.
        due = self._books.timers.pop_due(self._books.now)
        silent: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            if isinstance(timer, LeaseTimer):
                group = self._places[timer.conn]
                lease = group.leases[timer.conn]
                silent.setdefault(group.key, {})[timer.conn] = f"no sign of life for {lease:g} s"
        cut_off: set[GroupKey] = set()
        for key, reasons in silent.items():
            group = self._groups[key]
            is_cut_off = self._returns and self._books.is_cut_off(group)
            if is_cut_off and not self._averaging.others_are_heard(group):
                self._seating.cut_off(group)
                cut_off.add(key)
                self._averaging.fell_silent(group)
            else:
                self._seating.evict(group, reasons)
        missed: dict[GroupKey, dict[int, str]] = {}
        for timer in due:
            # The absent members of a group that has just fallen silent got more time to return.
            if isinstance(timer, Return) and timer.group not in cut_off:
                group = self._groups[timer.group]
                if group.is_unreachable(timer.rank):
                    reason = "it did not come back to the coordinator, and others cannot reach it"
                else:
                    limit = RETURN_SECONDS if group.cut_off else group.absent[timer.rank].lease
                    reason = f"it did not come back to the coordinator for {limit:g} s"
                missed.setdefault(timer.group, {})[timer.rank] = reason
        for key, ranks in missed.items():
            self._seating.give_up(self._groups[key], ranks)
        # From here on the group of a timer may have been deleted with its last member.
        for timer in due:
            if isinstance(timer, Answers):
                self._survey.over()
                continue
            if isinstance(timer, Ttl):
                self._seating.effects += self._books.expire(timer)
                continue
            if isinstance(timer, RoundDue):
                self._averaging.tick(timer.averager)
                continue
            if isinstance(timer, (LeaseTimer, Return)) or timer.group not in self._groups:
                continue
            group = self._groups[timer.group]
            match timer:
                case JoinWindow() if group.may_form:
                    self._seating.form(group)
                case JoinWindow():
                    self._recovery.window_over(group)
                case _:  # Ruling
                    self._recovery.rule(group)

    def _on_drain(self, *, gave_up: bool) -> None:
        self._seating.draining = True
        # Make the texts first, because they count the joiners that are forgotten one by one.
        waiting = {
            id(group): _withdrawn(group)
            for conn, group in self._places.items()
            if conn not in group.members
        }
        for conn, group in list(self._places.items()):
            if conn in group.members:
                self._seating.send(conn, 0, Draining())
            else:
                joiner = group.joiners[conn]
                answer = waiting[id(group)] if gave_up else DRAINING
                self._seating.forget_joiner(
                    group, conn, "the coordinator is draining", gave_up=gave_up
                )
                self._seating.send(conn, joiner.request, answer)

    # Requests.

    def _on_join(self, conn: int, request: int, ask: JoinRequest) -> None:
        self._seating.admit(Joiner(conn, request, ask, self._books.wall_time))

    def _on_withdraw(self, conn: int, request: int, _: Withdraw) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.joiners:
            return
        # Make the text first, because it counts this joiner among those that have come.
        withdrawn = _withdrawn(group)
        self._seating.forget_joiner(group, conn, "gave up waiting", gave_up=True)
        self._seating.send(conn, request, withdrawn)

    def _on_leave(self, conn: int, request: int, message: Leave | Abort) -> None:
        # Answer first, because what follows may admit a joiner that waited for this place.
        self._seating.send(conn, request, Left())
        group = self._places.get(conn)
        if group is not None and conn in group.joiners:
            self._seating.forget_joiner(group, conn, "withdrew")
        elif group is not None and isinstance(message, Abort):
            self._seating.lose(
                group, {conn: f"it aborted: {message.reason}"[:MAX_REASON]}, "aborted"
            )
        elif group is not None and group.view is not None:
            self._seating.left(group, conn)

    def _on_renew(self, conn: int, request: int, _: Renew) -> None:
        """Forget that the loop was blocked: a blocked member sends another message to renew."""
        self._survey.forget(conn)

    def _on_status(self, conn: int, request: int, message: StatusRequest) -> None:
        if message.ask_members:
            self._survey.ask_all(conn, request, self.status)
        else:
            self._seating.send(conn, request, Status(self.status()))

    def _on_seen_request(self, conn: int, request: int, message: SeenRequest) -> None:
        group = self._places.get(conn)
        if group is not None and conn in group.members:
            self._survey.ask_some(conn, request, group, message)
        else:
            self._not_a_member(conn, request, "only members may ask what other ranks are doing")

    def _on_stalled(self, conn: int, request: int, message: Stalled) -> None:
        group = self._places.get(conn)
        if group is not None:
            self._seating.stalls.heard(group, conn, request, message)
        elif message.seconds:
            self._not_a_member(conn, request, "only members and joiners report their waits")

    def _on_store(self, conn: int, request: int, message: StoreMessage) -> None:
        group = self._places.get(conn)
        # StoreCancel ends waits and watches of the store, and watches of joiners, because all of
        # them take their numbers from one sequence.
        if group is not None and isinstance(message, StoreCancel):
            group.watchers.get(conn, set()).discard(message.request)
        if group is not None and conn in group.members:
            member = group.members[conn]
            if isinstance(message, StoreDelete) and message.key == PUBLISHED:
                takers = channels.subscribers(self._books.sharing(group))
                if group.shares and takers:
                    text = f"there are subscribers ({len(takers)}), which wait for higher numbers"
                    self._seating.send(conn, request, Failed(Failure.INVALID, text))
                    return
            self._seating.effects += group.store.handle(conn, request, message, member.id)
        elif not isinstance(message, StoreCancel):
            self._not_a_member(conn, request, "the store is for members of a group")

    def _on_recovery(self, conn: int, request: int, message: RecoveryMessage) -> None:
        group = self._places.get(conn)
        if group is None or conn not in group.members:
            self._not_a_member(conn, request, "votes are for members of a group")
        elif isinstance(message, Unreachable) and (
            accused := self._averaging.accused(group, message.id)
        ):
            reason = f"another member cannot reach it: {message.reason}"[:MAX_REASON]
            self._seating.evict(accused, dict.fromkeys(accused.members, reason))
        elif isinstance(message, GiveUpVote) and message.cause is Cause.TIMEOUT:
            self._ask_before_void(group, conn, request, message)
        else:
            self._recovery.handle(group, conn, request, message)

    def _on_averaging(self, conn: int, request: int, message: AveragingRequest) -> None:
        self._averaging.handle(self._places.get(conn), conn, request, message)

    def _ask_before_void(
        self, group: GroupState, conn: int, request: int, message: GiveUpVote
    ) -> None:
        """Ask the missing voters what they are doing. After their answers the vote is void, unless
        it was decided meanwhile."""
        # The error text of a timeout names the ranks that have not voted, and what they do instead.
        # The voter waits for that (`LAST_WORD_SECONDS`) longer than they may take to answer
        # (`ANSWER_SECONDS`).
        key = (message.context, message.number)
        missing = group.ballots.missing(group.members, key)

        def give_up() -> None:  # not called if `conn` is no longer a member
            self._recovery.handle(group, conn, request, message, self._survey.words(group))

        self._survey.ask(conn, missing, give_up)

    def _not_a_member(self, conn: int, request: int, text: str) -> None:
        self._seating.send(conn, request, Failed(Failure.NOT_A_MEMBER, f"{text}: join one first"))


def _withdrawn(group: GroupState) -> Withdrawn:
    return Withdrawn(group.waiting_text()[:MAX_TEXT], group.missing)
