"""Groups that are made of others: what the parent keeps of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aiodist


async def test_a_parent_keeps_nothing_of_its_splits() -> None:
    async with aiodist.local(1) as (group,):
        ids = set()
        for color in (0, 0, "a", "a"):
            part = await group.split(color)
            assert part is not None
            ids.add(part._context.id)
            await part.close()
        assert len(ids) == 4
        assert not group._context.derived
        for _ in range(2):
            await (await group.dup()).close()
        assert list(group._context.derived.values()) == [2]


CALLS: dict[str, Callable[[aiodist.Group, float | None], Any]] = {
    "split": lambda group, timeout: group.split(1, timeout=timeout),
    "dup": lambda group, timeout: group.dup(timeout=timeout),
    "subgroup": lambda group, timeout: group.subgroup([0, 1], timeout=timeout),
}


@pytest.mark.parametrize("call", CALLS)
async def test_errors_show_no_tag_of_ours(call: str) -> None:
    async with aiodist.local(2) as groups:
        with pytest.raises(aiodist.CollectiveTimeoutError) as late:
            await CALLS[call](groups[0], 0.05)
        with pytest.raises(aiodist.CollectiveTimeoutError) as told:
            await CALLS[call](groups[1], None)
        for error in (late.value, told.value):
            assert (error.op, error.tag, error.seq) == (call, None, None)
            assert "#" not in str(error)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("victim", range(4))
async def test_a_split_is_cancelled_at_any_turn(transport: str, victim: int) -> None:
    """Other ranks may be in the first collective of the split then, in the second one, or wait for
    their part."""

    async def split(group: aiodist.Group, turns: int) -> Any:
        work = group.split(group.rank % 2)
        if group.rank == victim:
            for _ in range(turns):
                await asyncio.sleep(0)
            work.cancel()
        return (await asyncio.gather(work, return_exceptions=True))[0]

    async with aiodist.local(4, transports=(transport,), op_timeout=30.0) as groups:
        is_cancelled, turns = True, 0
        while is_cancelled:
            made = await asyncio.gather(*[split(group, turns) for group in groups])
            is_cancelled, turns = isinstance(made[victim], asyncio.CancelledError), turns + 1
            for rank, part in enumerate(made):
                if isinstance(part, aiodist.CollectiveAbortedError):
                    if rank % 2 == victim % 2 or part.rank == victim:
                        assert part.rank == victim
                    else:  # the other rank of its part has heard of it
                        assert part.rank == (rank + 2) % 4
                        assert f"rank {victim} gave up the operation" in part.reason
                elif rank != victim or not is_cancelled:
                    assert isinstance(part, aiodist.Group)
            for parity in (0, 1):
                parts = made[parity::2]
                if all(isinstance(part, aiodist.Group) for part in parts):
                    assert (
                        await asyncio.gather(*[part.all_gather(1) for part in parts])
                        == [[1, 1]] * 2
                    )
            for part in made:
                if isinstance(part, aiodist.Group):
                    part.abort("the test is over")
            sums = await asyncio.gather(*[group.all_reduce(group.rank) for group in groups])
            assert sums == [6] * 4
        assert turns > 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_a_rank_leaves_at_any_turn_of_a_split(transport: str) -> None:
    async def split(group: aiodist.Group, turns: int) -> Any:
        work = group.split(group.rank % 2)
        if group.rank == 1:
            for _ in range(turns):
                await asyncio.sleep(0)
            group.abort("enough")
        return (await asyncio.gather(work, return_exceptions=True))[0]

    for turns in range(24):
        async with aiodist.local(5, transports=(transport,), op_timeout=30.0) as groups:
            made = await asyncio.gather(*[split(group, turns) for group in groups])
            for rank in (0, 2, 3, 4):
                part = made[rank]
                if not isinstance(part, aiodist.Group):
                    assert isinstance(part, aiodist.PeerLostError)
                    assert part.ranks == (1,)


async def declined(error: aiodist.AiodistError) -> Any:
    """Return what rank 1 gets from a split of four ranks into 1, 3 and others, if `error` ends the
    second collective on rank 3."""
    async with aiodist.local(4) as groups:
        error.group, error.epoch, error.op = groups[3].name, groups[3].epoch, "split"
        part = "split 1 1", [1, 3]
        waiting = asyncio.ensure_future(groups[1]._derive(*part, 30.0))
        await asyncio.sleep(0)
        text = str(error)
        groups[3]._decline(part, error)
        assert str(error) == text
        return (await asyncio.gather(waiting, return_exceptions=True))[0]


async def test_a_part_hears_which_rank_gave_up() -> None:
    text = "rank 1 gave up the operation: tired"
    inside = aiodist.CollectiveAbortedError(text, rank=1, reason="tired")
    heard = await declined(inside)
    assert (heard.rank, heard.reason, heard.message) == (1, "tired", text)


async def test_a_part_hears_that_a_rank_outside_gave_up() -> None:
    outside = aiodist.CollectiveAbortedError("rank 0 gave up: tired", rank=0, reason="tired")
    heard = await declined(outside)
    assert isinstance(heard, aiodist.CollectiveAbortedError)
    assert (heard.rank, heard.reason) == (3, "CollectiveAbortedError: rank 0 gave up: tired")
    assert heard.message == f"rank 3 gave up the operation: {heard.reason}"


async def test_a_part_hears_of_a_deadline() -> None:
    text = "not entered within 1 s by rank 0 (in barrier #0), rank 1 (no answer)"
    late = aiodist.CollectiveTimeoutError(text, missing=[0, 1], last_seen={0: "in barrier #0"})
    heard = await declined(late)
    assert isinstance(heard, aiodist.CollectiveTimeoutError)
    assert (heard.missing, heard.last_seen) == ((0, 1), {0: "in barrier #0"})
    assert heard.message == f"rank 3 gave up: {text}"
    assert text in repr(heard)  # which pytest and logs show


async def test_a_part_hears_of_a_lost_rank_outside() -> None:
    text = "rank 0 is lost: it has died; rank 2 is lost: it has died"
    heard = await declined(aiodist.PeerLostError(text, ranks=[0, 2]))
    assert isinstance(heard, aiodist.PeerLostError)
    assert (heard.ranks, heard.message) == ((0, 2), text)
