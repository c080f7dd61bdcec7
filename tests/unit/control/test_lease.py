"""Renewing a lease: two steps in turn, and what is said of a loop that does not turn."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from interrupts import Interrupt

from aiodist.control import lease as leases
from aiodist.control.lease import PATIENCE, Lease
from aiodist.wire.codec import encode_message
from aiodist.wire.messages import Renew

ALIVE = encode_message(Renew())
INTERVAL = 8.0


class Loop:
    """One that turns when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.closed = False

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.asked.append(callback)

    def is_closed(self) -> bool:
        return self.closed

    def turn(self) -> None:
        while self.asked:
            self.asked.pop()()


class Member:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.busy: bytes | Exception | None = b"computes"
        self.idents: list[int] = []
        self.waited: list[float] = []
        self.abandoned = 0

    def renew_from_thread(self, frame: bytes) -> None:
        self.sent.append(frame)

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        self.waited.append(seconds)
        self.idents.append(ident)
        if isinstance(self.busy, Exception):
            raise self.busy
        return self.busy

    def abandon_from_thread(self) -> None:
        self.abandoned += 1


class Due:
    """What the thread of this process has to do; here nobody does it."""

    def __init__(self) -> None:
        self.leases: list[tuple[Lease, float]] = []

    def add(self, lease: Lease, seconds: float) -> None:
        self.leases.append((lease, seconds))

    def drop(self, lease: Lease) -> None:
        self.leases = [one for one in self.leases if one[0] is not lease]


class Desk:
    def __init__(self) -> None:
        self.loop = Loop()
        self.member = Member()
        loop: Any = self.loop
        self.lease = Lease(self.member, loop, INTERVAL)


@pytest.fixture
def due(monkeypatch: pytest.MonkeyPatch) -> Due:
    due = Due()
    monkeypatch.setattr(leases, "_renewals", due)
    return due


@pytest.fixture
def desk(due: Due) -> Desk:
    return Desk()


def test_it_is_the_threads_until_it_is_stopped(due: Due, desk: Desk) -> None:
    assert due.leases == [(desk.lease, (1 - PATIENCE) * INTERVAL)]
    desk.lease.stop()
    assert desk.lease.is_over
    assert due.leases == []


def test_a_loop_that_turns(desk: Desk) -> None:
    for count in range(1, 4):
        pauses = [desk.lease.step()]
        desk.loop.turn()
        pauses.append(desk.lease.step())
        assert pauses == [PATIENCE * INTERVAL, (1 - PATIENCE) * INTERVAL]
        assert desk.member.sent == [ALIVE] * count
    assert desk.member.idents == []


def test_a_loop_that_does_not_turn_is_said_to_be_busy_until_it_does(desk: Desk) -> None:
    for _ in range(4):
        desk.lease.step()
    assert desk.member.sent == [b"computes"] * 2
    assert set(desk.member.idents) == {threading.get_ident()}
    assert len(desk.loop.asked) == 1  # it is asked once, not again and again
    desk.loop.turn()
    desk.lease.step()
    desk.loop.turn()
    desk.lease.step()
    assert desk.member.sent[-1] == ALIVE


def test_how_long_a_loop_has_not_turned(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    now = 100.0
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(2):
        desk.lease.step()
        now += PATIENCE * INTERVAL
        desk.lease.step()
        now += (1 - PATIENCE) * INTERVAL
    assert desk.member.waited == [PATIENCE * INTERVAL, (1 + PATIENCE) * INTERVAL]


@pytest.mark.parametrize("busy", [None, RuntimeError("no stack")])
def test_a_sign_of_life_matters_more_than_what_it_says(desk: Desk, busy: Any) -> None:
    desk.member.busy = busy
    desk.lease.step()
    desk.lease.step()
    assert desk.member.sent == [ALIVE]


def test_who_has_ended_its_loop_does_not_seem_to_live(desk: Desk) -> None:
    desk.loop.closed = True
    assert desk.lease.step() == PATIENCE * INTERVAL
    assert desk.lease.step() is None
    assert (desk.member.sent, desk.member.abandoned) == ([], 1)


def test_a_member_in_trouble_does_not_cost_the_others_their_leases(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewals = leases._Renewals()
    monkeypatch.setattr(leases, "_renewals", renewals)
    both = threading.Barrier(2)

    class One:
        is_over = False

        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def step(self) -> None:
            if self.error is not None:
                raise self.error
            both.wait(30)

    for error in (KeyError("trouble"), None):
        one: Any = One(error)
        renewals.add(one, 0.0)
    both.wait(30)
    assert "a lease could not be renewed" in caplog.text


def test_a_thread_that_was_not_to_be_had_is_tried_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewals = leases._Renewals()
    stepped = threading.Event()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class One:
        is_over = False

        def step(self) -> None:
            stepped.set()

    one: Any = One()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            renewals.add(one, 0.0)
    assert not stepped.is_set()
    renewals.add(one, 0.0)
    assert stepped.wait(30)


def test_an_interrupt_leaves_the_lock_to_the_thread(desk: Desk) -> None:
    renewals = leases._Renewals()
    renewals._runs = True  # no thread is needed here
    for number in itertools.count():
        interrupt = Interrupt(("lease.py", "threading.py"), number)
        with contextlib.suppress(KeyboardInterrupt):
            interrupt.of(lambda: renewals.drop(desk.lease))
        other = threading.Thread(target=renewals.drop, args=(desk.lease,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()
        if not interrupt.came:
            return
