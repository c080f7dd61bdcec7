"""Any history of restarts, with what was written down and without: what must hold holds."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiodist.membership.effects import Close, Disconnected, Event, Keep, Received, SendMessage, Tick
from aiodist.membership.machine import Membership
from aiodist.membership.records import decode_records, encode_record
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
    Result,
    StoreAdd,
    StoreGet,
)
from aiodist.wire.returning import Later, Rejoin, Rejoined, ViewWanted

LEASE = 4.0


class Member:
    """A process, as it sees itself. `conn` is 0 while it has no connection."""

    def __init__(self, number: int, size: int) -> None:
        self.ask = JoinRequest(group="g", id=f"m{number}", size=size, lease=LEASE)
        self.conn = 0
        self.view: EpochView | None = None
        self.known: dict[str, set[int]] = {"lost": set(), "left": set()}
        self.registered = False
        self.over = False
        self.requests = 0
        self.pending: dict[int, StoreAdd] = {}

    @property
    def rank(self) -> int:
        assert self.view is not None
        return self.view.ranks[self.ask.id]

    @property
    def gone(self) -> set[int]:
        return self.known["lost"] | self.known["left"]

    def claim(self, *, with_view: bool) -> Rejoin:
        assert self.view is not None
        lost, left = (tuple(sorted(self.known[kind])) for kind in ("lost", "left"))
        view = self.view if with_view else None
        return Rejoin(self.ask, self.rank, self.view.epoch, self.view.digest, lost, left, view)


class Restarts(RuleBasedStateMachine):
    """`log` is what is on disk: an effect that tells something comes behind what it rests on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.log = b""
        self.machine = Membership(keep=True)
        self.members: list[Member] = []
        self.by_conn: dict[int, Member] = {}
        self.conns = 0
        self.last_epoch = 0
        self.views: dict[int, EpochView] = {}
        self.durable = True
        self.out: dict[int, set[int]] = {}
        """By epoch: ranks that were told to go, or have left."""
        self.issued = 0
        self.acknowledged = 0
        self.deaf = False
        self.is_cut = False

    # What happens.

    def living(self) -> list[Member]:
        return [member for member in self.members if not member.over]

    def all_registered(self) -> bool:
        return all(member.registered or member.view is None for member in self.living())

    @precondition(lambda self: self.all_registered() and len(self.living()) < 6)
    @rule(size=st.sampled_from([1, 2, 3]))
    def join(self, size: int) -> None:
        usual = self.living()
        member = Member(len(self.members), usual[0].ask.size or size if usual else size)
        self.members.append(member)
        self.connect(member)

    def connect(self, member: Member) -> None:
        self.conns += 1
        member.conn = self.conns
        self.by_conn[self.conns] = member
        if member.view is None:
            self.step(Received(member.conn, 1, member.ask))
        else:
            self.step(Received(member.conn, 1, member.claim(with_view=False)))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), keep=st.booleans())
    def restart(self, data: st.DataObject, keep: bool) -> None:
        """All connections break; what was written of the log is there, or nothing at all."""
        if keep and self.durable and data.draw(st.booleans()):  # it was written anew
            self.log = b"".join(map(encode_record, self.machine.records()))
        if not keep:
            self.log = b""
            self.issued = self.acknowledged = 0
            for member in self.members:
                member.pending.clear()
            # What no living member knows of, nobody does.
            epochs = [member.view.epoch for member in self.living() if member.view]
            self.last_epoch = max(epochs, default=0)
            self.views = {e: view for e, view in self.views.items() if e <= self.last_epoch}
            self.out = {e: ranks for e, ranks in self.out.items() if e <= self.last_epoch}
        self.machine = Membership(keep=True)
        self.machine.restore(decode_records(self.log), self.now)
        for member in self.living():
            member.conn = 0
            member.registered = False
        self.by_conn.clear()

    @precondition(lambda self: any(not member.conn for member in self.living()))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.connect(data.draw(st.sampled_from([one for one in self.living() if not one.conn])))

    @precondition(lambda self: any(member.conn for member in self.living()))
    @rule(data=st.data())
    def come_over_another_connection(self, data: st.DataObject) -> None:
        """Its connection broke, which the coordinator has not seen yet."""
        member = data.draw(st.sampled_from([one for one in self.living() if one.conn]))
        del self.by_conn[member.conn]
        self.connect(member)

    @precondition(lambda self: any(member.conn for member in self.living()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([one for one in self.living() if one.conn]))
        member.over = True
        self.take_out(member)
        conn = member.conn
        del self.by_conn[conn]
        self.step(Disconnected(conn, "it died"))

    @precondition(lambda self: any(member.registered for member in self.living()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([one for one in self.living() if one.registered]))
        self.step(Received(member.conn, 2, Leave()))
        assert member.over

    @precondition(lambda self: any(member.registered for member in self.living()))
    @rule(data=st.data(), deaf=st.booleans())
    def add(self, data: st.DataObject, deaf: bool) -> None:
        """`deaf`: the answer is lost, so that it is asked again when the member is back."""
        member = data.draw(st.sampled_from([one for one in self.living() if one.registered]))
        member.requests += 1
        number = 100 + member.requests
        member.pending[number] = StoreAdd("n", 1)
        self.issued += 1
        self.deaf = deaf
        self.step(Received(member.conn, number, member.pending[number]))
        self.deaf = False

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for member in self.living():
            if member.conn:
                self.step(Received(member.conn, 0, Renew()))
        while (due := self.machine.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.step(Tick())
        self.now = end

    @precondition(lambda self: any(member.registered for member in self.living()))
    @rule(seconds=st.sampled_from([3.0, 5.0, 24.0]))
    def be_cut_off(self, seconds: float) -> None:
        """Nobody is heard for a while: who was a member before is one afterwards."""
        members = [member for member in self.living() if member.registered]
        self.is_cut = True
        end = self.now + seconds
        while (due := self.machine.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.step(Tick())
        self.is_cut = False
        self.now = end
        for member in self.living():
            if member.conn:
                self.step(Received(member.conn, 0, Renew()))
        for member in members:
            if not member.conn:
                self.connect(member)
            assert not member.over

    # What is told.

    def step(self, event: Event) -> None:
        told: list[SendMessage] = []
        for effect in self.machine.step(event, self.now):
            if isinstance(effect, Keep):
                assert decode_records(encode_record(effect.record)) == [effect.record]
                self.log += encode_record(effect.record)
            elif isinstance(effect, SendMessage):
                encode_message(effect.message, effect.request, max_body=2**24)
                told.append(effect)
            elif isinstance(effect, Close) and self.is_cut and effect.conn in self.by_conn:
                member = self.by_conn.pop(effect.conn)
                member.conn = 0
                member.registered = False
            elif isinstance(effect, Close):
                assert effect.conn not in self.by_conn or self.by_conn[effect.conn].over or any(
                    isinstance(one.message, Evicted) and one.conn == effect.conn for one in told
                )  # fmt: skip
        for send in told:
            member = self.by_conn.get(send.conn)
            if member is not None:
                self.told(member, send.request, send.message)

    def told(self, member: Member, request: int, message: Any) -> None:
        match message:
            case EpochView():
                self.check_view(member, message)
            case Rejoined(lost, left):
                assert member.view is not None
                assert member.rank not in {*lost, *left}
                assert member.rank not in self.out.get(member.view.epoch, set())
                assert member.gone <= {*lost, *left}
                member.known = {"lost": {*lost}, "left": {*left}}
                member.registered = True
                for number, pending in list(member.pending.items()):
                    self.step(Received(member.conn, number, pending))
            case ViewWanted():
                self.step(Received(member.conn, 1, member.claim(with_view=True)))
            case Later():
                member.conn = 0  # it comes again
            case MemberLost(epoch, ranks) | MemberLeft(epoch, ranks):
                if member.view is not None and member.view.epoch == epoch:
                    kind = "lost" if isinstance(message, MemberLost) else "left"
                    member.known[kind] |= {*ranks}
            case Left() | Evicted():
                self.take_out(member)
                member.over = True
            case Failed():
                member.over = True
            case Result(value) if request in member.pending and not self.deaf:
                del member.pending[request]
                self.acknowledged += 1
                assert value is not None
                assert 1 <= int(value) <= self.issued, "one was done twice"

    def take_out(self, member: Member) -> None:
        if member.view is not None:
            self.out.setdefault(member.view.epoch, set()).add(member.rank)

    def check_view(self, member: Member, view: EpochView) -> None:
        if view.epoch in self.views:
            assert self.views[view.epoch] == view
        else:
            assert view.epoch > self.last_epoch, "an epoch went back"
            self.last_epoch = view.epoch
            self.issued = self.acknowledged = 0
            self.views[view.epoch] = view
        member.view = view
        member.registered = True

    # What holds always.

    @invariant()
    def registered_members_are_of_one_epoch(self) -> None:
        epochs = {one.view.epoch for one in self.living() if one.registered and one.view}
        assert len(epochs) <= 1

    @invariant()
    def registered_members_know_the_same(self) -> None:
        known = [one.gone for one in self.living() if one.registered]
        assert all(one == known[0] for one in known)

    @invariant()
    def the_machine_agrees(self) -> None:
        found = {
            member["id"] for group in self.machine.status()["groups"] for member in group["members"]
        }
        assert found == {one.ask.id for one in self.living() if one.registered}

    def teardown(self) -> None:
        """After all, everybody alive comes back, and nothing that was acknowledged is missing."""
        for _ in range(2 * len(self.members) + 1):
            for member in self.living():
                if not member.conn:
                    self.connect(member)
        registered = [one for one in self.living() if one.registered]
        if registered and self.acknowledged:
            asked = registered[0]
            [found] = [
                effect.message
                for effect in self.machine.step(Received(asked.conn, 99, StoreGet("n")), self.now)
                if isinstance(effect, SendMessage)
            ]
            assert isinstance(found, Result)
            assert isinstance(found.value, bytes)
            assert self.acknowledged <= int(found.value) <= self.issued


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
