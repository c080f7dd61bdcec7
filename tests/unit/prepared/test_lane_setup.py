"""How ranks come to share memory: all or none, in one order of operations, leaving nothing
behind."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator
from copy import copy

import numpy as np
import pytest
from idle_time import on_idle_time
from sharing import everyone

import aiodist
from aiodist.prepared import lane_setup
from aiodist.rank.doings import RankDoings
from aiodist.wire.activity import ranks_in, unpacked

SHM = {"transports": ("shm",), "op_timeout": 30.0}


def lanes(ranks):
    return [group._context.lane for group in ranks]


async def settled(ranks):
    """Wait until all ranks share memory."""
    while None in lanes(ranks):
        await everyone(ranks, lambda g: g.barrier())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def set_ups(monkeypatch) -> Iterator[list[lane_setup.LaneSetup]]:
    """The set-ups that have begun, in order."""
    begun: list[lane_setup.LaneSetup] = []
    run = lane_setup.LaneSetup._run

    async def note(self):
        begun.append(self)
        await run(self)

    monkeypatch.setattr(lane_setup.LaneSetup, "_run", note)
    return begun


@pytest.fixture
def rank_1_may_go_on(monkeypatch) -> asyncio.Event:
    """Until this is set, rank 1 does no more than offer its memory."""
    may_go_on = asyncio.Event()
    real = lane_setup.LaneSetup._fetch

    async def fetch(self, words, problem):
        if self._context.rank == 1:
            await may_go_on.wait()
        return await real(self, words, problem)

    monkeypatch.setattr(lane_setup.LaneSetup, "_fetch", fetch)
    return may_go_on


def turn():
    """Give the loop one turn."""
    return asyncio.sleep(0)


@pytest.mark.parametrize(("cores", "crowded"), [((2, 9), False), ((9, 1), True)])
def test_all_know_whether_one_of_them_has_too_few_cores(run, monkeypatch, cores, crowded):
    """The choice of plans depends on it, and all ranks have to choose the same."""
    counts = iter(cores)
    monkeypatch.setattr(lane_setup, "cores", lambda: next(counts))

    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            assert not any(group._context.crowded for group in ranks)
            await settled(ranks)
            assert [group._context.crowded for group in ranks] == [crowded] * 2

    run(main())


@pytest.mark.parametrize("tag", [None, "some"])
def test_it_begins_with_the_first_collective(run, set_ups, tag):
    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            await asyncio.gather(ranks[0].send(1, 1), ranks[1].recv())
            assert not set_ups
            await everyone(ranks, lambda g: g.barrier(tag=tag))
            assert len(set_ups) == 2
            await settled(ranks)
            assert len(set_ups) == 2
            assert {lane.first for lane in lanes(ranks)} == {lanes(ranks)[0].first}

    run(main())


def test_ranks_of_one_process_that_meet_there_share_nothing(run, set_ups):
    async def main():
        async with aiodist.local(2, transports=("inproc", "shm")) as ranks:
            await everyone(ranks, lambda g: g.barrier())
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            await everyone(ranks, lambda g: g.barrier())
        async with aiodist.local(1, transports=("shm",)) as ranks:
            await everyone(ranks, lambda g: g.barrier())
        assert not set_ups

    run(main())


def test_a_value_that_ends_the_group_begins_none(run, set_ups):
    async def main():
        async with aiodist.local(2, **SHM, allow_pickle=True) as ranks:

            class EndsIt:
                def __reduce__(self):
                    ranks[0].revoke()
                    return int, ()

            with pytest.raises(aiodist.GroupRevokedError):
                ranks[0].all_gather(EndsIt())
            await turn()
            assert not set_ups

    run(main())


@pytest.mark.parametrize("length", [3, 50_000])
def test_calls_while_it_settles_keep_order_and_values(run, length):
    """Ranks call at different speeds, some many calls ahead, and the numbers of operations
    agree."""

    async def main():
        async with aiodist.local(3, **SHM) as ranks:

            async def program(group):
                works = []
                for number in range(40):
                    works.append(group.all_reduce(np.full(length, float(number))))
                    for _ in range(group.rank * (number % 4)):
                        await asyncio.sleep(0)
                for number, work in enumerate(works):
                    assert (await work == 3 * number).all()
                    assert work.seq == number

            await asyncio.gather(*[program(group) for group in ranks])
            await settled(ranks)
            # Large arrays wait for the end of the set-up, because their bits depend on the way.
            assert lanes(ranks)[0].first in (range(1, 41) if length == 3 else [0])

    run(main())


def test_groups_that_share_memory_take_no_files(run):
    """Each group maps the memory of its ranks, and many open files would exhaust the limit."""

    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            await settled(ranks)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                parts = await everyone(ranks, lambda g: g.dup())
                await settled(parts)
                arrays = [group.empty(10, np.int64) for group in parts]
                while not all(group._context.heap.shows_any for group in parts):
                    await turn()
                assert len(os.listdir("/proc/self/fd")) == before
                del arrays

    run(main())


def test_calls_held_back_can_be_cancelled_and_time_out(run, rank_1_may_go_on):
    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            first = [group.barrier() for group in ranks]
            while ranks[0]._context.calls.held_from is None:
                await turn()
            held = [ranks[0].barrier(), ranks[0].all_reduce(1), ranks[0].all_gather("x")]
            assert [work.seq for work in held] == [1, 2, 3]
            assert held[1].cancel()
            rank_1_may_go_on.set()
            assert await ranks[1].barrier() is None
            with pytest.raises(aiodist.CollectiveAbortedError):
                await ranks[1].all_reduce(1)
            assert await ranks[1].all_gather("y") == ["x", "y"]
            await asyncio.gather(*first)
            assert await held[0] is None
            assert await held[2] == ["x", "y"]
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_calls_held_back_are_among_what_is_said_to_be_pending(run, rank_1_may_go_on):
    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            first = [group.barrier() for group in ranks]
            late = ranks[2]
            while late._context.calls.held_from is None:
                await turn()
            await asyncio.gather(*first)
            held = [late.barrier(), late.all_reduce(1), late.barrier(tag="some")]
            held[0].cancel()
            waits = RankDoings(late._actor).now().waits
            assert {(one.op, one.seq, ranks_in(unpacked(one.missing))) for one in waits} == {
                ("all_reduce", 2, (0, 1)),
                ("barrier", 0, (0, 1)),
            }
            rank_1_may_go_on.set()
            others = [ranks[0].barrier(tag="some"), ranks[1].barrier(tag="some")]
            for group in ranks[:2]:
                with pytest.raises(aiodist.CollectiveAbortedError):
                    await group.barrier()
            assert await everyone(ranks[:2], lambda g: g.all_reduce(1)) == [3, 3]
            assert await held[1] == 3
            await asyncio.gather(held[2], *others)

    run(main())


# -- no memory to share ---------------------------------------------------------------------------


def once(real, failing):
    """Return a function that calls `failing` the first time, and then `real`."""
    calls = itertools.count()

    def either(*args, **kwargs):
        return (real if next(calls) else failing)(*args, **kwargs)

    return either


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


async def use_sockets(size):
    """Check that the group works without shared memory."""
    async with aiodist.local(size, **SHM) as ranks:
        for number in range(12):
            assert (
                await everyone(ranks, lambda g, n=number: g.all_reduce(n)) == [size * number] * size
            )
            large = await everyone(ranks, lambda g: g.all_reduce(np.ones(50_000)))
            assert all((x == size).all() for x in large)
        assert all(group._context._setup.over for group in ranks)
        assert lanes(ranks) == [None] * size


def test_a_rank_whose_system_has_none(run, monkeypatch, caplog):
    real = lane_setup.unsupported_reason
    monkeypatch.setattr(lane_setup, "unsupported_reason", once(real, lambda: "no memfd today"))
    run(use_sockets(3))
    lines = warnings(caplog)
    assert len(lines) == 3
    assert sum("no memfd today" in line for line in lines) == 1
    assert all("sockets" in line for line in lines)
    (culprit,) = [line.split("rank ")[1][0] for line in lines if "no memfd today" in line]
    assert all(f"rank {culprit}" in line for line in lines)


def test_a_rank_without_memory_to_spare(run, monkeypatch, caplog):
    real = lane_setup.SegmentOffer
    monkeypatch.setattr(
        lane_setup, "SegmentOffer", once(real, raising(OSError(12, "Cannot allocate memory")))
    )
    run(use_sockets(3))
    assert sum("Cannot allocate memory" in line for line in warnings(caplog)) == 1
    assert len(warnings(caplog)) == 3


def test_a_rank_that_cannot_get_the_memory_of_another(run, monkeypatch, caplog):
    async def refused(*args):
        raise ConnectionError("no way through")

    monkeypatch.setattr(lane_setup, "take", once(lane_setup.take, refused))
    run(use_sockets(3))
    assert sum("no way through" in line for line in warnings(caplog)) == 1
    assert len(warnings(caplog)) == 3


# -- the end comes first --------------------------------------------------------------------------


LARGE = np.ones(100_000)
"""Its reduction waits for the end of the set-up."""


@pytest.mark.strength(2)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("end", ["close", "abort", "part"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_the_group_ends_meanwhile(run, turns, end, waits):
    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            if end == "part":
                ranks = await everyone(ranks, lambda g: g.dup())
            works = [g.all_reduce(LARGE.copy()) if waits else g.barrier() for g in ranks]
            for work in works:
                # so that no warning says that it was dropped
                work.add_done_callback(lambda _: None)
            for _ in range(turns):
                await asyncio.sleep(0)
            if end == "abort":
                ranks[0].abort("enough")
            elif end == "part":
                await ranks[0].close()
            await asyncio.wait(works)
            if end == "close":
                assert [work.exception() for work in works] == [None] * 3
            elif end == "part":
                assert works[0].exception() is None

    run(main())


LOST = (aiodist.PeerLostError, aiodist.CollectiveAbortedError)


@pytest.mark.parametrize("x", [1, LARGE], ids=["number", "large"])
@pytest.mark.parametrize("turns", [0, 2, 5, 10, 20])
def test_a_rank_is_lost_meanwhile(run, turns, x):
    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            works = [group.all_reduce(copy(x)) for group in ranks]
            for _ in range(turns):
                await asyncio.sleep(0)
            ranks[2].abort("gone")
            more = [group.all_reduce(group.rank) for group in ranks[:2]]
            await asyncio.wait([*works, *more])
            for work in works[:2]:
                error = work.exception()
                assert error is None or isinstance(error, LOST)
            for work in more:
                assert isinstance(work.exception(), LOST)
            for group in ranks[:2]:
                with pytest.raises(aiodist.PeerLostError):
                    await group.barrier()

    run(main())


def test_closing_does_not_wait_for_ranks_that_never_share(run):
    """Rank 1 calls no collective without a tag, so the set-up of rank 0 would never end."""

    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            work = ranks[0].barrier()
            for _ in range(10):
                await asyncio.sleep(0)
            work.cancel()
            assert not [pending for pending in ranks[0]._pending() if pending is not work]
            async with asyncio.timeout(20):  # less than `op_timeout`
                await ranks[0].close()

    run(main())


@on_idle_time
def test_a_call_that_waits_for_a_set_up_that_does_not_end(run, rank_1_may_go_on):
    """Rank 0 waits for rank 1's answer."""

    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            await everyone(ranks, lambda g: g.barrier())
            while ranks[0]._context.calls.held_from is None:
                await turn()
            with pytest.raises(aiodist.CollectiveTimeoutError, match="by rank 1") as caught:
                await ranks[0].barrier(timeout=0.1)
            assert caught.value.missing == (1,)
            assert "in no collective" in caught.value.last_seen[1]
            rank_1_may_go_on.set()
            with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 0 gave up"):
                await ranks[1].barrier()
            await everyone(ranks, lambda g: g.barrier())

    run(main())


