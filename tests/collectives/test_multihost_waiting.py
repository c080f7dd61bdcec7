"""Prepared collectives of groups that span hosts, which wait without an operation."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
from over_links import nothing_is_left, until

import aiodist
from aiodist.engine import waiting_calls
from aiodist.engine.calls import Calls
from aiodist.prepared.multihost_waiting import MultihostCall
from aiodist.transports.copies import Copies

pytestmark = [pytest.mark.strength(2), pytest.mark.usefixtures("no_turn_is_due")]

HUB, MATE, LEADER, SPEAKER = range(4)
"""The ranks of ``aabb``: by way of whom all words go, who shares its host; who hears of them on the
other host, and who has told the hub of both there."""

CALLS = {
    "broadcast": lambda group, x: group.broadcast(x, 0),
    "all_gather": lambda group, x: group.all_gather(x, out=np.zeros((group.size, *x.shape))),
    "all_reduce": lambda group, x: group.all_reduce(x),
    "barrier": lambda group, x: group.barrier(),
}


def start(ranks, order, name="broadcast", length=5, **options):
    """The Works of all that are called in this `order`, and their arrays, both by rank."""
    places = {rank: np.full(length, rank + 1.0) for rank in order}
    if options:
        works = {rank: ranks[rank].broadcast(places[rank], 0, **options) for rank in order}
    else:
        works = {rank: CALLS[name](ranks[rank], places[rank]) for rank in order}
    return works, places


async def learn(ranks, name="broadcast", length=5):
    for _ in range(3):
        works, _ = start(ranks, range(len(ranks)), name, length)
        await asyncio.gather(*works.values())


def waiting(group):
    """The call of a rank, which waits, and is no operation."""
    calls = group._context.calls
    assert not calls.ops
    (call,) = calls.waiting.by_key.values()
    assert isinstance(call, MultihostCall)
    assert calls.pending == [call.work]
    return call


@asynccontextmanager
async def late(on_hosts, rank):
    """Four ranks, of which all but one have called a broadcast; their Works and arrays."""
    async with on_hosts("aabb") as ranks:
        await learn(ranks)
        yield ranks, *start(ranks, [each for each in range(4) if each != rank])


async def all_have_it(ranks, works, places, rank):
    """The last `rank` calls, and all have the value of rank 0."""
    more, others = start(ranks, [rank])
    await asyncio.gather(*works.values(), *more.values())
    assert all((place == 1).all() for place in (places | others).values())
    nothing_is_left(ranks)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["aabb", "abbb", "aabbbc", "aabbccdd"])
async def test_nobody_makes_an_operation(on_hosts, monkeypatch, name, layout):
    """Whoever comes last."""

    def refused(*_, **__):
        raise AssertionError("an operation")

    async with on_hosts(layout) as ranks:
        await learn(ranks, name)
        monkeypatch.setattr(Calls, "take_over", refused)
        size = len(ranks)
        for last in range(size):
            order = [*range(last + 1, size), *range(last + 1)]
            works, places = start(ranks, order, name)
            assert any(not work.done() for work in works.values())
            results = await asyncio.gather(*[works[rank] for rank in range(size)])
            if name in ("broadcast", "all_reduce"):
                total = 1 if name == "broadcast" else size * (size + 1) / 2
                assert all((place == total).all() for place in places.values())
            elif name == "all_gather":
                assert all((result[:, 0] == range(1, size + 1)).all() for result in results)
            nothing_is_left(ranks)
        monkeypatch.undo()


@pytest.mark.parametrize("rank", range(4))
async def test_who_is_asked_becomes_an_operation_and_goes_on(on_hosts, rank):
    for other in {HUB, MATE, LEADER, SPEAKER} - {rank}:
        async with late(on_hosts, other) as (ranks, works, places):
            calls = ranks[rank]._context.calls
            key = waiting(ranks[rank]).key
            operation = calls.find(key)  # as a question has it found
            assert calls.ops[key] is operation
            assert not (calls.waiting.by_key or calls.waiting.takers)
            await all_have_it(ranks, works, places, other)


@pytest.mark.parametrize("rank", [MATE, LEADER, SPEAKER])
async def test_cancelled_while_it_waits(on_hosts, rank):
    async with late(on_hosts, HUB) as (ranks, works, places):
        waiting(ranks[rank])
        assert works[rank].cancel()
        works |= start(ranks, [HUB])[0]
        await asyncio.wait(works.values())
        for each, work in works.items():
            if each != rank and (error := work.exception()) is not None:
                assert isinstance(error, aiodist.CollectiveAbortedError)
                assert error.rank == rank
        assert (places[rank] == rank + 1).all()
        works, places = start(ranks, range(4))
        await asyncio.gather(*works.values())
        nothing_is_left(ranks)


@pytest.mark.parametrize("lost", [HUB, LEADER, SPEAKER])
async def test_a_rank_is_lost_while_others_wait(on_hosts, lost):
    async with late(on_hosts, lost) as (ranks, works, _):
        for rank in works:
            waiting(ranks[rank])
        ranks[lost].abort("enough")
        for work in works.values():
            with pytest.raises(aiodist.PeerLostError) as caught:
                await work
            assert lost in caught.value.ranks


@pytest.mark.parametrize("odd", [HUB, LEADER, SPEAKER])
async def test_another_call_on_one_rank(on_hosts, odd):
    async with late(on_hosts, odd) as (ranks, works, _):
        for rank in works:
            waiting(ranks[rank])
        works[odd] = ranks[odd].all_gather(1)
        await asyncio.wait(works.values())
        errors = [work.exception() for work in works.values()]
        assert all(errors)
        assert any(isinstance(error, aiodist.MismatchError) for error in errors)
        works, _ = start(ranks, range(4))
        await asyncio.gather(*works.values())


async def test_it_becomes_an_operation_while_its_frame_comes(on_hosts):
    """What has come stays where it is, and the rest goes there, too."""
    async with late(on_hosts, HUB) as (ranks, works, _):
        call = waiting(ranks[LEADER])
        (view,) = call._executor.phase.memory.outgoing(
            call._executor.phase.prepared.receives[HUB][0].spans
        )
        words = bytes(view)  # of the last call but one, which are the same but for the data
        landing = call.message(HUB, 0, call.call, len(words))
        assert call.message(HUB, 0, call.call, len(words)) is None  # there is one of it
        landing.memory[:5] = words[:5]
        operation = ranks[LEADER]._context.calls.find(call.key)
        assert not operation.done
        assert operation.heard == {HUB}
        landing.memory[5:] = words[5:]
        landing.landed()
        await works[LEADER]
        for work in works.values():
            work.cancel()


async def test_nothing_is_written_once_it_is_cancelled(on_hosts):
    async with late(on_hosts, HUB) as (ranks, works, _):
        call = waiting(ranks[LEADER])
        memory = call._executor.phase.memory
        size = len(memory.due(call._executor.phase.prepared.receives[HUB][0].spans))
        landing = call.message(HUB, 0, call.call, size)
        assert works[LEADER].cancel()
        assert landing.memory is None
        for work in works.values():
            work.cancel()


@pytest.mark.parametrize("wrong", ["rank", "slot", "call", "size"])
async def test_another_frame_is_for_the_operation(on_hosts, wrong):
    async with late(on_hosts, HUB) as (ranks, works, places):
        call = waiting(ranks[LEADER])
        memory = call._executor.phase.memory
        size = len(memory.due(call._executor.phase.prepared.receives[HUB][0].spans))
        frame = {"rank": HUB, "slot": 0, "call": call.call, "size": size}
        frame[wrong] = {"rank": SPEAKER, "slot": 1, "call": b"barrier()", "size": 8}[wrong]
        assert call.message(*frame.values()) is None
        await all_have_it(ranks, works, places, HUB)


async def test_a_frame_that_was_taken_is_not_taken_again(on_hosts):
    async with on_hosts("aabbcc") as ranks:
        await learn(ranks)
        works, places = start(ranks, [HUB, MATE, LEADER, SPEAKER])
        call = waiting(ranks[HUB])
        await until(lambda: SPEAKER in call._taken())
        memory = call._executor.phase.memory
        size = len(memory.due(call._executor.phase.prepared.receives[SPEAKER][0].spans))
        assert call.message(SPEAKER, 0, call.call, size) is None
        more, others = start(ranks, [4, 5])
        await asyncio.gather(*works.values(), *more.values())
        assert all((place == 1).all() for place in (places | others).values())
        nothing_is_left(ranks)


async def test_frames_that_came_before_are_taken(on_hosts):
    """The hub calls when the words of the other host are there, and its mate has not called."""
    async with on_hosts("aabbcc") as ranks:
        await learn(ranks)
        works, places = start(ranks, [2, 3, 4, 5])
        await until(lambda: ranks[HUB]._context.calls.arrivals.early)
        more, others = start(ranks, [HUB])
        waiting(ranks[HUB])
        last, place = start(ranks, [MATE])
        await asyncio.gather(*works.values(), *more.values(), *last.values())
        assert all((each == 1).all() for each in (places | others | place).values())
        nothing_is_left(ranks)


async def test_who_waits_for_long_has_a_deadline(on_hosts, monkeypatch):
    monkeypatch.setattr(waiting_calls, "LONG", 0.01)
    async with on_hosts("aabb") as ranks:
        await learn(ranks)
        works, _ = start(ranks, [MATE, LEADER, SPEAKER], timeout=0.5)
        calls = ranks[LEADER]._context.calls
        waiting(ranks[LEADER])
        await until(lambda: calls.ops)
        assert not calls.waiting.takers
        await asyncio.wait(works.values())
        assert any(
            isinstance(work.exception(), aiodist.CollectiveTimeoutError) for work in works.values()
        )


async def test_without_a_deadline_it_waits_as_well(on_hosts):
    async with on_hosts("aabb") as ranks:
        await learn(ranks)
        works, places = start(ranks, [MATE, LEADER, SPEAKER], timeout=math.inf)
        waiting(ranks[SPEAKER])
        await all_have_it(ranks, works, places, HUB)


async def test_what_goes_to_several_hosts_is_copied_once_at_most(on_hosts, monkeypatch):
    length = 20_000
    async with on_hosts("aabbccdd") as ranks:
        await learn(ranks, length=length)
        copied = []
        real = Copies._copy
        monkeypatch.setattr(
            Copies, "_copy", lambda self, *args: copied.append(args) or real(self, *args)
        )
        joined = []
        link = type(ranks[HUB]._context.link(2))
        send = link.send_copy
        monkeypatch.setattr(
            link,
            "send_copy",
            lambda self, *args: joined.append(args[1].nbytes) or send(self, *args),
        )
        works, places = start(ranks, range(8), length=length)
        await asyncio.gather(*works.values())
        assert all((place == 1).all() for place in places.values())
        assert len(copied) <= 1
        assert max(joined, default=0) < 8 * length


async def test_one_mebibyte_goes_with_the_words(on_hosts, monkeypatch):
    async with on_hosts("aabb") as ranks:
        length = (1 << 20) // 8
        await learn(ranks, length=length)
        works, places = start(ranks, range(4), length=length)
        await asyncio.gather(*works.values())
        assert all((place == 1).all() for place in places.values())
        last = [group._context.express._recipes for group in ranks]
        assert all(not recipe._own.is_apart for known in last for recipe in known.values())
        nothing_is_left(ranks)
