"""The store, as members use it."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodist.control import store as store_module
from aiodist.control.events import CoordinatorGone, StoreValueError
from aiodist.control.store import Store
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    GroupClosedError,
    MessageTooLargeError,
)

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]


def test_values_are_shared(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        one, two = [member.store for member in await site.members(coordinator.address, 2)]
        assert await one.get("k") is None
        assert await one.set("k", b"v") is None
        assert await two.get("k") == b"v"
        await one.set("k", bytearray(b"w"))
        await one.set("j", memoryview(b"x"))
        assert await two.delete("j") is True
        assert await two.delete("j") is False
        assert await two.compare_set("k", b"v", b"no") is False
        assert await two.compare_set("k", b"w", b"yes") is True
        assert await two.compare_set("new", None, b"1") is True
        assert await one.add("new") == 2
        assert await one.add("new", -5, timeout=math.inf) == -3
        assert await one.get("new") == b"-3"


def test_adding_from_all_sides_loses_nothing(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        members = await site.members(coordinator.address, 3)
        sums = await asyncio.gather(
            *(member.store.add("n", 1) for member in members for _ in range(50))
        )
        assert sorted(sums) == list(range(1, 151))


def test_a_wait_ends_when_all_keys_are_there(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        one, two = [member.store for member in await site.members(coordinator.address, 2)]
        both = one.wait(["a", "b"])
        await one.set("a", b"")
        await one.wait("a")
        assert not both.done()
        await two.set("b", b"")
        await both


def test_deadlines_hold_and_say_what_was_waited_for(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        expected = r"store.wait\(k, j\) did not end within 0.01 s: not all of the keys exist"
        with pytest.raises(CollectiveTimeoutError, match=expected) as info:
            await member.store.wait(["k", "j"], timeout=0.01)
        assert isinstance(info.value, TimeoutError)
        assert info.value.group == "g"
        hasty = Store(member.client, timeout=0.01)
        with pytest.raises(TimeoutError, match=r"within 0.01 s"):
            await hasty.wait("x" * 300)
        watch = member.store.watch("k", timeout=0.01)
        with pytest.raises(TimeoutError, match=r"store.watch\(k\)"):
            await anext(watch)
        watch.close()
        # The waits that were given up are off the coordinator's books.
        await member.store.set("k", b"")
        group = coordinator._machine._groups["g", ""]
        assert group.store._listeners == {}


def test_a_cancelled_wait_is_forgotten(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        waiting = member.store.wait("k")
        await member.store.get("k")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await member.store.get("k")
        group = coordinator._machine._groups["g", ""]
        assert group.store._listeners == {}


def test_a_watch_sees_what_changes_after_it(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        one, two = [member.store for member in await site.members(coordinator.address, 2)]
        await one.set("k", b"before")
        async with two.watch("k") as watch:
            await one.set("k", b"1")
            await one.set("other", b"")
            await one.delete("k")
            assert await anext(watch) == ("k", b"1")
            assert await anext(watch) == ("k", None)
            await one.set("k", b"ttl", ttl=0.001)
            assert await anext(watch) == ("k", b"ttl")
            assert await anext(watch) == ("k", None)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        assert await watch is watch


def test_a_watch_is_a_loop(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        seen = []
        await member.store.add("k", 1)
        watch = member.store.watch("k")
        await member.store.add("k", 1)
        await member.store.add("k", 1)
        async for key, value in watch:
            seen.append((key, value))
            if value == b"3":
                watch.close()
        assert seen == [("k", b"2"), ("k", b"3")]


def test_a_watch_that_is_dropped_ends(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        watch = await member.store.watch("k")
        assert len(member.client._requests._watches) == 1
        del watch
        gc.collect()
        await member.store.set("k", b"")
        await member.store.set("k", b"")
        assert member.client._requests._watches == {}
        assert coordinator._machine._groups["g", ""].store._listeners == {}


def test_a_reader_that_is_far_behind_misses_the_oldest(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNREAD", 2)

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        watch = member.store.watch("k")
        for _ in range(5):
            await member.store.add("k", 1)
        assert [await anext(watch), await anext(watch)] == [("k", b"4"), ("k", b"5")]
        watch.close()


def test_limits_are_kept_with_clear_errors(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        [member] = await site.members(coordinator.address, 1)
        store = member.store
        with pytest.raises(MessageTooLargeError, match="1048577 bytes, over the 1048576"):
            await store.set("k", bytes(2**20 + 1))
        with pytest.raises(ValueError, match="key='': expected a text of 1 to 1024 characters"):
            await store.get("")
        with pytest.raises(ValueError, match=r"key='x+: expected a text of 1 to"):
            store.watch("x" * 1025)
        for keys in (5, [5]):
            with pytest.raises(ValueError, match=r"keys=\(5,\): expected a text of 1 to"):
                await store.wait(keys)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ttl is more than 0 seconds, not -1"):
            await store.set("k", b"", ttl=-1.0)
        with pytest.raises(ValueError, match="in ttl"):
            await store.set("k", b"", ttl=1e-6)
        with pytest.raises(TypeError, match="the store keeps bytes, not str: encode"):
            await store.set("k", "text")
        await store.set("text", b"text")
        with pytest.raises(StoreValueError, match="decimal number in 'text'") as info:
            await store.add("text")
        assert isinstance(info.value, ValueError)
        assert isinstance(info.value, AiodistError)
        for i in range(63):
            await store.set(f"big-{i}", bytes(2**20))
        with pytest.raises(MessageTooLargeError, match="over its limit of 67108864: delete keys"):
            await store.set("one too many", bytes(2**20))
        watches = [store.watch("k") for _ in range(1025)]
        for watch in watches[:1024]:
            await watch
        with pytest.raises(MessageTooLargeError, match="1024 waits and watches"):
            await watches[1024]
        await store.set("k", b"v")
        assert await anext(watches[1023]) == ("k", b"v")


def test_the_end_of_the_group_ends_everything(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        one, two = await site.members(coordinator.address, 2)
        watch = one.store.watch("k")
        waiting = one.store.wait("k")
        await one.store.get("k")
        one.client.close()
        with pytest.raises(GroupClosedError):
            await waiting
        with pytest.raises(GroupClosedError):
            await anext(watch)
        with pytest.raises(GroupClosedError):
            one.store.watch("k")
        watch.close()
        watch = two.store.watch("k")
        await coordinator.stop()
        while not isinstance(await two.event(), CoordinatorGone):
            pass
        assert two.client.is_away
        two.client.abort()
        with pytest.raises(GroupClosedError):
            await anext(watch)
        with pytest.raises(GroupClosedError):
            await two.store.set("k", b"")


def test_the_store_is_for_members(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        process = await site.process(coordinator.address)
        with pytest.raises(GroupClosedError, match="join one first"):
            await process.store.get("k")
