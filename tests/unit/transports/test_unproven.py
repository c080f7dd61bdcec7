"""How many connections there may be that have not shown who they are."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

import pytest

from aiodist.transports import unproven
from aiodist.transports.sparing import AT_ONCE
from aiodist.transports.unproven import UnprovenConnections, most_connections


class Caller:
    def __init__(self, host: str) -> None:
        self.host = self.peer = host
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def crowd(most: int, hosts: str) -> tuple[UnprovenConnections[Caller], list[Caller]]:
    there: UnprovenConnections[Caller] = UnprovenConnections(logging.getLogger("test"), most)
    callers = [Caller(host) for host in hosts]
    for caller in callers:
        assert there.add(caller, 0.0)
    return there, callers


def dropped(callers: list[Caller]) -> list[int]:
    return [at for at, caller in enumerate(callers) if caller.dropped]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("abcd", []),
        ("abcde", [0]),
        ("abcdefg", [0, 1, 2]),
        ("aabb", []),
        ("aaab", [0]),
        ("baaaa", [1, 2]),
    ],
)
def test_the_oldest_is_dropped(hosts: str, expected: list[int]) -> None:
    there, callers = crowd(4, hosts)
    assert dropped(callers) == expected
    assert len(there) == len(hosts) - len(expected)


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    _, callers = crowd(4, 100 * "a")
    assert len(dropped(callers)) == 98
    assert len(caplog.records) == AT_ONCE
    assert caplog.messages[0].startswith("dropping the connection from a: too many from that host")


def test_who_has_shown_who_it_is_counts_no_more() -> None:
    there, callers = crowd(4, "aa")
    for caller in callers:
        there.discard(caller)
        there.discard(caller)
    assert len(there) == 0
    for caller in (Caller("a"), Caller("a")):
        assert there.add(caller, 0.0)
    assert dropped(callers) == []


def test_each_has_its_moment() -> None:
    there: UnprovenConnections[Caller] = UnprovenConnections(
        logging.getLogger("test"), 4, moment=1.0
    )
    callers = [Caller(host) for host in "aabbca"]
    told = [there.add(caller, at / 10) for at, caller in enumerate(callers)]
    assert told == [True, True, True, True, False, False]
    assert dropped(callers) == []
    there.discard(callers[0])
    assert there.add(callers[4], 0.6)
    assert there.add(callers[5], 1.2)  # the oldest has had its moment
    assert dropped(callers) == [1]
    assert len(there) == 4


def test_the_limit_of_open_files_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(files: int) -> Callable[[int], tuple[int, int]]:
        return lambda what: (files, files)

    for files, most in (
        (1024, 256),
        (10, 16),
        (8192, 2048),
        (10**6, 4096),
        (resource.RLIM_INFINITY, 4096),
    ):
        monkeypatch.setattr(unproven.resource, "getrlimit", limit(files))
        assert most_connections() == most
