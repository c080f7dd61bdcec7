"""`Group.share` on stand-in devices: one memory, and how long it is there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from standin import StandinDevice

import aiodist
from aiodist import Group
from aiodist.device_programs import reduction
from aiodist.devices import shares as device_shares

Devices = Callable[[int], list[StandinDevice]]
Blind = Callable[[StandinDevice], None]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is kept for good, until the test is over."""
    kept: list[Any] = []
    monkeypatch.setattr(device_shares, "_for_good", kept)
    yield kept
    kept.clear()


def on(groups: list[Group], ranks: list[StandinDevice]) -> None:
    for group, device in zip(groups, ranks, strict=True):
        group._context.device_memory.use(device)


async def shared(groups: list[Group], x: Any, src: int = 0, **kwargs: Any) -> list[Any]:
    works = [g.share(x if g.rank == src else None, src, **kwargs) for g in groups]
    return list(await asyncio.gather(*works))


async def turn(groups: list[Group]) -> None:
    await asyncio.gather(*(g.barrier(tag="turn") for g in groups))


@pytest.mark.parametrize("tag", [None, "tagged"])
async def test_it_is_the_same_memory(devices: Devices, tag: str | None) -> None:
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        x = ranks[1].put(np.arange(12.0).reshape(3, 4))
        tree = {"w": x, "step": 7, "more": [ranks[1].put(np.ones(5, np.int8))]}
        got = await shared(groups, tree, 1, tag=tag)
        assert got[1] is tree
        for rank in (0, 2):
            assert got[rank]["step"] == 7 and got[rank]["w"].shape == (3, 4)
            np.testing.assert_array_equal(ranks[rank].get(got[rank]["w"]), ranks[1].get(x))
            np.testing.assert_array_equal(ranks[rank].get(got[rank]["more"][0]), np.ones(5))
        ranks[1].fill(x, 5.0)
        np.testing.assert_array_equal(ranks[1].get(x), np.full((3, 4), 5.0))
        np.testing.assert_array_equal(ranks[0].get(got[0]["w"]), np.full((3, 4), 5.0))
        assert (ranks[0].opened, ranks[2].opened) == (1, 1)


async def test_it_comes_after_what_is_queued(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.zeros(4))
        gate = ranks[0].current().hold()
        ranks[0].fill(x, 3.0)
        works = [g.share(x if g.rank == 0 else None) for g in groups]
        await turn(groups)
        assert not works[1].done()
        gate.set()
        _, got = await asyncio.gather(*works)
        np.testing.assert_array_equal(ranks[1].get(got), np.full(4, 3.0))


async def test_the_owner_keeps_it_until_the_last_view_is_gone(devices: Devices) -> None:
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.ones(300_000))
        got = await shared(groups, x)
        pools = ranks[0].allocations
        views = [got[1][10:20], got[2]]
        del x, got
        for _ in range(3):
            await turn(groups)
        gc.collect()
        assert ranks[0].allocations == pools
        np.testing.assert_array_equal(ranks[1].get(views[0]), np.ones(10))
        views.clear()
        while groups[0]._context.device_memory.shares._lent:
            await turn(groups)
        gc.collect()
        assert ranks[0].allocations == pools - 1


async def test_a_view_that_is_dropped_is_used_until_the_device_is_done(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.arange(4.0))
        _, view = await shared(groups, x)
        mine = ranks[1].put(np.zeros(4))
        gate = ranks[1].current().hold()
        ranks[1].copy(ranks[1].current(), mine, view)
        del x, view
        for _ in range(10):
            gc.collect()
            await turn(groups)
        lent = groups[0]._context.device_memory.shares._lent
        assert lent
        gate.set()
        while lent:
            await turn(groups)
        np.testing.assert_array_equal(ranks[1].get(mine), np.arange(4.0))


async def test_who_leaves_with_it_may_keep_it(devices: Devices, kept: list[Any]) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.ones(1000))
        _, got = await shared(groups, x)
        del x
        await groups[1].close()
        async with asyncio.timeout(20):
            with contextlib.suppress(aiodist.AiodistError):
                await groups[0].recv()  # until it is seen that rank 1 has left
        assert len(kept) == 1
    np.testing.assert_array_equal(ranks[1].get(got), np.ones(1000))


async def test_the_owner_leaves_first(devices: Devices, kept: list[Any]) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        _, got = await shared(groups, ranks[0].put(np.ones(1000)))
        await groups[0].close()
        assert len(kept) == 1
        np.testing.assert_array_equal(ranks[1].get(got), np.ones(1000))


async def test_a_cancelled_share_leaves_nothing(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.zeros(4))
        gate = ranks[0].current().hold()
        works = [g.share(x if g.rank == 0 else None) for g in groups]
        await turn(groups)
        works[1].cancel()
        with pytest.raises(aiodist.CollectiveAbortedError):
            await works[0]
        gate.set()
        del works
        while groups[0]._context.device_memory.shares._lent:
            gc.collect()
            await turn(groups)


