"""Members of one coordinator: joining, leaving, loss, shutdown."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import pytest
from idle_time import on_idle_time

from aiodist.control.client import ControlClient
from aiodist.control.events import CoordinatorGone
from aiodist.coordinator import alarm
from aiodist.coordinator import clients as coordinator_clients
from aiodist.coordinator import connection as coordinator_connection
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import (
    CoordinatorLostError,
    GroupClosedError,
    GroupCompleteError,
    JoinError,
    JoinTimeoutError,
    RankTakenError,
    SizeMismatchError,
)
from aiodist.membership.effects import Received
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Draining,
    EpochView,
    Evicted,
    JoinRequest,
    MemberLeft,
    MemberLost,
    Renew,
    Result,
    StoreGet,
    StoreSet,
)

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]


async def until(condition: Callable[[], object]) -> None:
    """Give the loop turns until `condition()` holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")


def test_many_groups_live_side_by_side(play: Play, any_address: str) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(any_address) as coordinator:
            if any_address.startswith("tcp"):
                assert not coordinator.address.endswith(":0")
            else:
                assert coordinator.address == any_address
            groups = await asyncio.gather(
                *(site.members(coordinator.address, 3, group=f"group-{i}") for i in range(4))
            )
            for i, members in enumerate(groups):
                assert [member.rank for member in members] == [0, 1, 2]
                assert len({id(member.client) for member in members}) == 3
                assert members[0].view == members[1].view == members[2].view
                await members[i % 3].store.set("who", b"%d" % i)
            for i, members in enumerate(groups):
                assert await members[0].store.get("who") == b"%d" % i
            found = coordinator.status()
            assert found == {"address": coordinator.address, **await groups[0][0].client.status()}
            assert [len(group["members"]) for group in found["groups"]] == [3] * 4
            left = await asyncio.gather(
                *(member.client.leave(30) for members in groups for member in members)
            )
            assert all(left)
            assert coordinator.status()["groups"] == []


def test_large_values_pass_every_kind_of_address(play: Play, any_address: str) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(any_address) as coordinator:
            [member] = await site.members(coordinator.address, 1)
            value = bytes(range(256)) * 4096
            await asyncio.gather(*(member.store.set(f"k{i}", value) for i in range(4)))
            values = await asyncio.gather(*(member.store.get(f"k{i}") for i in range(4)))
            assert values == [value] * 4
            member.client.close()


def test_where_the_connection_ends_is_known(play: Play, any_address: str) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(any_address) as coordinator:
            process = await site.process(coordinator.address)
            assert process.client.local_host == "127.0.0.1"
            assert process.client.seen_host == "127.0.0.1"