@on_idle_time
def test_a_reduction_that_waits_for_a_rank_that_has_called_nothing(run):
    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            late = ranks[0].all_reduce(LARGE.copy(), timeout=0.1)
            others = [group.all_reduce(LARGE.copy()) for group in ranks[:2]]
            with pytest.raises(aiodist.CollectiveTimeoutError, match="by rank 2") as caught:
                await late
            assert caught.value.missing == (2,)
            more = [group.all_reduce(LARGE.copy()) for group in (ranks[1], ranks[2], ranks[2])]
            for work in (others[1], more[1]):
                with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 0 gave up"):
                    await work
            for work in (others[0], more[0], more[2]):
                assert (await work == 3).all()

    run(main())


@on_idle_time
def test_a_reduction_that_waits_for_the_memory_of_other_ranks(run, monkeypatch):
    may_go_on, real = asyncio.Event(), lane_setup.take

    async def take(*args):
        await may_go_on.wait()
        return await real(*args)

    monkeypatch.setattr(lane_setup, "take", take)

    async def main():
        async with aiodist.local(3, **SHM) as ranks:
            works = [group.all_reduce(LARGE.copy(), timeout=0.1) for group in ranks]
            for work in works:
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await work
            may_go_on.set()
            for result in await everyone(ranks, lambda g: g.all_reduce(LARGE.copy())):
                assert (result == 3).all()

    run(main())


@on_idle_time
def test_what_others_hear_of_a_rank_in_its_set_up(run):
    """Errors do not name the collectives that aiodist calls for itself."""

    async def main():
        async with aiodist.local(2, **SHM) as ranks:
            ranks[1].barrier().cancel()
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await ranks[0].barrier(tag="other", timeout=0.1)
            assert "b'" not in str(caught.value)
            assert "in no collective" in caught.value.last_seen[1]

    run(main())
