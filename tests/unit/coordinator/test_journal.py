"""Effects of the membership machine: in their order, and none before its records are on disk."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from aiodist.coordinator.journal import Journal
from aiodist.coordinator.state_file import SnapshotError
from aiodist.membership.effects import Effect, Keep, SendMessage
from aiodist.membership.records import EpochGiven, Record
from aiodist.wire.messages import Left


def keep(number: int) -> Keep:
    return Keep(EpochGiven("g", number))


def say(number: int) -> SendMessage:
    return SendMessage(number, 0, Left())


class Disk:
    """A state file. Its writes wait for `go`, and raise `error` where there is one."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.written: list[list[int]] = []
        self.snapshots: list[list[int]] = []
        self.error: BaseException | None = None
        self.no_snapshot = False
        self.is_due = False
        self.closed = False

    def write_snapshot(self, name: str, incarnation: int, records: Iterable[Record]) -> None:
        assert (name, incarnation) == ("c", 3)
        self.go.wait()
        if self.no_snapshot:
            raise SnapshotError("none to be had")
        self.snapshots.append(numbers(records))
        self.is_due = False

    def append(self, records: Iterable[Record]) -> None:
        self.go.wait()
        if self.error is not None:
            raise self.error
        self.written.append(numbers(records))

    def close(self) -> None:
        self.closed = True


def numbers(records: Iterable[Record]) -> list[int]:
    return [record.epoch for record in records if isinstance(record, EpochGiven)]


class Desk:
    """A journal on a disk, and who hears of it."""

    def __init__(self) -> None:
        self.disk: Any = Disk()
        self.done: list[int] = []
        self.failures: list[OSError] = []
        self.known = [1]
        self.journal = Journal(
            self.disk,
            "c",
            3,
            records=lambda: [EpochGiven("g", number) for number in self.known],
            carry_out=self.carry_out,
            failed=self.failures.append,
        )

    def carry_out(self, effects: list[Effect]) -> None:
        self.done += [effect.conn for effect in effects if isinstance(effect, SendMessage)]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    desk.disk.go.set()
    await desk.journal.close()
    assert desk.disk.closed


async def test_it_begins_with_all_that_is_known(desk: Desk) -> None:
    assert desk.disk.snapshots == [[1]]


async def test_what_needs_no_disk_is_carried_out_at_once(desk: Desk) -> None:
    desk.journal.submit([say(1)])
    assert desk.done == [1]


async def test_nobody_is_told_before_it_is_on_disk_and_nothing_overtakes(desk: Desk) -> None:
    desk.disk.go.clear()
    desk.journal.submit([keep(1), say(1)])
    desk.journal.submit([say(2)])
    desk.journal.submit([keep(3), say(3)])
    desk.journal.submit([keep(4), say(4)])
    assert desk.done == []
    desk.disk.go.set()
    await desk.journal.idle()
    assert desk.done == [1, 2, 3, 4]
    assert desk.disk.written == [[1], [3, 4]]  # what had come meanwhile, in one


async def test_a_file_that_has_grown_is_written_anew(desk: Desk) -> None:
    desk.disk.is_due = True
    desk.known = [1, 2]
    desk.journal.submit([keep(2), say(2)])
    await desk.journal.idle()
    assert (desk.disk.snapshots, desk.disk.written) == ([[1], [1, 2]], [])
    assert desk.done == [2]


async def test_if_that_is_impossible_the_old_one_grows(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.disk.is_due = desk.disk.no_snapshot = True
    desk.journal.submit([keep(2), say(2)])
    await desk.journal.idle()
    assert (desk.disk.written, desk.done) == ([[2]], [2])
    assert "is not made shorter for now: none to be had" in caplog.text


@pytest.mark.parametrize(
    ("error", "number"), [(OSError(errno.ENOSPC, "full"), errno.ENOSPC), (KeyError(1), errno.EIO)]
)
async def test_what_cannot_be_written_is_told_once_and_nothing_is_promised(
    desk: Desk, error: Exception, number: int
) -> None:
    desk.disk.go.clear()
    desk.disk.error = error
    desk.journal.submit([keep(1), say(1)])
    desk.journal.submit([say(2)])
    desk.disk.go.set()
    await desk.journal.idle()
    desk.journal.submit([keep(3), say(3)])
    assert desk.done == []
    assert [failure.errno for failure in desk.failures] == [number]


async def test_a_first_snapshot_that_fails_leaves_no_thread() -> None:
    disk: Any = Disk()
    disk.no_snapshot = True
    before = {*threading.enumerate()}  # of which some may end meanwhile
    with pytest.raises(SnapshotError):
        Journal(disk, "c", 3, records=list, carry_out=print, failed=print)
    assert {*threading.enumerate()} <= before
