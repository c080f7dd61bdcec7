"""Any history of joins, leaves, cuts, silence: what has to hold always holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiodist.membership.effects import (
    Close,
    Disconnected,
    Drain,
    Event,
    Received,
    SendMessage,
    Tick,
)
from aiodist.membership.machine import Membership
from aiodist.wire.codec import encode_message
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    Failed,
    JoinRequest,
    Leave,
    Left,
    MemberLeft,
    MemberLost,
    Renew,
    Withdraw,
    Withdrawn,
)

GROUPS = st.sampled_from(["a", "a", "b"])
SIZES = st.sampled_from(
    [{"size": 1}, {"size": 2}, {"size": 3}, {"min_size": 2, "max_size": 3}, {"min_size": 1}]
)
JOIN = 7


class Histories(RuleBasedStateMachine):
    """The test's own book: what each connection asked for and was told."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Membership()
        self.now = 0.0
        self.next_conn = 0
        self.asked: dict[int, JoinRequest] = {}
        self.outcomes: Counter[int] = Counter()
        self.waiting: set[int] = set()
        self.members: dict[int, EpochView] = {}
        self.views: dict[tuple[str, int], EpochView] = {}
        self.last_epoch: dict[str, int] = {}
        self.known_gone: dict[int, set[int]] = {}
        self.gone: dict[tuple[str, int], set[int]] = {}
        self.silent: set[int] = set()

    # Events.

    @initialize(size=SIZES)
    def agree_on_a_size(self, size: dict[str, int]) -> None:
        self.usual = size

    @rule(group=GROUPS, rank=st.none() | st.integers(0, 2))
    def join(self, group: str, rank: int | None) -> None:
        self.ask_to_join(group, self.usual, rank)

    @rule(group=GROUPS, size=SIZES, rank=st.none() | st.integers(0, 3))
    def join_otherwise(self, group: str, size: dict[str, int], rank: int | None) -> None:
        self.ask_to_join(group, size, rank)

    def ask_to_join(self, group: str, size: dict[str, int], rank: int | None) -> None:
        conn = self.next_conn = self.next_conn + 1
        self.asked[conn] = JoinRequest(
            group=group, id=str(conn), rank=rank, lease=4.0, join_window=1.0, **size
        )
        self.waiting.add(conn)
        self.step(Received(conn, JOIN, self.asked[conn]))

    def pick(self, data: st.DataObject, conns: Any) -> int:
        return data.draw(st.sampled_from(sorted(conns)))

    @precondition(lambda self: self.waiting | set(self.members))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        conn = self.pick(data, self.waiting | set(self.members))
        self.step(Received(conn, 8, Leave()))
        assert conn not in self.waiting | set(self.members)

    @precondition(lambda self: self.waiting | set(self.members))
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        conn = self.pick(data, self.waiting | set(self.members))
        # Forgotten first: whoever waited for its place may be let in by this very step.
        self.gone_from_its_view(conn)
        self.forget(conn)
        self.step(Disconnected(conn, "cut"))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.step(Received(self.pick(data, self.waiting), 9, Withdraw()))

    @precondition(lambda self: self.waiting | set(self.members))
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        self.silent.add(self.pick(data, self.waiting | set(self.members)))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for conn in sorted((self.waiting | set(self.members)) - self.silent):
                self.step(Received(conn, 0, Renew()))
            then = min(end, self.now + 1.0)
            while (due := self.machine.deadline()) is not None and due <= then:
                assert due >= self.now
                self.now = due
                self.step(Tick())
            self.now = then

    @precondition(lambda self: self.next_conn > 12)
    @rule()
    def drain(self) -> None:
        self.step(Drain())
        assert not self.waiting

    # Effects.

    def step(self, event: Event) -> None:
        for effect in self.machine.step(event, self.now):
            if isinstance(effect, SendMessage):
                encode_message(effect.message, effect.request)
                self.told(effect.conn, effect.request, effect.message)
            elif isinstance(effect, Close):
                assert effect.conn in self.silent
                if effect.conn in self.waiting | set(self.members):
                    self.cut_off(effect.conn)

    def cut_off(self, conn: int) -> None:
        """It was told nothing, and may come back: then nobody of its group is heard."""
        group = self.asked[conn].group
        there = {one for one in self.waiting | set(self.members) if self.asked[one].group == group}
        assert there <= self.silent
        self.forget(conn)

    def told(self, conn: int, request: int, message: Any) -> None:
        match message:
            case EpochView():
                assert request == JOIN
                self.settle(conn)
                self.check_view(conn, message)
                self.members[conn] = message
                self.known_gone[conn] = set()
            case Failed():
                assert request == JOIN
                self.settle(conn)
            case Withdrawn():
                self.settle(conn)
            case Left():
                if conn in self.waiting:
                    self.settle(conn)
                else:
                    self.gone_from_its_view(conn)
                    self.forget(conn)
            case Evicted():
                assert conn in self.silent
                if conn in self.waiting:
                    self.settle(conn)
                else:
                    self.gone_from_its_view(conn)
                    self.forget(conn)
            case MemberLost() | MemberLeft():
                view = self.members[conn]
                assert message.epoch == view.epoch
                assert not self.known_gone[conn] & set(message.ranks)
                self.known_gone[conn] |= set(message.ranks)

    def settle(self, conn: int) -> None:
        """A joiner got its one outcome."""
        assert conn in self.waiting
        self.waiting.discard(conn)
        self.outcomes[conn] += 1

    def check_view(self, conn: int, view: EpochView) -> None:
        ask = self.asked[conn]
        assert view.group == ask.group
        count = len(view.members)
        assert [member.rank for member in view.members] == list(range(count))
        if ask.size is not None:
            assert count == ask.size
        else:
            assert (ask.min_size or 1) <= count <= (ask.max_size or count)
        mine = view.ranks[ask.id]
        assert ask.rank is None or mine == ask.rank or (ask.size is None and ask.rank >= count)
        key = (view.group, view.epoch)
        if key not in self.views:
            assert view.epoch > self.last_epoch.get(view.group, 0)
            self.last_epoch[view.group] = view.epoch
            # Nobody of the epoch before is a member any more.
            assert all(other.group != view.group for other in self.members.values())
            self.views[key] = view
            self.gone[key] = set()
        assert self.views[key] is view

    def gone_from_its_view(self, conn: int) -> None:
        view = self.members.get(conn)
        if view is not None:
            self.gone[view.group, view.epoch].add(view.ranks[str(conn)])

    def forget(self, conn: int) -> None:
        self.waiting.discard(conn)
        self.members.pop(conn, None)
        self.known_gone.pop(conn, None)

    # What holds always.

    @invariant()
    def every_joiner_has_one_outcome(self) -> None:
        assert all(count == 1 for count in self.outcomes.values())

    @invariant()
    def members_know_who_is_gone(self) -> None:
        for conn, view in self.members.items():
            assert self.known_gone[conn] == self.gone[view.group, view.epoch]

    @invariant()
    def the_machine_agrees_with_the_book(self) -> None:
        groups = self.machine.status()["groups"]
        members = {int(member["id"]) for group in groups for member in group["members"]}
        waiting = {int(joiner["id"]) for group in groups for joiner in group["waiting"]}
        assert members == set(self.members)
        assert waiting == self.waiting
        for group in groups:
            assert group["members"] or group["waiting"] or group["absent"]
            ranks = [member["rank"] for member in group["members"]]
            assert len(ranks) == len(set(ranks))

    @invariant()
    def a_full_group_does_not_wait(self) -> None:
        for group in self.machine.status()["groups"]:
            if group["epoch"] is None and group["wanted"].startswith("size "):
                assert len(group["waiting"]) < int(group["wanted"].split()[1])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