async def test_nothing_is_kept_for_a_rank_that_was_lost_before(
    devices: Devices, kept: list[Any]
) -> None:
    ranks = devices(2)
    async with aiodist.local(3) as groups:
        on(groups[:2], ranks)
        await groups[2].close()
        with contextlib.suppress(aiodist.AiodistError):
            await groups[0].recv(src=2)  # until it is seen that rank 2 has left
        works = [g.share(ranks[0].put(np.ones(4)) if g.rank == 0 else None) for g in groups[:2]]
        for end in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(end, aiodist.PeerLostError)
        while groups[0]._context.device_memory.shares._lent:  # until rank 1 has said so
            await asyncio.gather(groups[0].recv(src=1), groups[1].send("turn", 0))
    assert not kept


async def test_what_cannot_be_shared(devices: Devices, blind: Blind) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        for group, device in zip(groups, ranks, strict=True):
            with pytest.raises(TypeError, match="of the host and of a device"):
                group.share([device.put(np.ones(3)), np.ones(3)], group.rank)
            with pytest.raises(TypeError, match="no array"):
                group.share([1, "a"], group.rank)
            with pytest.raises(ValueError, match="contiguous"):
                group.share(device.put(np.ones((2, 3))).T, group.rank)
            with pytest.raises(ValueError, match="pass None"):
                group.share(device.put(np.ones(3)), 1 - group.rank)

        blind(ranks[1])
        x = ranks[0].put(np.ones(3))
        works = [g.share(x if g.rank == 0 else None) for g in groups]
        for end in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(end, (OSError, aiodist.CollectiveAbortedError))
            assert "no peer access" in str(end) and "broadcast" in str(end)
        while groups[0]._context.device_memory.shares._lent:
            await turn(groups)


async def test_memory_without_a_handle_is_not_shared_and_other_memory_is(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        _, borrowed = await shared(groups, ranks[0].put(np.ones(3)))  # it has none at rank 1
        works = [g.share(borrowed if g.rank == 1 else None, 1) for g in groups]
        ends = [str(end) for end in await asyncio.gather(*works, return_exceptions=True)]
        assert "rank 1: it is memory of another process" in ends[1]
        assert "see the error of rank 1" in ends[0] or "memory of another process" in ends[0]
        await shared(groups, ranks[1].put(np.ones(3)), 1)


async def test_after_many_in_a_row_no_arrays_are_joined_in_vain(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "MOST_VAIN", 3)
    ranks = devices(2)
    asked = []

    def locate(array: Any) -> Any:
        asked.append(array)
        raise OSError("it has no handle")

    async with aiodist.local(2) as groups:
        for hidden in (True, True, False, True, True, True, True):
            with monkeypatch.context() as patch:
                if hidden:
                    patch.setattr(ranks[0], "locate", locate)
                x = [device.put(np.ones(3)) for device in ranks]
                await asyncio.gather(
                    *(g.all_reduce(each) for g, each in zip(groups, x, strict=True))
                )
        assert len(asked) == 5


async def test_a_view_is_dropped_where_the_device_fails(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loan stays, because the device may still read it."""
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        _, view = await shared(groups, ranks[0].put(np.ones(3)))

        def event() -> Any:
            raise RuntimeError("the device is broken")

        monkeypatch.setattr(ranks[1], "event", event)
        pid = os.fork()
        if pid == 0:
            raised: list[Any] = []
            sys.unraisablehook = raised.append
            del view
            gc.collect()
            os._exit(len(raised))
        assert os.waitpid(pid, 0)[1] == 0  # noqa: ASYNC222
        del view
        gc.collect()
        for _ in range(5):
            await turn(groups)
        assert groups[0]._context.device_memory.shares._lent
        assert "memory that others may read is kept, because the device fails" in caplog.text
        monkeypatch.undo()
        groups[1]._context.device_memory._never.clear()  # for the end of this test
        groups[0]._context.device_memory.shares._lent.clear()


async def test_the_owner_is_gone(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        _, got = await shared(groups, ranks[0].put(np.ones(1000)))
        with contextlib.suppress(aiodist.AiodistError):
            groups[0].abort("it is over")
        ranks[0].close()
        np.testing.assert_array_equal(ranks[1].get(got), np.ones(1000))


def test_who_is_lost_has_no_views() -> None:
    told: list[tuple[int, int, int]] = []
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        shares = device_shares.Shares(
            loop, lambda *word: told.append(word), lambda events, then: then(), print
        )
        number = shares.lend("memory", {1, 2})
        shares.rank_lost(1)
        shares.heard(2, device_shares.RELEASED, number)
        assert not shares._lent
        shares.heard(2, device_shares.RELEASED, number)  # once more does no harm
        # One that says that it leaves with views may be lost after that.
        number = shares.lend("more", {1})
        shares.heard(1, device_shares.KEPT, number)
        shares.rank_lost(1)
        assert device_shares._for_good == ["more"] and not shares._lent
        # Asked after a failure, who has no view says so, and who has does not.
        shares.heard(1, device_shares.HELD, 7)
        holder = shares.borrow(1, 8, [])
        shares.heard(1, device_shares.HELD, 8)
        assert told == [(1, device_shares.RELEASED, 7)]
        with pytest.raises(aiodist.ProtocolError):
            shares.heard(1, 99, 0)
        shares.rank_lost(1)
        del holder
        loop.run_until_complete(asyncio.sleep(0))
        assert len(told) == 1
        shares.close()
