"""What calls do to the event loop that they run on, and how iterators over messages end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiodist
from aiodist import Group
from aiodist.work import Work

ALONE: dict[str, Callable[[Group], Work[Any]]] = {
    "all_gather": lambda group: group.all_gather(1),
    "all_reduce": lambda group: group.all_reduce(1),
    "barrier": lambda group: group.barrier(),
    "barrier with a tag": lambda group: group.barrier(tag="t"),
    "probe": lambda group: group.probe(src=0),
    "send": lambda group: group.send(1, 0),
}
"""Calls of a group of one rank. Each is done before it returns."""

RECEIVES: dict[str, Callable[[Group], Work[Any]]] = {
    "recv": lambda group: group.recv(src=0),
    "sendrecv": lambda group: group.sendrecv(1, 0, src=0),
}


async def turned(work: Awaitable[Any]) -> bool:
    """Whether the loop has had a turn before `work` was awaited."""
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    await work
    return bool(turns)


@pytest.mark.parametrize("op", ALONE)
async def test_a_call_that_is_done_at_once_lets_the_loop_turn_if_it_is_due(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiodist.local(1) as (group,):
        for due in (3600.0, -1.0):
            for _ in range(2):
                await group.send(0, 0)
            monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", due)
            await asyncio.sleep(0)
            await group.all_reduce(1)  # the first call of this turn, from which time counts
            works = [ALONE[op](group) for _ in range(2)]
            assert works[1].done()  # a look does not change it
            assert [await turned(work) for work in works] == [due < 0] * 2


@pytest.mark.parametrize("op", RECEIVES)
async def test_a_receive_that_is_done_cannot_lose_its_message(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the loop no turn, because the program could be cancelled in that turn."""
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", -1.0)
    async with aiodist.local(1) as (group,):
        await group.send(0, 0)
        await group.all_reduce(1)
        work = RECEIVES[op](group)
        assert work.done() and not await turned(work)


async def test_a_done_call_can_be_waited_for_without_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", -1.0)
    async with aiodist.local(1) as (group,):
        await group.barrier()
        assert await group.all_reduce(1).wait(timeout=0) == 1


async def test_a_task_that_makes_one_call_after_the_other_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", -1.0)
    async with aiodist.local(1) as (group,):
        calls = 0

        async def train() -> None:
            nonlocal calls
            while calls < 1000:
                calls += await group.all_reduce(1)

        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert calls < 10


async def test_a_forgotten_await_is_told_while_the_loop_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", -1.0)
    async with aiodist.local(1) as (group,):
        await group.barrier()
        with pytest.warns(RuntimeWarning, match="the Work of barrier was dropped"):
            group.barrier()
        kept = group.barrier()
        with pytest.warns(RuntimeWarning, match="the Work of barrier is done while the group clos"):
            await group.close()
        await kept


ITERATORS: dict[str, Callable[[Group], Any]] = {
    "messages": lambda group: group.messages(),
    "views": lambda group: group.views(),
}


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("end", ["closed", "aborted", "removed"])
async def test_an_iterator_ends_in_silence_only_if_the_program_has_closed_the_group(
    name: str, end: str
) -> None:
    async with aiodist.local(1) as (group,):
        coming = ITERATORS[name](group)
        await group.send("first", 0)
        await anext(coming)
        following = asyncio.create_task(anext(coming, "the end"))
        await asyncio.sleep(0)
        if end == "closed":
            await group.close()
            assert await following == "the end"
        else:
            if end == "aborted":
                group.abort("enough")
            else:
                group._actor._evicted("no sign of life")
            why = "enough" if end == "aborted" else "no sign of life"
            with pytest.raises(aiodist.GroupClosedError, match=why):
                await following
