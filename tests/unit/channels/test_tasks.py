"""Jobs beside a loop, one at a time."""

from __future__ import annotations

import asyncio

import pytest

from aiodist.channels.tasks import ChannelTasks, OneBeside


async def test_jobs_run_one_after_the_other_beside_the_caller() -> None:
    said: list[str] = []
    may = asyncio.Event()

    async def job(number: int) -> None:
        said.append(f"begins {number}")
        await may.wait()
        said.append(f"ends {number}")

    async with OneBeside() as beside:
        await beside.begin(job(1))  # does not wait for it
        said.append("goes on")
        may.set()
        await beside.begin(job(2))
    assert said == ["goes on", "begins 1", "ends 1", "begins 2", "ends 2"]


async def failing() -> None:
    raise ValueError("damaged")


async def test_the_error_of_a_job_is_raised_once_the_next_one_begins() -> None:
    with pytest.raises(ValueError, match="damaged"):
        async with OneBeside() as beside:
            await beside.begin(failing())
            await beside.begin(asyncio.sleep(0))
            raise AssertionError("the second job has begun")


async def test_the_error_of_the_last_job_is_raised_at_the_end() -> None:
    with pytest.raises(ValueError, match="damaged"):
        async with OneBeside() as beside:
            await beside.begin(failing())


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_job_has_ended_when_the_caller_has_failed(cancels: bool) -> None:
    ended = asyncio.Event()
    may = asyncio.Event()

    async def job() -> None:
        try:
            await may.wait()
            raise ValueError("the error of the caller counts")
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def work() -> None:
        async with OneBeside() as beside:
            await beside.begin(job())
            await asyncio.sleep(0)
            if not cancels:
                may.set()
                raise KeyError
            await beside.begin(job())

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if cancels:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancels else KeyError):
        await task
    assert ended.is_set()


async def test_a_participant_is_not_for_other_event_loops() -> None:
    tasks = ChannelTasks("policy")
    with pytest.raises(RuntimeError, match="enter the channel 'policy' by `async with` first"):
        tasks.check()
    tasks.begin()
    tasks.check()
    with pytest.raises(RuntimeError, match="'policy' belongs to the event loop that entered it"):
        await asyncio.to_thread(tasks.check)
