"""How the daemon ends: by signals, and where it cannot keep what it promises."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.client import ControlClient
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.state_file import StateFile
from aiodist.wire.messages import JoinRequest, StoreSet
from aiodist_server.daemon import EXIT_CANNOT_WRITE, EXIT_OK, _until_stopped


class Served:
    """A coordinator with a group of one, which is served until it is stopped."""

    def __init__(self, coordinator: Coordinator, member: ControlClient) -> None:
        self.member = member
        self.signals: asyncio.Queue[str] = asyncio.Queue()
        self.coordinator = coordinator
        self.code = asyncio.create_task(_until_stopped(coordinator, self.signals, 1000.0))

    async def draining(self) -> None:
        """The first signal has come."""
        self.signals.put_nowait("SIGTERM")
        for _ in iter(lambda: self.coordinator.status()["draining"], True):
            await asyncio.sleep(0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    coordinator = Coordinator("inproc://test-daemon", state=tmp_path / "state")
    await coordinator.start()
    member = await ControlClient.open(coordinator.address)
    await member.join(JoinRequest(group="g", id="a", size=1), 20.0)
    served = Served(coordinator, member)
    yield served
    member.abort()
    await member.closed()
    await coordinator.stop()
    served.code.cancel()
    await asyncio.wait({served.code})


def fail(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "the disk is full")


async def test_a_drain_ends_with_its_last_group(served: Served) -> None:
    await served.draining()
    assert not served.code.done()
    await served.member.leave(20.0)
    assert await served.code == EXIT_OK


async def test_a_second_signal_ends_the_drain(served: Served) -> None:
    await served.draining()
    served.signals.put_nowait("SIGTERM")
    assert await served.code == EXIT_OK


async def test_a_state_file_that_cannot_be_written_ends_it(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(StateFile, "append", fail)
    served.member.begin(StoreSet("k", b"v"))
    assert await served.code == EXIT_CANNOT_WRITE
    (said,) = [one for one in caplog.records if one.levelname == "CRITICAL"]
    assert said.__dict__["file"] == str(tmp_path / "state")


async def test_a_state_file_that_cannot_be_written_ends_the_drain(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.draining()
    monkeypatch.setattr(StateFile, "append", fail)
    served.member.begin(StoreSet("k", b"v"))
    assert await served.code == EXIT_CANNOT_WRITE


async def test_so_does_the_last_write_of_a_drain(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last member leaves, and that it has left cannot be written."""
    await served.draining()
    monkeypatch.setattr(StateFile, "append", fail)
    assert not await served.member.leave(0.5)
    assert await served.code == EXIT_CANNOT_WRITE
