"""The coordinator goes away and comes back: its members go on where they were."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from idle_time import on_idle_time

import aiodist
from aiodist.control import line as control_line
from aiodist.control.events import CoordinatorBack, CoordinatorGone
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.state_file import StateFile
from aiodist.errors import (
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    GroupCompleteError,
    JoinTimeoutError,
)
from aiodist.wire.messages import MemberLeft, MemberLost, Message, Welcome

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]

AWAY = "did not end within 0.01 s: the coordinator is away: the coordinator at "


async def until(condition: Callable[[], object]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)


async def told(member: Any, kind: type[Any]) -> Any:
    """The next event of that kind."""
    while not isinstance(event := await member.event(), kind):
        pass
    return event


def test_members_come_back(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        members = await site.members(machine.address, 3)
        for _ in range(3):
            await machine.restart()
            for member in members:
                assert (await member.event()).reason
                assert await member.event() == CoordinatorBack(kept=machine.state is not None)
        [group] = machine.coordinator.status()["groups"]
        assert (group["epoch"], len(group["members"]), group["absent"]) == (1, 3, [])
        await members[0].client.leave(30)
        assert await members[1].event() == MemberLeft(1, (0,))
        await machine.coordinator.stop()


def test_who_is_told_that_it_is_away_is_told_that_it_is_back(
    play: Play, machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        async with aiodist.connect(machine.address, size=1):
            await machine.restart()
            with caplog.at_level(logging.WARNING, "aiodist.group"):
                await until(lambda: "is back" in caplog.text)
        assert ("without its state file" in caplog.text) == (machine.state is None)
        assert ("Check the path given as --state" in caplog.text) == (machine.state is None)
        await machine.coordinator.stop()


def test_members_come_back_without_threads(play: Play, machine: Any) -> None:
    """As when the process is about to end: its groups are left in good order even then."""

    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        [member] = await site.members(machine.address, 1)
        await asyncio.get_running_loop().shutdown_default_executor()
        await machine.restart()
        await told(member, CoordinatorBack)
        await member.client.leave(30)
        await machine.coordinator.stop()


def test_epochs_never_go_back(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        for _ in range(3):
            [member] = await site.members(machine.address, 1)
            await member.client.leave(30)
        [member] = await site.members(machine.address, 1)
        assert member.view.epoch == 4
        await machine.restart()
        await told(member, CoordinatorBack)
        await member.client.leave(30)
        [member] = await site.members(machine.address, 1)
        assert member.view.epoch == 5
        await machine.coordinator.stop()


def test_the_store_is_as_it_was(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        one, two = await site.members(durable.address, 2)
        await one.store.set("k", b"v")
        assert await one.store.add("n", 3) == 3
        waiting = two.store.wait("later")
        watch = await two.store.watch("k")
        await durable.kill()
        await told(one, CoordinatorGone)
        setting = one.store.set("later", b"")
        adding = [one.store.add("n") for _ in range(100)]
        await durable.start()
        await setting
        await waiting
        assert sorted(await asyncio.gather(*adding)) == list(range(4, 104))
        assert await two.store.get("k") == b"v"
        assert await anext(watch) == ("k", b"v")  # what it holds now, for it may have changed
        await one.store.set("k", b"w")
        assert await anext(watch) == ("k", b"w")
        watch.close()
        await durable.coordinator.stop()


def test_without_a_state_file_the_store_is_empty(
    play: Play, forgetful: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await forgetful.start()
        one, two = await site.members(forgetful.address, 2)
        await one.store.set("k", b"v")
        waiting = two.store.wait("later")
        watch = await two.store.watch("k")
        await forgetful.restart()
        with pytest.raises(CoordinatorLostError, match=r"without the group's store .* --state"):
            await waiting
        with pytest.raises(CoordinatorLostError):
            await anext(watch)
        await told(one, CoordinatorBack)
        assert await one.store.get("k") is None
        await two.store.set("k", b"new")
        assert await one.store.get("k") == b"new"
        await forgetful.coordinator.stop()


def test_what_is_asked_while_it_is_away_waits_until_its_deadline(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        [member] = await site.members(durable.address, 1)
        await durable.kill()
        await told(member, CoordinatorGone)
        with pytest.raises(CollectiveTimeoutError, match="the coordinator is away: "):
            await member.store.set("given up", b"", timeout=0.01)
        with pytest.raises(TimeoutError):
            await member.store.get("k", timeout=0.01)
        await durable.start()
        assert await member.store.get("given up") is None
        await durable.coordinator.stop()


def test_writes_that_are_given_up_do_not_block_others(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        [member] = await site.members(durable.address, 1)
        for _ in range(3):
            adding = [member.store.add("n") for _ in range(50)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in adding:
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)
            await durable.restart()
        await member.store.set("k", b"v")
        assert member.client._requests._requests == {}
        assert member.client._requests._writes == 0
        await durable.coordinator.stop()


@on_idle_time
def test_who_does_not_come_back_is_lost(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        one = await site.process(machine.address)
        two = await site.process(machine.address)
        await asyncio.gather(one.join(rank=0), two.join(rank=1, lease=0.3))
        await machine.kill()
        await told(one, CoordinatorGone)
        two.client.abort()
        await two.client.closed()
        await machine.start()
        event = await told(one, MemberLost)
        assert event.ranks == (1,)
        assert "did not come back to the coordinator for 0.3 s" in event.reason
        await machine.coordinator.stop()


def test_who_was_evicted_does_not_come_back(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        one, two = await site.members(machine.address, 2)
        # Its connection breaks, which the coordinator sees first.
        connections = list(machine.coordinator._clients._connections.values())
        connections[1].abort()
        assert (await told(one, MemberLost)).ranks == (1,)
        event = await told(two, CoordinatorGone)
        while not event.final:
            event = await told(two, CoordinatorGone)
        assert event.evicted
        with pytest.raises(GroupClosedError, match="ruled this rank lost"):
            await two.store.get("k")
        await machine.restart()
        await told(one, CoordinatorBack)
        [group] = machine.coordinator.status()["groups"]
        assert (list(group["lost"]), group["absent"]) == (["1"], [])
        await machine.coordinator.stop()


def test_joins_wait_while_it_is_away(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        one, two = [await site.process(machine.address) for _ in range(2)]
        joining = asyncio.create_task(one.join(rank=0))
        await one.client.status()
        await machine.kill()
        assert (await told(two, CoordinatorGone)).final  # it had not asked for anything
        with pytest.raises(JoinTimeoutError, match="no coordinator answered"):
            await site.process(machine.address, timeout=0.05)
        await machine.start()
        late = await site.process(machine.address)
        await late.join(rank=1)
        assert await joining == late.view
        await machine.coordinator.stop()


@on_idle_time
def test_a_join_that_runs_out_of_time_meanwhile(play: Play, machine: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await machine.start()
        one = await site.process(machine.address)
        joining = asyncio.create_task(one.join(rank=0, timeout=0.2))
        await one.client.status()
        await machine.kill()
        with pytest.raises(JoinTimeoutError, match="s away: no coordinator answers at "):
            await joining
        one.client.abort()
        await one.client.closed()


def test_a_view_that_was_on_its_way_arrives(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        one, two = [await site.process(durable.address) for _ in range(2)]
        joining = asyncio.create_task(one.join(rank=0))
        await one.client.status()
        # It is written down that the group has formed, and nobody hears it.
        durable.coordinator._carry_out = lambda effects: None
        durable.coordinator._journal._carry_out = lambda effects: None
        second = asyncio.create_task(two.join(rank=1))
        await until(lambda: durable.coordinator.status()["groups"][0]["members"])
        await durable.coordinator._journal.idle()
        await durable.restart()
        assert await joining == await second
        third = await site.process(durable.address)
        with pytest.raises(GroupCompleteError):
            await third.join()
        await durable.coordinator.stop()


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (("me", 1), "a stale one, its start 1 of 2"),
        (("other", 2), "a foreign one, with a state file of its own"),
    ],
)
def test_other_coordinators_are_not_taken_for_it(
    play: Play, durable: Any, shown: tuple[str, int], why: str, caplog: Any
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        await durable.restart()
        [member] = await site.members(durable.address, 1)
        await durable.kill()
        async with Coordinator(durable.address) as impostor:
            name, impostor._clients.incarnation = shown
            own = durable.coordinator._clients.name
            impostor._clients.name = own if name == "me" else name
            await until(lambda: why in caplog.text)
            for call in (member.store.get, member.store.wait):
                with pytest.raises(CollectiveTimeoutError, match=f"{AWAY}.* is {why}.* --state"):
                    await call("k", timeout=0.01)
            watch = member.store.watch("k", timeout=0.01)
            with pytest.raises(CollectiveTimeoutError, match=f"{AWAY}.* is {why}.* --state"):
                await watch
            watch.close()
            assert impostor.status()["groups"] == []
        await durable.start()
        await told(member, CoordinatorBack)
        caplog.clear()
        await durable.coordinator.stop()


def test_one_without_the_token_is_not_taken_for_it(play: Play, forgetful: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await forgetful.start(token="secret")
        member = await site.process(forgetful.address, token="secret")
        await member.join(size=1)
        await forgetful.kill()
        asked = asyncio.Event()
        async with Coordinator(forgetful.address, token="another") as impostor:
            opened = impostor._clients.opened

            def note(connection: Any) -> None:
                opened(connection)
                asked.set()

            impostor._clients.opened = note
            await asked.wait()
            assert impostor.status()["groups"] == []
        await forgetful.start(token="secret")
        await told(member, CoordinatorBack)
        await forgetful.coordinator.stop()


def test_one_of_another_version_is_said_to_be_so(
    play: Play, forgetful: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await forgetful.start()
        [member] = await site.members(forgetful.address, 1)
        await forgetful.kill()
        with monkeypatch.context() as patch:
            patch.setattr("aiodist.control.dial.PROTOCOL_VERSION", 0)
            await forgetful.start()
            await until(lambda: "not back at the coordinator: the coordinator at" in caplog.text)
        assert "install the same aiodist on both" in caplog.text
        await told(member, CoordinatorBack)
        caplog.clear()
        await forgetful.coordinator.stop()


def test_one_that_does_not_return_is_not_looked_for(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        coordinator = Coordinator(returns=False)
        await coordinator.start()
        [member] = await site.members(coordinator.address, 1)
        for connection in coordinator._clients._connections.values():
            connection.abort()
        event = await member.event()
        assert (event.final, event.evicted) == (True, False)
        with pytest.raises(CoordinatorLostError):
            await member.store.get("k")
        await coordinator.stop()


def test_what_cannot_be_written_is_not_told(
    play: Play, durable: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        [member] = await site.members(durable.address, 1)
        with monkeypatch.context() as patched:

            def full(*args: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patched.setattr(StateFile, "append", full)
            setting = member.store.set("k", b"v")
            assert (await durable.coordinator.failed()).errno == errno.ENOSPC
            await told(member, CoordinatorGone)
        assert not setting.done()
        await durable.coordinator.stop(drain=1000)
        await durable.start()
        await setting
        assert await member.store.get("k") == b"v"
        await durable.coordinator.stop()

    assert logging.CRITICAL in [one.levelno for one in caplog.records]


def test_an_unexpected_failure_to_write_ends_it_too(
    play: Play, durable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than that nobody is answered any more."""

    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        [member] = await site.members(durable.address, 1)
        with monkeypatch.context() as patched:

            def fail(*args: Any) -> None:
                raise MemoryError

            patched.setattr(StateFile, "append", fail)
            setting = member.store.set("k", b"v")
            assert (await durable.coordinator.failed()).errno == errno.EIO
        await durable.coordinator.stop()
        setting.cancel()
        await asyncio.wait({setting})


