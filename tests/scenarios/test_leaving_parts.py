"""A rank leaves a group that was made of another. Ranks without a link to it hear of it, too."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from over_links import until

import aiodist


@asynccontextmanager
async def parts() -> AsyncIterator[list[aiodist.Group]]:
    """A duplicate of a group of three. Its ranks 1 and 2 have no link to each other."""
    async with aiodist.local(3) as groups:
        made = await asyncio.gather(*(group.dup() for group in groups))
        await asyncio.gather(*(part.barrier() for part in made))
        assert made[1]._context.link(2) is None
        yield made
        for part in made:
            part.abort("the test is over")


async def leave(part: aiodist.Group, how: str) -> None:
    if how == "abort":
        part.abort("out of disk")
    else:
        await part.close()


SAID = {"close": "rank 2 is lost: it closed the group", "abort": "rank 2 is lost: .*out of disk"}


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("first", [True, False], ids=["waits first", "waits later"])
@pytest.mark.parametrize("op", ["recv", "probe"])
async def test_what_waits_for_the_rank_that_leaves(how: str, first: bool, op: str) -> None:
    async with parts() as (_, waits, leaves):
        if not first:
            await leave(leaves, how)
        work = waits.irecv(src=2) if op == "recv" else waits.probe(src=2)
        await asyncio.sleep(0)
        if first:
            await leave(leaves, how)
        with pytest.raises(aiodist.PeerLostError, match=SAID[how]):
            await work


async def test_what_waits_for_any_rank_when_one_aborts() -> None:
    async with parts() as (_, waits, leaves):
        work = waits.irecv()
        leaves.abort("out of disk")
        with pytest.raises(aiodist.PeerLostError, match=SAID["abort"]):
            await work


@pytest.mark.parametrize("src", [aiodist.ANY_SOURCE, [0, 2]], ids=["any", "two"])
@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
async def test_what_waits_for_several_ranks_when_all_have_closed(
    order: tuple[int, int], src: aiodist.Src
) -> None:
    async with parts() as made:
        work = made[1].irecv(src=src)
        await made[order[0]].close()
        assert not work.done()
        await made[order[1]].close()
        with pytest.raises(aiodist.PeerLostError, match="no rank is left that could send"):
            await work


async def test_a_collective_when_one_aborts() -> None:
    async with parts() as (_, waits, leaves):
        work = waits.barrier()
        leaves.abort("out of disk")
        with pytest.raises(aiodist.PeerLostError, match=SAID["abort"]):
            await work


async def test_what_a_second_end_says_is_not_told() -> None:
    """A rank that closes a group, and then aborts it, has closed it."""
    async with parts() as (_, waits, leaves):
        work = waits.irecv()
        await leaves.close()
        leaves.abort("out of disk")
        with pytest.raises(aiodist.PeerLostError, match=SAID["close"]):
            await waits.recv(src=2)
        assert not work.done()


async def test_no_link_is_made_for_what_the_coordinator_tells() -> None:
    async with aiodist.local(3) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        context = groups[1]._context
        work = groups[1].irecv(src=2)
        await asyncio.sleep(0)
        assert context.link(2) is None and context.peers[2].dialing is None
        groups[2].abort("out of disk")
        with pytest.raises(aiodist.PeerLostError, match=SAID["abort"]):
            await work


async def test_ranks_that_wait_for_anybody_do_not_all_ask_the_same() -> None:
    async with aiodist.local(4) as groups:
        made = await asyncio.gather(*(group.dup() for group in groups))
        works = [part.irecv() for part in made]
        asked = [part._context.p2p.receiver._asked for part in made]
        assert asked == [{1}, {2}, {3}, {0}]
        for part in made:
            part.abort("the test is over")
        await asyncio.gather(*works, return_exceptions=True)


async def test_any_number_of_groups_may_ask_before_there_is_a_link() -> None:
    async with aiodist.local(3) as groups:
        works = []
        for _ in range(70):
            made = await asyncio.gather(*(group.dup() for group in groups))
            await made[2].close()
            assert made[1]._context.link(2) is None
            works.append(made[1]._context)
        receives = [context.p2p.recv(2) for context in works]
        for work in receives:
            with pytest.raises(aiodist.PeerLostError, match=SAID["close"]):
                await work


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EHOSTUNREACH])
async def test_who_cannot_tell_of_an_abort_stays_in_the_group(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with parts() as (_, other, leaves):
        tried = asyncio.Event()

        async def dial(*_: Any) -> Any:
            tried.set()
            raise OSError(code, "no way") from OSError(code, "no way")

        whole = leaves._actor
        monkeypatch.setattr(whole.endpoint._caller, "_dial", dial)
        leaves.abort("out of disk")
        await tried.wait()
        await asyncio.gather(*(task for task in whole.endpoint._tasks if "dial" in task.get_name()))
        assert whole.context.ended is None and not whole.endpoint.lost
        assert other._actor.context.ended is None


@pytest.mark.parametrize("first", [True, False], ids=["waits first", "waits later"])
@pytest.mark.parametrize("closes", [True, False], ids=["close", "abort"])
async def test_what_waits_for_a_rank_when_there_is_no_coordinator(
    first: bool, closes: bool
) -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0", returns=False) as coordinator:
        address = coordinator.address
        groups = await asyncio.gather(*(aiodist.connect(address, rank=r, size=3) for r in range(3)))
        await asyncio.gather(*(group.barrier() for group in groups))
        assert groups[1]._context.link(2) is None
        works = [groups[1].irecv(src=2)] if first else []
        await coordinator.stop()
        await until(lambda: not groups[1]._actor.control.is_open)
        if closes:
            await groups[2].close()
        else:
            groups[2].abort("out of disk")
        works += [groups[1].irecv(src=2)]
        for work in works:
            with pytest.raises(aiodist.PeerLostError, match="rank 2 is lost"):
                await work
        for group in groups[:2]:
            group.abort("the test is over")
