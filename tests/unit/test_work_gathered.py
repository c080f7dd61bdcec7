"""What docs/guarantees.md tells of `asyncio.gather`: who hears of a cancellation that comes in the
moment of a failure."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiodist
from aiodist.work import Work

Works = list[Work[Any]]


async def raising(works: Works) -> None:
    await asyncio.gather(*works)


async def returning(works: Works) -> None:
    await asyncio.gather(*works, return_exceptions=True)


async def in_task_group(works: Works) -> None:
    async def one(work: Work[Any]) -> None:
        await work

    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(one(work))


@pytest.mark.parametrize(
    ("program", "hears"), [(raising, False), (returning, True), (in_task_group, False)]
)
def test_who_hears_of_the_cancellation(
    run: Any, program: Callable[[Works], Coroutine[Any, Any, None]], hears: bool
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        works: Works = [Work.begin(loop, "recv") for _ in range(2)]
        task = loop.create_task(program(works))
        for _ in range(3):  # turns in which all come to wait
            await asyncio.sleep(0)
        works[0].fail(aiodist.PeerLostError("rank 1 is lost", ranks=[1]))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() is hears
        if not hears:
            assert "rank 1 is lost" in "".join(traceback.format_exception(task.exception()))
        for work in works:
            work.cancel()

    run(main())