def test_it_does_not_start_without_the_thread_that_writes(
    play: Play, durable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @play
    async def scenario(site: Any) -> None:
        with monkeypatch.context() as patched:

            def fail(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(OSError, match="no thread for writing the state file"):
                await Coordinator(state=durable.state).start()
        await durable.start()
        await durable.coordinator.stop()


def test_a_log_that_cannot_be_written_anew_for_want_of_files_goes_on(
    play: Play, durable: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("aiodist.coordinator.state_file.COMPACT_BYTES", 1000)
    real = os.open
    lacking = True

    def scarce(path: Any, *args: Any) -> int:
        if lacking and str(path).endswith(".new"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args)

    @play
    async def scenario(site: Any) -> None:
        nonlocal lacking
        await durable.start()
        [member] = await site.members(durable.address, 1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", scarce)
            lacking = True
            for turn in range(100):
                await member.store.set("k", b"%d" % turn)
            assert "not made shorter for now" in caplog.text
            large = durable.state.stat().st_size
            assert caplog.text.count("not made shorter") < 60  # not with every write
            lacking = False
            while durable.state.stat().st_size >= large:
                await member.store.set("k", b"last")
        await durable.restart()
        assert await member.store.get("k") == b"last"
        await durable.coordinator.stop()


def test_two_coordinators_do_not_share_a_state_file(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        with pytest.raises(OSError, match="in use by another coordinator"):
            await Coordinator(state=durable.state).start()
        await durable.coordinator.stop()
        durable.state.write_text("something else")
        with pytest.raises(ValueError, match="no state file"):
            await Coordinator(state=durable.state).start()
        durable.state.unlink()
        with pytest.raises(OSError, match="cannot listen"):
            await Coordinator("tcp://192.0.2.1:1", state=durable.state).start()
        await durable.start()
        await durable.coordinator.stop()


def test_long_logs_are_written_anew_under_load(
    play: Play, durable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodist.coordinator.state_file.COMPACT_BYTES", 5000)

    @play
    async def scenario(site: Any) -> None:
        await durable.start()
        members = await site.members(durable.address, 2)
        for turn in range(20):
            await asyncio.gather(
                *(member.store.set(f"{i}", b"%d" % turn) for member in members for i in range(20))
            )
        assert durable.state.stat().st_size < 50_000
        await durable.restart()
        for i in range(20):
            assert await members[0].store.get(f"{i}") == b"19"
        await durable.coordinator.stop()


def test_a_coordinator_that_breaks_off_is_looked_for_again(
    play: Play, forgetful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_line, "REJOIN_SECONDS", 0.05)

    @play
    async def scenario(site: Any) -> None:
        await forgetful.start()
        [member] = await site.members(forgetful.address, 1)
        await forgetful.kill()
        calls: list[object] = []

        # Welcomes, and does not answer; then breaks off.
        async with Coordinator(forgetful.address) as mute:

            def hear(connection: Any, request: int, message: Message) -> None:
                calls.append(message)
                if len(calls) > 1:
                    connection.abort()

            mute._clients.received = hear
            await until(lambda: len(calls) >= 3)
        monkeypatch.setattr(control_line, "REJOIN_SECONDS", 30.0)
        await forgetful.start()
        await told(member, CoordinatorBack)
        await forgetful.coordinator.stop()
        monkeypatch.setattr(control_line, "REJOIN_SECONDS", 0.05)


def test_welcome_says_who_it_is(play: Play, durable: Any) -> None:
    @play
    async def scenario(site: Any) -> None:
        seen: list[Welcome] = []
        for _ in range(2):
            await durable.start()
            process = await site.process(durable.address)
            seen.append(process.client._welcome)
            await durable.coordinator.stop()
        assert seen[0].coordinator == seen[1].coordinator
        assert [one.incarnation for one in seen] == [1, 2]


async def test_a_rank_that_finds_a_coordinator_that_shuts_down_waits_for_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a run does that begins at the address of one that is just ending."""
    caplog.set_level(logging.DEBUG, "aiodist.session")
    async with Coordinator("tcp://127.0.0.1:0") as ending:
        address = ending.address
        group = await _joined(address)
        stopping = asyncio.create_task(ending.stop(drain=30.0))
        joining = asyncio.create_task(_joined(address))
        await until(lambda: joining.done() or "takes no joins" in caplog.text)
        await group.close()
        await stopping
    async with Coordinator(address):
        await (await joining).close()


async def test_a_rank_says_that_the_coordinator_shuts_down_if_none_follows() -> None:
    async with Coordinator("tcp://127.0.0.1:0") as ending:
        group = await _joined(ending.address)
        stopping = asyncio.create_task(ending.stop(drain=30.0))
        with pytest.raises(aiodist.JoinTimeoutError, match="is shutting down and takes no joins"):
            await _joined(ending.address, timeout=0.1)
        await group.close()
        await stopping


async def _joined(address: str, timeout: float = 20.0) -> aiodist.Group:
    return await aiodist.connect(address, rank=0, size=1, timeout=timeout)
