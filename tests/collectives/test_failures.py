"""What a rank sees when another does not do its part."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from idle_time import on_idle_time

import aiodist

pytestmark = pytest.mark.strength(2)

LARGE = 100_003


@on_idle_time
def test_a_deadline_names_who_is_missing(run, groups, everyone):
    async def main():
        async with groups(4) as ranks:
            works = [g.all_reduce(np.ones(3), timeout=0.3) for g in ranks if g.rank not in (1, 3)]
            await asyncio.wait(works)
            for work in works:
                error = work.exception()
                assert isinstance(error, aiodist.CollectiveTimeoutError)
                assert isinstance(error, TimeoutError)
                assert error.missing == (1, 3)
                assert error.op == "all_reduce"
                assert error.seq == 0
                assert "rank 1 (in no collective" in str(error)
            # Late ranks get the verdict at once.
            for late in (1, 3):
                work = ranks[late].all_reduce(np.ones(3), timeout=math.inf)
                with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                    await work
                assert caught.value.missing == (1, 3)
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [4] * 4

    run(main())


@on_idle_time
def test_what_the_missing_rank_is_doing(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            other = ranks[1].barrier(tag="elsewhere")
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await ranks[0].all_gather(1, timeout=0.2)
            assert "in barrier tag 'elsewhere' #0" in caught.value.last_seen[1]
            await ranks[0].barrier(tag="elsewhere")
            await other
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await ranks[1].all_gather(1)

    run(main())


@pytest.mark.parametrize("length", [3, LARGE])
def test_cancelling_tells_the_others(run, groups, everyone, length):
    async def main():
        async with groups(3) as ranks:
            arrays = [np.ones(length) for _ in ranks]
            works = [ranks[rank].all_reduce(arrays[rank]) for rank in (0, 1)]
            assert works[0].cancel()
            assert works[0].cancelled()
            kept = arrays[0].copy()
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                await works[1]
            assert caught.value.rank == 0
            assert "cancelled" in caught.value.reason
            with pytest.raises(aiodist.CollectiveAbortedError):
                await ranks[2].all_reduce(arrays[2])
            np.testing.assert_array_equal(arrays[0], kept)
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [3] * 3

    run(main())


LATER = {
    "all_gather": lambda group, x, tag: group.all_gather(x, tag=tag),
    "all_reduce": lambda group, x, tag: group.all_reduce(x, tag=tag),
    "all_to_all": lambda group, x, tag: group.all_to_all([x] * group.size, tag=tag),
    "barrier": lambda group, x, tag: group.barrier(tag=tag),
    "broadcast": lambda group, x, tag: group.broadcast(x, src=0, tag=tag),
    "gather": lambda group, x, tag: group.gather(x, dst=1, tag=tag),
    "reduce_scatter": lambda group, x, tag: group.reduce_scatter([x] * group.size, tag=tag),
}


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 10, 30])
@pytest.mark.parametrize("tag", [None, "mine"])
@pytest.mark.parametrize("length", [3, 20_000, LARGE])
@pytest.mark.parametrize("op", LATER)
def test_who_calls_later_hears_of_it(run, groups, everyone, op, length, tag, turns):
    """However much of it is there already, and whether or not the loop had a turn in between."""

    async def main():
        async with groups(2) as ranks:
            call = LATER[op]
            arrays = [np.ones(length) for _ in ranks]
            await everyone(ranks, lambda group: call(group, arrays[group.rank], tag))
            for _ in range(turns):  # ranks may agree on shared memory, meanwhile
                await asyncio.sleep(0)
            work = call(ranks[0], arrays[0], tag)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert work.cancel()
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                await call(ranks[1], arrays[1], tag)
            assert caught.value.rank == 0
            assert await everyone(ranks, lambda group: group.all_reduce(1, tag=tag)) == [2, 2]

    run(main())


def test_a_cancelled_task_and_asyncio_timeout_withdraw(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            await everyone(ranks, lambda g: g.barrier())  # they are connected
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await ranks[0].barrier()
            with pytest.raises(aiodist.CollectiveAbortedError):
                await ranks[1].barrier()

            started = asyncio.Event()

            async def body():
                work = ranks[0].barrier()
                started.set()
                await work

            task = asyncio.create_task(body())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(aiodist.CollectiveAbortedError):
                await ranks[1].barrier()
            # Waiting with a limit of one's own cancels nothing.
            work = ranks[0].barrier()
            with pytest.raises(TimeoutError):
                await work.wait(0.01)
            await ranks[1].barrier()
            await work

    run(main())


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.sample(25)
def test_cancelling_anywhere_harms_nobody(run, groups, everyone, turns):
    """Whatever the state of a large operation, its cancellation ends it everywhere."""

    async def main():
        async with groups(3) as ranks:
            arrays = [np.full(LARGE, rank + 1.0) for rank in range(3)]
            outs = [np.full(LARGE, -1.0) for _ in range(3)]
            works = [g.all_reduce(arrays[g.rank], out=outs[g.rank]) for g in ranks]
            for _ in range(turns):
                await asyncio.sleep(0)
            done = works[1].done()
            works[1].cancel()
            kept = outs[1].copy()
            arrays[1][:] = 1000.0
            await asyncio.wait(works)
            for rank in (0, 2):
                error = works[rank].exception()
                if error is None:
                    # Completed without rank 1's change of its memory.
                    np.testing.assert_array_equal(outs[rank], np.full(LARGE, 6.0))
                else:
                    assert isinstance(error, aiodist.CollectiveAbortedError)
            assert done or works[1].cancelled()
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [3] * 3
            np.testing.assert_array_equal(outs[1], kept)

    run(main())


def test_a_rank_that_aborts(run, groups, everyone):
    async def main():
        async with groups(3) as ranks:
            await everyone(ranks, lambda g: g.barrier())
            works = [g.all_reduce(1) for g in ranks[:2]]
            receive = ranks[0].recv(src=2)
            ranks[2].abort("disk full")
            for work in works:
                with pytest.raises(aiodist.PeerLostError) as caught:
                    await work
                assert caught.value.ranks == (2,)
            with pytest.raises(aiodist.PeerLostError, match="disk full"):
                await receive
            with pytest.raises(aiodist.GroupClosedError, match="disk full"):
                ranks[2].barrier()
            # The two others can still talk to each other.
            sent = ranks[0].send("still here", 1)
            assert await ranks[1].recv(src=0) == "still here"
            await sent
            pair = await asyncio.gather(*[g.subgroup([0, 1]) for g in ranks[:2]])
            assert await everyone(pair, lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_leaving_by_an_exception_fails_what_is_pending(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            await everyone(ranks, lambda g: g.barrier())
            work = ranks[0].barrier()
            with pytest.raises(KeyError):
                async with ranks[1]:
                    raise KeyError("x")
            with pytest.raises(aiodist.PeerLostError, match="KeyError"):
                await work

    run(main())


def test_a_reason_that_is_no_text(run, groups, everyone):
    """File names that are not UTF-8 have lone surrogates, and so have the errors that name them."""

    def raises(a, b):
        raise OSError("a\udc80")

    def adds(a, b):
        return a + b

    raises.__qualname__ = raises.__name__ = "adds"

    async def main():
        async with groups(2) as ranks:
            await everyone(ranks, lambda group: group.barrier())
            works = [
                g.all_reduce(np.ones(2), f) for g, f in zip(ranks, (raises, adds), strict=True)
            ]
            with pytest.raises(OSError, match="a\udc80"):
                await works[0]
            with pytest.raises(aiodist.CollectiveAbortedError, match=r"OSError: a\\udc80"):
                await works[1]
            pending = ranks[1].barrier()
            with pytest.raises(OSError, match="b\udcff"):
                async with ranks[0]:
                    raise OSError("b\udcff")
            with pytest.raises(aiodist.AiodistError, match=r"OSError: b\\udcff"):
                await pending

    run(main())


def test_closing_waits_for_what_is_pending(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            work = ranks[0].all_reduce(1)
            work.add_done_callback(lambda _: None)  # it is looked at
            closing = asyncio.ensure_future(ranks[0].close())
            await asyncio.sleep(0)
            assert not closing.done()
            assert await ranks[1].all_reduce(1) == 2
            await closing
            assert work.result() == 2
            with pytest.raises(aiodist.GroupClosedError):
                ranks[0].barrier()
            await ranks[0].close()
            with pytest.raises(aiodist.PeerLostError):
                await ranks[1].barrier()

    run(main())


def test_closing_takes_groups_made_of_it_along(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            parts = await everyone(ranks, lambda g: g.dup())
            work = parts[0].all_reduce(1)
            work.add_done_callback(lambda _: None)  # it is looked at
            closing = asyncio.ensure_future(ranks[0].close())
            await asyncio.sleep(0)
            assert await parts[1].all_reduce(1) == 2
            await closing
            assert work.result() == 2
            with pytest.raises(aiodist.GroupClosedError, match="made of was closed"):
                parts[0].barrier()
            with pytest.raises(aiodist.PeerLostError):
                await parts[1].barrier()

    run(main())


def test_aborting_fails_what_is_pending_in_groups_made_of_it(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            parts = await everyone(ranks, lambda g: g.dup())
            mine, other = parts[0].barrier(), parts[1].recv(src=0)
            ranks[0].abort("enough")
            with pytest.raises(aiodist.GroupClosedError):
                await mine
            with pytest.raises(aiodist.PeerLostError, match="enough"):
                await other

    run(main())


def test_a_loop_of_its_own(run, groups):
    async def main():
        async with groups(2) as ranks:

            def elsewhere():
                with pytest.raises(RuntimeError, match="event loop that made it"):
                    ranks[0].barrier()

            await asyncio.to_thread(elsewhere)

    run(main())


@on_idle_time
def test_an_unawaited_failure_is_reported_once(run, groups, everyone, caplog):
    async def main():
        async with groups(2) as ranks:
            ranks[0].barrier(timeout=0.05)
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await ranks[1].barrier(tag="other", timeout=0.1)
            # The late call of rank 1 still gets the verdict, and rank 0's own Work is dropped.
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await ranks[1].barrier()

    run(main())
    reports = [r for r in caplog.records if "exception was never retrieved" in r.getMessage()]
    assert len(reports) == 1


def test_a_rank_where_something_fails_that_nobody_foresaw_says_so_and_leaves(run, groups, caplog):
    """As a link, or memory to share, that is made beside: nobody awaits that, and others may wait
    for what never comes."""

    async def fail():
        raise LookupError("what is that?")

    async def main():
        async with groups(3) as ranks:
            waiting = [ranks[0].recv(src=1), ranks[1].recv(src=2)]
            ranks[0]._actor.endpoint.spawn(fail(), "a test")
            with pytest.raises(aiodist.GroupClosedError, match="what is that"):
                await waiting[0]
            with pytest.raises(aiodist.PeerLostError, match="what is that") as caught:
                await ranks[1].recv(src=0)
            assert caught.value.ranks == (0,)
            await ranks[2].send("still here", 1)
            assert await waiting[1] == "still here"

    run(main())
    caplog.clear()  # what it was raised in holds the group


def test_what_an_aborted_rank_could_not_close_is_logged(run, monkeypatch, caplog):
    """Not all who abort wait for it."""

    async def main():
        with pytest.raises(LookupError):
            async with aiodist.local(1) as (group,):
                finish = group._actor.endpoint.aborted

                async def broken():
                    await finish()
                    raise LookupError("what is that?")

                monkeypatch.setattr(group._actor.endpoint, "aborted", broken)
                group.abort("enough")
                await group._actor.gone()
                assert "what is that?" in caplog.text

    run(main())
    caplog.clear()
