"""The coordinator before it was started, and what it logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import aiodist
from aiodist.coordinator import actor, encoding, state_file
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.state_file import StateFile
from aiodist.errors import CoordinatorLostError, MessageTooLargeError
from aiodist.membership.records import Stored


async def test_its_address_is_known_while_it_listens() -> None:
    coordinator = Coordinator()
    with pytest.raises(RuntimeError, match=r"does not listen: call start\(\) first"):
        _ = coordinator.address
    await coordinator.start()
    try:
        assert coordinator.address.startswith("tcp://127.0.0.1:")
    finally:
        await coordinator.stop()


async def test_groups_of_channels_are_logged_below_debug(caplog: pytest.LogCaptureFixture) -> None:
    """A subscriber makes one group, and more for each version: nobody's program has made these."""
    caplog.set_level(logging.DEBUG, "aiodist.coordinator")
    async with (
        Coordinator("inproc://channels-in-the-log") as coordinator,
        aiodist.publisher("policy", address=coordinator.address) as out,
        aiodist.subscriber("policy", address=coordinator.address) as weights,
    ):
        await out.publish({"w": np.ones(3)}, version=1)
        await weights.latest()
    assert not [one for one in caplog.messages if "channel policy" in one]


async def test_the_log_shows_no_name_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would obey escape sequences, and a new line would look like an event of its own."""
    caplog.set_level(logging.INFO, "aiodist.coordinator")
    name = "g\x1b[2J\nlost: rank=0"
    async with (
        Coordinator("inproc://names-in-the-log") as coordinator,
        aiodist.connect(coordinator.address, group=name, size=1),
    ):
        (formed,) = [one for one in caplog.records if one.__dict__["event"] == "formed"]
    assert "group=g?[2J?lost: rank=0, " in formed.getMessage()
    assert formed.__dict__["group"] == name


@pytest.mark.parametrize("late", [7200.0, -7200.0])
async def test_a_ttl_is_kept_by_the_clock_as_it_was_set_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """The host boots with a clock that is `late`, and the clock is set before there is a key."""
    now = 1e9 - late
    monkeypatch.setattr(actor, "time", SimpleNamespace(time=lambda: now))
    async with (
        Coordinator("tcp://127.0.0.1:0", state=tmp_path / "state") as coordinator,
        aiodist.connect(coordinator.address, size=1) as group,
    ):
        now = 1e9
        await group.store.set("k", b"v", ttl=3600.0)
        # The last record of the key says that the group deleted it at its end.
        await coordinator._journal.idle()
        saved = (tmp_path / "state").read_bytes()
    (tmp_path / "copy").write_bytes(saved)
    with contextlib.closing(StateFile(tmp_path / "copy")) as file:
        [stored] = [record for record in file.saved.records if isinstance(record, Stored)]
    assert stored.expires == pytest.approx(1e9 + 3600.0)


async def test_it_has_lost_its_stores_if_it_starts_again() -> None:
    """A member that believed otherwise would wait in vain for keys that it has set."""
    coordinator = Coordinator("inproc://started-again")
    await coordinator.start()
    async with aiodist.connect(coordinator.address, size=1) as group:
        await group.store.set("k", b"v")
        waits = group.store.wait("later")
        await coordinator.stop()
        await coordinator.start()
        with pytest.raises(CoordinatorLostError, match="without its state file"):
            await waits
    await coordinator.stop()


async def test_a_reply_that_is_too_large_is_an_error_of_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        Coordinator("inproc://too-large-a-reply") as coordinator,
        aiodist.connect(coordinator.address, size=1) as group,
    ):
        control = group._actor.control
        with monkeypatch.context() as patched:
            patched.setattr(encoding, "MAX_REPLY", 100)
            with pytest.raises(MessageTooLargeError, match="a Status message of"):
                await control.status()
        assert (await control.status())["groups"]


def test_it_runs_on_one_loop_after_the_other() -> None:
    coordinator = Coordinator("inproc://two-loops")

    async def until_empty() -> None:
        async with coordinator:
            emptied = asyncio.create_task(coordinator.emptied())
            async with aiodist.connect(coordinator.address, size=1):
                pass
            await emptied
            left = await aiodist.connect(coordinator.address, size=1)
            # It waits until the last connection has ended.
            await coordinator.stop()
            left.abort()

    for _ in range(2):
        asyncio.run(until_empty())


def test_a_stop_ends_though_the_loop_of_an_earlier_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = Coordinator("inproc://a-loop-that-ends")

    async def endless(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def begin() -> None:
        await coordinator.start()
        with monkeypatch.context() as patched:
            patched.setattr(coordinator, "_end", endless)
            stopping = asyncio.create_task(coordinator.stop())
            await asyncio.sleep(0)
        assert not stopping.done()

    asyncio.run(begin())
    asyncio.run(coordinator.stop())


async def test_a_cancelled_stop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing could finish it, and the state file would stay locked."""
    writes, may_write = threading.Event(), threading.Event()
    sync_data = state_file._sync_data

    def held(fd: int) -> None:
        writes.set()
        may_write.wait()
        sync_data(fd)

    async with Coordinator("inproc://stop-cancelled", state=tmp_path / "state") as coordinator:
        group = await aiodist.connect(coordinator.address, size=1)
        monkeypatch.setattr(state_file, "_sync_data", held)
        write = group.store.set("k", b"v")
        await asyncio.to_thread(writes.wait)
        stop = asyncio.create_task(coordinator.stop())
        await asyncio.sleep(0)
        stop.cancel()
        await asyncio.wait({stop})
        with pytest.raises(RuntimeError, match="has not stopped yet"):
            await coordinator.start()
        may_write.set()
        await coordinator.stop()
        await write
        group.abort()
        with contextlib.closing(StateFile(tmp_path / "state")):
            pass
