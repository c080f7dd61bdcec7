"""Reaching the coordinator: what is tried again, for how long, and what is said at the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiodist.control import dial as dialling
from aiodist.control.dial import (
    ATTEMPT_SECONDS,
    SILENT,
    SILENT_SECONDS,
    SILENT_TLS,
    NoAnswerError,
    dial,
)
from aiodist.errors import AuthenticationError, JoinError, JoinTimeoutError
from aiodist.testing.virtual_loop import VirtualLoop
from aiodist.wire.address import parse_address

AT = "tcp://10.0.0.1:7"

Dial = Callable[..., Any]


class Attempts:
    """Each attempt is one of these, the last again and again: an answer, an error, or None, which
    never ends."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.times: list[float] = []

    async def __call__(self, *_: object) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()
    assert loop.errors == []


@pytest.fixture
def reach(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> Dial:
    """``reach(attempts)``: what `dial` gives, in virtual time."""

    def call(attempts: Attempts, *, timeout: float = 30.0, retry: bool = True) -> Any:
        monkeypatch.setattr(dialling, "_attempt", attempts)
        return loop.run_until_complete(dial(AT, token=None, ssl=None, timeout=timeout, retry=retry))

    return call


def nobody() -> OSError:
    return ConnectionRefusedError(111, "Connection refused")


def test_who_answers_is_asked_once(reach: Dial) -> None:
    attempts = Attempts("greeted")
    assert reach(attempts) == "greeted"
    assert attempts.times == [0.0]


def test_a_coordinator_that_is_about_to_start_is_found(reach: Dial) -> None:
    attempts = Attempts(*[nobody()] * 5, "greeted")
    assert reach(attempts) == "greeted"
    pauses = [later - time for time, later in zip(attempts.times, attempts.times[1:], strict=False)]
    # Longer and longer, and not all ranks at the same moments.
    assert all(0.5 <= pause / (0.02 * 2**n) <= 1.0 for n, pause in enumerate(pauses))


def test_it_is_given_up_in_time_and_the_last_attempt_says_why(
    reach: Dial, loop: VirtualLoop
) -> None:
    attempts = Attempts(nobody())
    with pytest.raises(JoinTimeoutError, match="the last one: Connection refused") as caught:
        reach(attempts, timeout=7.0)
    assert 6.9 < loop.time() <= 7.0
    assert f"({len(attempts.times)} attempts" in str(caught.value)
    assert AT in str(caught.value)


def test_who_is_to_try_once_tries_once(reach: Dial) -> None:
    attempts = Attempts(nobody())
    with pytest.raises(NoAnswerError) as caught:
        reach(attempts, retry=False)
    assert caught.value.last == "Connection refused"
    assert "(1 attempt: Connection refused)" in str(caught.value)
    assert len(attempts.times) == 1


def test_one_attempt_does_not_take_all_the_time(reach: Dial, loop: VirtualLoop) -> None:
    """A firewall that drops packets, and is opened a moment later."""
    attempts = Attempts(None, "greeted")
    assert reach(attempts) == "greeted"
    assert ATTEMPT_SECONDS < attempts.times[1] < ATTEMPT_SECONDS + 0.1


def test_no_attempt_goes_on_past_the_end(reach: Dial, loop: VirtualLoop) -> None:
    with pytest.raises(JoinTimeoutError, match="it did not answer"):
        reach(Attempts(None), timeout=2.0)
    assert loop.time() == 2.0


def test_an_attempt_that_is_cut_short_hides_nothing(reach: Dial) -> None:
    """The end comes in the middle of the last attempt: the one before it knows why."""
    with pytest.raises(JoinTimeoutError, match="the last one: Connection refused"):
        reach(Attempts(nobody(), None), timeout=2.0)


def test_each_address_of_a_name_is_tried_within_one_attempt(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is behind a firewall that drops packets."""
    hosts, tried = ["dropped", "closed", "open"], dict[str, float]()

    async def look_up(name: str, port: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in hosts]

    async def connect(family: int, where: tuple[str, int]) -> str:
        tried[where[0]] = loop.time()
        if where[0] == "dropped":
            await asyncio.Event().wait()
        if where[0] == "closed":
            raise nobody()
        return where[0]

    monkeypatch.setattr(dialling, "look_up", look_up)
    monkeypatch.setattr(dialling, "_connect_one", connect)
    made = dialling._connect(parse_address(AT), 6.0)
    assert loop.run_until_complete(made) == "open"
    assert tried == {"dropped": 0.0, "closed": 2.0, "open": 2.0}


def test_an_answer_that_would_be_the_same_again_is_told_at_once(reach: Dial) -> None:
    error = AuthenticationError("wrong token")
    attempts = Attempts(dialling._Refused(error))
    with pytest.raises(AuthenticationError) as caught:
        reach(attempts)
    assert caught.value is error
    assert len(attempts.times) == 1


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (SILENT, "closes every connection without a greeting"),
        (SILENT_TLS, "probably refused this rank's certificate .* See the coordinator's log"),
    ],
)
def test_a_service_that_says_nothing_is_said_to_do_so_once(
    reach: Dial, caplog: pytest.LogCaptureFixture, last: str, says: str
) -> None:
    attempts = Attempts(ConnectionResetError(last))
    with pytest.raises(JoinTimeoutError, match=says):
        reach(attempts, timeout=4 * SILENT_SECONDS)
    (record,) = caplog.records
    assert "Trying until 12 s are over" in record.getMessage()


def test_a_coordinator_that_does_not_come_is_said_to_be_missing_once(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dialling, "_attempt", Attempts(nobody()))
    reach = dial(AT, token=None, ssl=None, timeout=60.0, retry=True, caller="; at train.py:5")
    with pytest.raises(JoinTimeoutError):
        loop.run_until_complete(reach)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"no coordinator answered at {AT} for 10.")
    assert "the last one: Connection refused" in text
    assert text.endswith("Trying until 60 s are over; at train.py:5")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (AT, "Rank 0 serves an address of the environment"),
        ("tls://10.0.0.1:7", "No rank serves a tls:// address: .* coordinator` with --tls-cert"),
    ],
)
def test_who_serves_an_address_depends_on_its_scheme(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    monkeypatch.setattr(dialling, "_attempt", Attempts(nobody()))
    reach = dial(address, token=None, ssl=None, timeout=1.0, retry=False)
    with pytest.raises(JoinError, match=rf"^[^.]*{address}.* Is it up\? {says}") as info:
        loop.run_until_complete(reach)
    assert str(info.value).count(" serves ") == 1


async def test_an_address_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="ftp"):
        await dial("ftp://x:1", token=None, ssl=None, timeout=1.0, retry=True)


def test_a_name_without_an_address_is_named(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object, **__: object) -> list[Any]:
        return []

    monkeypatch.setattr(loop, "getaddrinfo", found)
    with pytest.raises(JoinError, match=r"10\.0\.0\.1 has no address"):
        loop.run_until_complete(dial(AT, token=None, ssl=None, timeout=5.0, retry=False))