def test_errors_go_to_who_asked_and_to_nobody_else(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        waiting = await site.process(coordinator.address)
        joining = asyncio.create_task(waiting.join(rank=0, size=2, name="first"))
        await until(lambda: coordinator.status()["groups"])
        asker = await site.process(coordinator.address)
        with pytest.raises(RankTakenError, match=r"rank 0 is held by 'first'.*group 'g'"):
            await asker.join(rank=0, size=2)
        with pytest.raises(SizeMismatchError, match=r"with size 3, but .* with size 2 by 'first'"):
            await asker.join(size=3)
        with pytest.raises(JoinError, match="give size="):
            await asker.join(size=None)
        with pytest.raises(ValueError, match=r"JoinRequest message needs .* in lease"):
            await asker.join(size=2, lease=0.0)
        view = await asker.join(size=2)
        assert await joining == view
        with pytest.raises(JoinError, match="joined already"):
            await asker.join(size=2)
        late = await site.process(coordinator.address)
        with pytest.raises(GroupCompleteError, match="all 2 ranks are members"):
            await late.join(size=2)
        assert waiting.events.empty()
        assert asker.events.empty()


def test_a_join_that_ran_out_of_time_names_who_is_missing(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        process = await site.process(coordinator.address)
        with pytest.raises(
            JoinTimeoutError, match=r"after 0.01 s: .* 1 of 3 .*: ranks 0, 2"
        ) as info:
            await process.join(timeout=0.01, rank=1, size=3)
        assert isinstance(info.value, TimeoutError)
        assert info.value.group == "g"
        assert coordinator.status()["groups"] == []
        assert await process.join(size=1)


def test_a_view_that_comes_with_the_deadline_counts(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        process = await site.process(coordinator.address)
        view = await process.join(timeout=0, size=1)
        assert isinstance(view, EpochView)
        assert len(coordinator.status()["groups"]) == 1


def test_cancelling_a_join_withdraws(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        process = await site.process(coordinator.address)
        joining = asyncio.create_task(process.join(rank=0))
        await until(lambda: coordinator.status()["groups"])
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert not process.client.is_open
        await until(lambda: not coordinator.status()["groups"])
        await site.members(coordinator.address, 2)


def test_the_others_hear_of_who_is_lost_and_who_left(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        members = await site.members(coordinator.address, 4)
        members[2].client.abort()
        for rank in (0, 1, 3):
            event = await members[rank].event()
            assert event == MemberLost(1, (2,), event.reason)
            assert "it disconnected" in event.reason or "it broke" in event.reason
        assert await members[0].client.leave(30)
        assert await members[1].event() == MemberLeft(1, (0,))
        members[1].client.close()
        members[1].client.close()
        assert await members[3].event() == MemberLeft(1, (0,))
        assert await members[3].event() == MemberLeft(1, (1,))
        assert not await members[1].client.leave(30)
        members[0].client.close()
        for rank in (0, 1):
            with pytest.raises(GroupClosedError, match=r"closed here \[group 'g'\]"):
                await members[rank].store.get("k")
        with pytest.raises(GroupClosedError, match=r"aborted here \[group 'g'\]"):
            await members[2].store.get("k")


def test_who_aborts_says_why_and_alarms_nobody(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodist.coordinator")

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        members = await site.members(coordinator.address, 3)
        assert await members[2].client.leave(30, aborts="x" * (MAX_TEXT + 1))
        assert await members[1].event() == MemberLost(1, (2,), "it aborted: " + "x" * 500)
        members[0].client.abort("ValueError: no")
        assert await members[1].event() == MemberLost(1, (0,), "it aborted: ValueError: no")
        members[1].client.close()
        members[1].client.abort("too late")

    said = [record for record in caplog.records if record.__dict__["event"] in ("lost", "aborted")]
    assert [record.levelname for record in said] == ["INFO", "INFO"]
    assert "reason=it aborted: ValueError: no" in said[1].message


@pytest.mark.parametrize("aborts", [None, "ValueError: no"])
def test_who_is_evicted_as_it_leaves_has_left(play: Play, aborts: str | None) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        leaving = asyncio.create_task(member.client.leave(30, aborts=aborts))
        await until(lambda: not member.client._is_in)
        [connection] = coordinator._clients._connections.values()
        connection.send(encode_message(Evicted("no sign of life")))
        connection.close("no sign of life")
        assert not await leaving
        assert not member.client.is_open


def test_epochs_of_a_name_grow(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        for epoch in (1, 2, 3):
            [member] = await site.members(coordinator.address, 1)
            assert member.view.epoch == epoch
            await member.client.leave(30)


@on_idle_time
def test_silence_ends_a_membership(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        raw = await site.raw(coordinator.address)
        await raw.greet()
        raw.say(JoinRequest(group="g", id="silent", rank=0, size=2, lease=0.05))
        other = await site.process(coordinator.address)
        joining = asyncio.create_task(other.join(rank=1))
        heard = [await raw.hear()]
        while not isinstance(heard[-1], Evicted):
            heard.append(await raw.hear())
        assert heard[-1] == Evicted("no sign of life for 0.05 s")
        assert await raw.ended()
        if isinstance(heard[0], EpochView):
            await joining
            assert await other.event() == MemberLost(1, (0,), "no sign of life for 0.05 s")
        else:  # it did not even live to see the group complete
            joining.cancel()


def test_a_coordinator_that_nobody_comes_back_to_waits_one_lease_for_a_silent_group(
    play: Play,
) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(returns=False) as coordinator:
            raw = await site.raw(coordinator.address)
            await raw.greet()
            raw.say(JoinRequest(group="g", id="silent", size=1, lease=0.05))
            assert isinstance(await raw.hear(), EpochView)
            assert await raw.hear() == Evicted("no sign of life for 0.05 s")
            await coordinator.emptied()


@on_idle_time
def test_an_evicted_member_is_told(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        process, other = [await site.process(coordinator.address) for _ in range(2)]
        process.client._lease = Mock()  # nobody renews it
        await asyncio.gather(process.join(size=2, lease=0.05), other.join(size=2))
        event = await process.event()
        assert event == CoordinatorGone(
            "it ruled this rank lost: no sign of life for 0.05 s", evicted=True, final=True
        )
        text = r"no longer a member: .* it ruled this rank lost: no sign.* s; connect again to join"
        with pytest.raises(GroupClosedError, match=text):
            await process.store.get("k")


class Clock:
    """An event loop whose time the test moves on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.skipped = 0.0

    def time(self) -> float:
        return self._loop.time() + self.skipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


@pytest.mark.parametrize("late", [True, False])
def test_a_pause_of_the_coordinator_kills_nobody(play: Play, late: bool) -> None:
    """A timer that is late shows that its loop stood still; without that, silence is a loss."""

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        clock: Any = Clock(coordinator._loop)
        coordinator._loop = coordinator._alarm._loop = clock
        raw, other = [await site.raw(coordinator.address) for _ in range(2)]
        for one, lease in ((raw, 1000.0), (other, 3000.0)):
            await one.greet()
            one.say(JoinRequest(group="g", id=f"of {lease:g} s", size=2, lease=lease))
        assert isinstance(await raw.hear(), EpochView)
        clock.skipped = 1000.0 + (alarm.LATE_SECONDS + 1.0 if late else 0.0)
        coordinator._alarm._on_timer()
        if not late:
            assert await raw.hear() == Evicted("no sign of life for 1000 s")
            return
        raw.say(StoreGet("k"))  # what lay unread
        assert await raw.hear() == Result(None)
        clock.skipped += alarm.GRACE_SECONDS
        coordinator._alarm._on_timer()
        raw.say(StoreGet("k"))
        assert await raw.hear() == Result(None)


def test_a_busy_member_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Semaphore(0)
    step = Coordinator._step

    def counted(self: Coordinator, event: Any) -> None:
        step(self, event)
        if isinstance(event, Received) and isinstance(event.message, Renew):
            renewed.release()

    monkeypatch.setattr(Coordinator, "_step", counted)
    started = threading.Event()
    box: dict[str, Any] = {}

    async def serve() -> None:
        async with Coordinator() as coordinator:
            box["address"] = coordinator.address
            box["loop"] = asyncio.get_running_loop()
            box["stop"] = asyncio.Event()
            started.set()
            await box["stop"].wait()

    async def member() -> None:
        client = await ControlClient.open(box["address"])
        await client.join(JoinRequest(group="g", id="busy", size=1, lease=4.0), 30)
        for _ in range(4):  # three in a lease; the loop has no turn meanwhile
            assert renewed.acquire(timeout=30)
        assert (await client.status())["groups"][0]["lost"] == {}
        client.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        asyncio.run(member())
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)


def test_members_hear_when_the_coordinator_stops(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        coordinator = Coordinator(returns=False)
        await coordinator.start()
        member, other = await site.members(coordinator.address, 2)
        waiting = member.store.wait("never")
        joiner = await site.process(coordinator.address)
        joining = asyncio.create_task(joiner.join(group="other"))
        await until(lambda: len(coordinator.status()["groups"]) == 2)
        await coordinator.stop()
        gone = CoordinatorGone("it was shut down", orderly=True, final=True)
        assert await member.event() == gone
        with pytest.raises(CoordinatorLostError, match="is gone: it was shut down"):
            await waiting
        with pytest.raises(CoordinatorLostError, match="it was shut down"):
            await joining
        with pytest.raises(CoordinatorLostError):
            await other.store.get("k")
        assert not await other.client.leave(1)
        await coordinator.stop()


def test_a_coordinator_that_dies_is_noticed(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        for connection in list(coordinator._clients._connections.values()):
            connection.abort()
        event = await member.event()
        assert isinstance(event, CoordinatorGone)
        assert (event.orderly, event.evicted) == (False, False)


def test_draining_waits_for_the_groups_to_end(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        member, other = await site.members(coordinator.address, 2)
        joiner = await site.process(coordinator.address)
        joining = asyncio.create_task(joiner.join(group="other"))
        await until(lambda: len(coordinator.status()["groups"]) == 2)
        draining = asyncio.create_task(coordinator.stop(drain=30))
        assert await member.event() == Draining()
        with pytest.raises(JoinError, match="shutting down"):
            await joining
        with pytest.raises(JoinError, match="shutting down"):
            await joiner.join(group="other")
        await member.store.set("k", b"still works")
        await member.client.leave(30)
        assert await other.store.get("k") == b"still works"
        assert not draining.done()
        await other.client.leave(30)
        await draining
        gone = CoordinatorGone("it was shut down", orderly=True, final=True)
        assert await joiner.event() == gone


def test_emptied_when_the_last_member_has_left(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        await coordinator.emptied()
        member, other = await site.members(coordinator.address, 2)
        emptied = asyncio.create_task(coordinator.emptied())
        await member.client.leave(30)
        await other.store.set("k", b"it is still there")
        assert not emptied.done()
        await other.client.leave(30)
        await emptied
        assert coordinator.status()["groups"] == []


def test_a_drain_ends_with_its_deadline(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        await coordinator.stop(drain=0.01)
        assert await member.event() == Draining()
        assert await member.event() == CoordinatorGone("it was shut down", orderly=True)


def test_a_second_stop_does_not_wait(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        draining = asyncio.create_task(coordinator.stop(drain=1000))
        assert await member.event() == Draining()
        await coordinator.stop()
        await draining
        assert await member.event() == CoordinatorGone("it was shut down", orderly=True)


def test_stopping_does_not_wait_for_who_does_not_read(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_clients, "GOODBYE_SECONDS", 0.01)
    monkeypatch.setattr(coordinator_connection, "CLOSE_SECONDS", 1e6)
    monkeypatch.setattr(coordinator_connection, "MAX_BACKLOG", 2**30)

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        raw = await site.raw(coordinator.address)
        await raw.greet()
        raw.say(JoinRequest(group="g", id="raw", size=1))
        assert isinstance(await raw.hear(), EpochView)
        raw.writer.transport.pause_reading()
        raw.say(StoreSet("k", bytes(2**20)))
        for _ in range(20):
            raw.say(StoreGet("k"))
        [connection] = coordinator._clients._connections.values()
        await until(lambda: connection._transport.get_write_buffer_size() > 2**20)
        async with asyncio.timeout(30):
            await coordinator.stop()


def test_a_failing_callback_harms_nothing(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        seen: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: seen.append(str(context["exception"]))
        )
        member, other = await site.members(coordinator.address, 2)

        def fail(event: object) -> None:
            raise RuntimeError("the callback is broken")

        member.client.on_event = fail
        await other.client.leave(30)
        assert await member.store.get("k") is None
        assert seen == ["the callback is broken"]
