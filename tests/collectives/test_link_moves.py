"""Broadcasts over sockets that wait for their data without an operation."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack, asynccontextmanager

import numpy as np
import pytest
from over_links import OVER_SOCKETS, nothing_is_left, ordinary, until

import aiodist
from aiodist.prepared.link_moves import MovingCall
from aiodist.transports.framed import FramedLink
from aiodist.transports.stream import StreamLink

pytestmark = OVER_SOCKETS

LENGTH = 60_000
"""Elements that do not go with the words, and fit in one frame."""
ROOT, HUB, LEAF = 1, 0, 2
"""Who gives the data; by whom words go, who has all of them within its call when it comes last; and
somebody else, to whom that one passes the data on."""


@pytest.fixture
def moving(monkeypatch):
    """The calls that were done or have waited as what they are."""
    seen = []
    real = MovingCall.begin

    def noted(self):
        done = real(self)
        if done or self.waits:
            seen.append(self)
        return done

    monkeypatch.setattr(MovingCall, "begin", noted)
    return seen


def arrays(ranks, root):
    return [np.arange(LENGTH) * 1.0 if g.rank == root else np.zeros(LENGTH) for g in ranks]


def called(ranks, order, root=ROOT):
    """The Works of all, called in this `order`, and their arrays, both by rank."""
    places = arrays(ranks, root)
    works = {rank: ranks[rank].broadcast(places[rank], root) for rank in order}
    return [works[rank] for rank in range(len(ranks))], places


async def learn(ranks, root=ROOT):
    for _ in range(3):
        works, _ = called(ranks, range(len(ranks)), root)
        await asyncio.gather(*works)


async def all_have_it(works, places):
    for work, place in zip(works, places, strict=True):
        assert await work is place
        assert (place == np.arange(LENGTH)).all()


async def done_or_aborted(works, by):
    """All others are done, with what they had, or hear that the rank `by` has given it up."""
    await asyncio.wait(works)
    assert works[by].cancelled()
    for rank, work in enumerate(works):
        if rank != by and (error := work.exception()) is not None:
            assert isinstance(error, aiodist.CollectiveAbortedError)
            assert error.rank == by


def waiting(ranks):
    """The call of the hub, which waits for the data, and is no operation."""
    calls = ranks[HUB]._context.calls
    assert not calls.ops
    (call,) = calls.waiting.by_key.values()
    assert call.waits
    assert calls.pending == [call.work]
    return call


@asynccontextmanager
async def one_waits(groups):
    """Three ranks, of which the hub waits for the data: they, their Works, their arrays, and that
    call."""
    async with groups(3) as ranks:
        await learn(ranks)
        works, places = called(ranks, [ROOT, LEAF, HUB])
        yield ranks, works, places, waiting(ranks)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("root", [0, 1])
async def test_it_gives_what_the_ordinary_way_gives(groups, moving, size, root):
    """Another rank is late each time, and some go the ordinary way."""
    async with groups(size) as ranks:
        await learn(ranks, root)
        for first in range(size):
            with ordinary(ranks[(first + 1) % size]) if first % 2 else ExitStack():
                await all_have_it(*called(ranks, [*range(first, size), *range(first)], root))
        assert moving
        nothing_is_left(ranks)


async def test_it_waits_and_is_no_operation(groups, moving):
    async with one_waits(groups) as (ranks, works, places, call):
        assert moving == [call]
        await all_have_it(works, places)
        assert call._operation is None
        nothing_is_left(ranks)


async def test_the_next_call_does_not_disturb_it(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        works, places = called(ranks, [ROOT, LEAF, HUB])
        waiting(ranks)
        more, others = called(ranks, [ROOT, LEAF, HUB])
        sums = [group.all_reduce(1) for group in ranks]
        await all_have_it(more, others)
        await all_have_it(works, places)
        assert await asyncio.gather(*sums) == [3] * 3
        nothing_is_left(ranks)


async def test_cancelled_while_it_waits(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        works, places = called(ranks, [ROOT, LEAF, HUB])
        waiting(ranks)
        assert works[HUB].cancel()
        await done_or_aborted(works, HUB)
        assert not places[HUB].any()
        await all_have_it(*called(ranks, [ROOT, LEAF, HUB]))
        nothing_is_left(ranks)


async def test_given_up_by_the_root_while_it_waits(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        works, _ = called(ranks, [ROOT, LEAF, HUB])
        waiting(ranks)
        assert works[ROOT].cancel()
        for rank in (HUB, LEAF):
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                await works[rank]
            assert caught.value.rank == ROOT
        await all_have_it(*called(ranks, [ROOT, LEAF, HUB]))
        nothing_is_left(ranks)


async def test_the_root_is_lost_while_it_waits(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        works, _ = called(ranks, [ROOT, LEAF, HUB])
        waiting(ranks)
        context = ranks[HUB]._context
        context.endpoint.lose(context.calls.party.ranks[ROOT], "a test")
        with pytest.raises(aiodist.PeerLostError) as caught:
            await works[HUB]
        assert ROOT in caught.value.ranks
        await asyncio.wait(works)
        for work in works:
            work.exception()


async def test_who_asks_gets_an_answer_and_it_goes_on(groups):
    async with one_waits(groups) as (ranks, works, places, call):
        context = ranks[HUB]._context
        operation = context.calls.find(call.key)  # as a question has it found
        assert context.calls.ops[call.key] is operation
        assert not (context.calls.waiting.by_key or context.calls.waiting.takers)
        assert operation.heard == {ROOT, LEAF}
        await all_have_it(works, places)
        nothing_is_left(ranks)


async def test_it_becomes_an_operation_while_the_data_comes(groups):
    """What has come stays where it is, and the rest goes there, too."""
    async with one_waits(groups) as (ranks, works, places, call):
        data = (np.arange(LENGTH) * 1.0).view(np.uint8).data
        landing = call.message(ROOT, 1, call.call, len(data))
        assert call.message(ROOT, 1, call.call, len(data)) is None  # there is one of it
        landing.memory[:1000] = data[:1000]
        operation = ranks[HUB]._context.calls.find(call.key)
        assert not operation.done
        landing.memory[1000:] = data[1000:]
        landing.landed()
        await all_have_it(works, places)
        nothing_is_left(ranks)


async def test_nothing_is_written_once_it_is_cancelled(groups):
    async with one_waits(groups) as (_ranks, works, places, call):
        landing = call.message(ROOT, 1, call.call, len(call._view))
        works[HUB].cancel()
        assert landing.memory is None
        await done_or_aborted(works, HUB)
        assert not places[HUB].any()


@pytest.mark.parametrize("wrong", ["rank", "slot", "call", "size"])
async def test_another_frame_is_for_the_operation(groups, wrong):
    async with one_waits(groups) as (_ranks, works, places, call):
        frame = {"rank": ROOT, "slot": 1, "call": call.call, "size": len(call._view)}
        frame[wrong] = {"rank": LEAF, "slot": 0, "call": b"barrier()", "size": 8}[wrong]
        assert call.message(*frame.values()) is None
        await all_have_it(works, places)


@pytest.fixture
def full(monkeypatch):
    """Sockets that take nothing large at once: the loop writes it."""
    real = StreamLink._write_frame

    def none(self, head, payload, nbytes):
        if nbytes > 100_000:
            raise BlockingIOError
        return real(self, head, payload, nbytes)

    monkeypatch.setattr(StreamLink, "_write_frame", none)


async def test_the_root_waits_until_all_has_left(groups, full):
    async with groups(3) as ranks:
        await learn(ranks, HUB)
        works, places = called(ranks, [ROOT, LEAF, HUB], HUB)
        waiting(ranks)
        await all_have_it(works, places)
        nothing_is_left(ranks)


async def test_the_root_is_an_operation_until_all_has_left(groups, full):
    async with groups(3) as ranks:
        await learn(ranks, HUB)
        works, places = called(ranks, [ROOT, LEAF, HUB], HUB)
        context = ranks[HUB]._context
        operation = context.calls.find(waiting(ranks).key)
        assert not operation.done
        assert [operation.needs(rank) for rank in (ROOT, LEAF)] == [True, True]
        await all_have_it(works, places)
        assert operation.done
        nothing_is_left(ranks)


async def test_the_root_gives_up_what_has_not_left(groups, full):
    async with groups(3) as ranks:
        await learn(ranks, HUB)
        works, places = called(ranks, [ROOT, LEAF, HUB], HUB)
        waiting(ranks)
        works[HUB].cancel()
        places[HUB][:] = -1  # it is the user's again
        await asyncio.wait(works)
        for rank in (ROOT, LEAF):
            assert isinstance(works[rank].exception(), aiodist.CollectiveAbortedError)
            assert not (places[rank] == -1).any()
        await all_have_it(*called(ranks, [ROOT, LEAF, HUB], HUB))


async def test_without_a_deadline_it_waits_as_well(groups):
    async with groups(2) as ranks:
        await learn(ranks, 0)
        place = np.zeros(LENGTH)
        late = ranks[1].broadcast(place, 0, timeout=math.inf)
        await until(lambda: ranks[0]._context.calls.arrivals.early)
        first = ranks[0].broadcast(np.arange(LENGTH) * 1.0, 0, timeout=math.inf)
        await asyncio.gather(first, late)
        assert (place == np.arange(LENGTH)).all()
        nothing_is_left(ranks)


def said_nothing(ranks, rank):
    """The call of `rank`, which waits for the last words."""
    (call,) = ranks[rank]._context.calls.waiting.by_key.values()
    assert not call.waits
    return call


@pytest.mark.parametrize("rank", [ROOT, LEAF])
async def test_who_waits_for_words_becomes_an_operation(groups, rank):
    async with groups(3) as ranks:
        await learn(ranks)
        places = arrays(ranks, ROOT)
        works = {each: ranks[each].broadcast(places[each], ROOT) for each in (ROOT, LEAF)}
        operation = ranks[rank]._context.calls.find(said_nothing(ranks, rank).key)
        assert not operation.done
        works[HUB] = ranks[HUB].broadcast(places[HUB], ROOT)
        await all_have_it([works[each] for each in range(3)], places)
        nothing_is_left(ranks)


async def test_it_becomes_an_operation_while_the_words_come(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        place = np.zeros(LENGTH)
        work = ranks[LEAF].broadcast(place, ROOT)
        call = said_nothing(ranks, LEAF)
        view = call._words.view
        words = bytes(view)  # those of the last call, which are the same
        view[:] = bytes(len(view))
        landing = call.message(HUB, 0, call.call, len(words))
        assert call.message(HUB, 0, call.call, len(words)) is None  # there is one of it
        landing.memory[:5] = words[:5]
        operation = ranks[LEAF]._context.calls.find(call.key)
        landing.memory[5:] = words[5:]
        landing.landed()
        assert operation.waiting_for == ROOT  # for the data
        assert work.cancel()
        assert operation.done


async def test_other_words_than_the_last_ones_are_for_the_operation(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        work = ranks[LEAF].broadcast(np.zeros(LENGTH), ROOT)
        call = said_nothing(ranks, LEAF)
        view = call._words.view
        landing = call.message(HUB, 0, call.call, len(view))
        view[:] = bytes(len(view))
        landing.landed()
        assert not ranks[LEAF]._context.calls.waiting.takers
        with pytest.raises(aiodist.ProtocolError, match="a frame of blobs"):
            await work


async def test_data_that_comes_before_the_words_waits_for_them(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        place = np.zeros(LENGTH)
        work = ranks[LEAF].broadcast(place, ROOT)
        call = said_nothing(ranks, LEAF)
        words, data = bytes(call._words.view), (np.arange(LENGTH) * 1.0).view(np.uint8).data
        landing = call.message(ROOT, 0, call.call, len(data))
        landing.memory[:] = data
        landing.landed()
        assert not work.done()
        landing = call.message(HUB, 0, call.call, len(words))
        landing.memory[:] = words
        landing.landed()
        assert work.result() is place


async def test_data_that_came_before_the_words_is_handed_over(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        place = np.zeros(LENGTH)
        work = ranks[LEAF].broadcast(place, ROOT)
        call = said_nothing(ranks, LEAF)
        words, data = bytes(call._words.view), (np.arange(LENGTH) * 1.0).view(np.uint8).data
        landing = call.message(ROOT, 0, call.call, len(data))
        landing.memory[:] = data
        landing.landed()
        operation = ranks[LEAF]._context.calls.find(call.key)
        assert not work.done()
        landing = operation.message(HUB, 0, len(words))
        landing.memory[:] = words
        landing.landed()
        assert work.result() is place
        assert (place == np.arange(LENGTH)).all()


async def test_cancelled_while_it_waits_for_words(groups):
    async with groups(3) as ranks:
        await learn(ranks)
        places = arrays(ranks, ROOT)
        works = {each: ranks[each].broadcast(places[each], ROOT) for each in (ROOT, LEAF)}
        said_nothing(ranks, LEAF)
        assert works[LEAF].cancel()
        works[HUB] = ranks[HUB].broadcast(places[HUB], ROOT)
        await done_or_aborted([works[each] for each in range(3)], LEAF)
        assert not places[LEAF].any()
        await all_have_it(*called(ranks, [ROOT, LEAF, HUB]))
        nothing_is_left(ranks)


async def test_words_that_make_no_sense(groups, monkeypatch):
    """They end the call of each rank. None waits for ever."""
    real = FramedLink.send_copy
    bad = set()

    def send_copy(link, prefix, payload, made=None):
        if link in bad and len(payload) >= 60:  # several blobs: the first one seems to be longer
            payload, made = memoryview((1 << 20).to_bytes(4, "big") + bytes(payload[4:])), None
        return real(link, prefix, payload, made)

    monkeypatch.setattr(FramedLink, "send_copy", send_copy)
    async with groups(5) as ranks:
        for _ in range(2):
            await learn(ranks)
        bad |= {ranks[HUB]._context.link(peer) for peer in range(1, 5)}
        works, _ = called(ranks, [1, 2, 3, 4, HUB])
        await asyncio.wait(works)
        assert any(isinstance(work.exception(), aiodist.ProtocolError) for work in works)
        assert not any(group._context.calls.waiting.takers for group in ranks)
        for group in ranks:
            group.abort("the test is over")
