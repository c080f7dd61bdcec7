"""Bugs that people make, planted: `explore` finds each, and tells its story in few lines.

docs/simulating.md shows these programs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.testing import FoundError, explore


async def deadlock(group: aiodist.Group) -> None:
    lock = asyncio.Lock()

    async def serve(client: int) -> None:
        await group.recv(src=client)
        async with lock:  # one request at a time
            await group.all_reduce(1, tag=client)

    async def ask() -> None:
        await asyncio.sleep(0.005 * group.rank)
        for rank in range(group.size):
            await group.send("request", rank)

    if group.rank < 2:
        await asyncio.gather(ask(), serve(0), serve(1))
    else:
        await asyncio.gather(serve(0), serve(1))


async def race(group: aiodist.Group) -> None:
    async def serve(client: int) -> None:
        request = await group.recv(src=client)
        total = await group.all_reduce(request)
        assert total == request * group.size

    async def ask() -> None:
        await asyncio.sleep(0.005 * group.rank)
        for rank in range(group.size):
            await group.send(10**group.rank, rank)

    if group.rank < 2:
        await asyncio.gather(ask(), serve(0), serve(1))
    else:
        await asyncio.gather(serve(0), serve(1))


async def forgotten_await(group: aiodist.Group) -> None:
    try:
        await group.all_reduce(1, timeout=5.0)
    except aiodist.CollectiveTimeoutError:
        group.barrier()  # meet again after the slow step


async def missing_deadline(group: aiodist.Group) -> Any:
    if group.rank == 0:
        await asyncio.sleep(1.0)  # prepare the job
        await group.send("job", 1)
        return await group.recv(src=1)
    if group.rank == 1:
        try:
            await group.recv(src=0, timeout=5.0)
            await group.send("result", 0)
        except aiodist.CollectiveTimeoutError:
            await group.recv(src=0, tag="another job")
    return None


async def not_agreed(group: aiodist.Group) -> float | None:
    total = 0.0
    try:
        for _ in range(2):
            try:
                total += await group.all_reduce(1.0)
            except aiodist.GroupBrokenError:
                group = await group.shrink()
        return total
    except aiodist.AiodistError:
        return None  # this rank is out


def agreed(results: dict[int, Any]) -> None:
    assert len(set(results.values()) - {None}) <= 1


async def mixed_versions(group: aiodist.Group) -> None:
    if group.rank == 0:
        async with aiodist.publisher("policy", address=group.address) as out:
            for version in (1, 2):
                await out.publish({"encoder": version, "decoder": version}, version=version)
            await group.barrier()
    else:
        async with aiodist.subscriber("policy", address=group.address) as weights:
            _, tree = await weights.latest()
            encoder = tree["encoder"]
            _, tree = await weights.latest()
            assert encoder == tree["decoder"]
            await group.barrier()


PAGE = Path(__file__).parents[2] / "docs/simulating.md"

Bug = Callable[[aiodist.Group], Awaitable[Any]]

BUGS: dict[Bug, tuple[str, str]] = {
    deadlock: ("", "CollectiveTimeoutError"),
    race: ("", "AssertionError"),
    forgotten_await: ("delay", "the Work of barrier"),
    missing_deadline: ("delay", "never ends"),
    not_agreed: ("kill", "the check of the results"),
    mixed_versions: ("", "AssertionError"),
}
"""The faults under which each is looked for, and what its failure says."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_is_found_and_told_in_ten_lines(bug: Bug) -> None:
    faults, said = BUGS[bug]
    with pytest.raises(FoundError) as found:
        explore(bug, faults=faults, seeds=200, check=agreed)
    assert said in found.value.failure
    assert 0 < len(found.value.events) <= 10
    assert Path(__file__).name in "".join(found.value.events)
    with pytest.raises(FoundError) as again:
        explore(bug, check=agreed, replay=found.value.plan)
    assert again.value.failure == found.value.failure
    assert again.value.plan == found.value.plan
    if bug in (missing_deadline, not_agreed):
        told = _without_lines("\n".join(found.value.events))
        assert told in _without_lines(PAGE.read_text())
    if bug is not_agreed:
        assert str(found.value).splitlines()[-1] in PAGE.read_text().splitlines()


def _without_lines(text: str) -> str:
    """Leave out the numbers of lines, and spaces at the ends of lines."""
    return re.sub(r"\.py:\d+|[ ]+$", "", text, flags=re.MULTILINE)


# The same programs without the bug.


async def tagged(group: aiodist.Group) -> None:
    async def serve(client: int) -> None:
        request = await group.recv(src=client)
        total = await group.all_reduce(request, tag=client)
        assert total == request * group.size

    async def ask() -> None:
        await asyncio.sleep(0.005 * group.rank)
        for rank in range(group.size):
            await group.send(10**group.rank, rank)

    if group.rank < 2:
        await asyncio.gather(ask(), serve(0), serve(1))
    else:
        await asyncio.gather(serve(0), serve(1))


async def in_step(group: aiodist.Group) -> float | None:
    step, total = 0, 0.0
    try:
        while step < 2:
            try:
                found = await group.all_reduce(1.0)
                if await group.agree(True):
                    step, total = step + 1, total + found
            except aiodist.GroupBrokenError:
                group = await group.shrink()
        return total
    except aiodist.AiodistError:
        return None  # this rank is out


async def one_version(group: aiodist.Group) -> None:
    if group.rank == 0:
        async with aiodist.publisher("policy", address=group.address) as out:
            for version in (1, 2):
                await out.publish({"encoder": version, "decoder": version}, version=version)
            await group.barrier()
    else:
        async with aiodist.subscriber("policy", address=group.address) as weights:
            _, tree = await weights.latest()
            assert tree["encoder"] == tree["decoder"]
            await group.barrier()


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "faults"), [(tagged, ""), (in_step, "kill"), (one_version, "")]
)
def test_without_the_bug_nothing_is_found(program: Bug, faults: str) -> None:
    assert explore(program, faults=faults, seeds=8, check=agreed).seeds == 8
