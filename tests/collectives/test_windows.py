"""Memory that other ranks read and write: what holds, on every transport (docs/windows.md)."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import reprlib
import weakref
from array import array
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import aiodist
from aiodist import ReduceOp
from aiodist.rank.doings import RankDoings
from aiodist.windows import window
from aiodist.windows.places import Exposed
from aiodist.windows.window import REQUESTS

pytestmark = pytest.mark.strength(2)

SMALL, LARGE = 6, 100_000


async def windows_of(ranks, xs, **options):
    return await asyncio.gather(*[g.expose(x, **options) for g, x in zip(ranks, xs, strict=True)])


async def close_all(windows):
    await asyncio.gather(*[window.close() for window in windows])


def stop_serving(window):
    """Let its owner come to no request, as if it were at work."""
    for task in window._serving:
        task.cancel()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_get_put_accumulate(run, groups, size, length):
    async def main():
        async with groups(size) as ranks:
            xs = [np.full(length, float(group.rank)) for group in ranks]
            windows = await windows_of(ranks, xs)
            for reader, window in enumerate(windows):
                for owner in range(size):
                    got = await window.get(owner)
                    assert got.tolist() == [float(owner)] * length
                    assert got is not xs[owner]
                    out = np.zeros(2)
                    assert await window.get(owner, slice(1, 3), out=out) is out
                    assert out.tolist() == [float(owner)] * 2
                    assert (
                        await window.put(owner, slice(reader, None), np.arange(length)[reader:])
                        is None
                    )
                    assert xs[owner][reader:].tolist() == list(range(reader, length))
                    xs[owner][:] = owner
            await asyncio.gather(
                *[window.accumulate(0, ..., np.ones(length)) for window in windows]
            )
            assert xs[0].tolist() == [float(size)] * length
            await windows[1].accumulate(0, 2, 7, ReduceOp.MAX)
            assert xs[0][1:4].tolist() == [size, 7.0, size]
            await close_all(windows)

    run(main())


def test_what_can_be_exposed_and_indexed(run, groups):
    torch = pytest.importorskip("torch")

    async def main():
        async with groups(2) as ranks:
            matrix = np.arange(12, dtype=">i4").reshape(3, 4).T
            tensor = torch.zeros(3, dtype=torch.int64)
            one, two = await windows_of(ranks, [matrix, tensor])
            assert (await two.get(0, (1, slice(None, None, -1)))).tolist() == [9, 5, 1]
            assert int(await two.get(0, (-1, -1))) == 11
            await two.put(0, (..., 0), [7, 7, 7, 7])
            assert matrix[:, 0].tolist() == [7] * 4
            out = torch.empty(3, dtype=torch.int64)
            await one.accumulate(1, ..., torch.ones(3, dtype=torch.int64), ReduceOp.BOR)
            await one.get(1, out=out)
            assert tensor.tolist() == out.tolist() == [1, 1, 1]
            await close_all([one, two])
            buffer = array("B", bytes(3))
            one, two = await windows_of(ranks, [buffer, None])
            await two.put(0, 1, 200)
            assert buffer.tolist() == [0, 200, 0]
            with pytest.raises(ValueError, match="rank 1 has exposed nothing"):
                one.get(1)
            await close_all([one, two])
            words = np.array(["a", "long"])
            one, two = await windows_of(ranks, [words, None])
            place = np.empty((), words.dtype)
            for got in (await two.get(0, 0), await two.get(0, 0, out=place)):
                assert (got, got.dtype) == ("a", words.dtype)
            await close_all([one, two])

    run(main())


def test_a_tensor_whose_storage_is_freed_and_made_anew(run, groups):
    torch = pytest.importorskip("torch")

    async def main():
        async with groups(2) as (one, two):
            x = torch.zeros(1000)
            mine, _ = await asyncio.gather(one.expose(), two.expose(x))
            x.untyped_storage().resize_(0)
            for call in (mine.get(1, 0), mine.put(1, 0, 1.0)):
                with pytest.raises(aiodist.CollectiveAbortedError, match="it was freed"):
                    await call
            x.untyped_storage().resize_(8000)  # elsewhere, perhaps
            x.fill_(2)
            await mine.put(1, 1, 3.0)
            assert x[:3].tolist() == [2, 3, 2]
            assert (await mine.get(1, slice(0, 2))).tolist() == [2, 3]

    run(main())


def test_autograd_hears_of_what_is_written(run, groups):
    """Else a backward pass would use the new values where it saved the old ones."""
    torch = pytest.importorskip("torch")

    async def main():
        async with groups(2) as ranks:
            x, factor = torch.ones(3, requires_grad=True), torch.zeros(3)
            one, two = await windows_of(ranks, [factor, None])
            for write in (two.put, two.accumulate):
                y = (x * factor).sum()
                await two.get(0)
                y.backward(retain_graph=True)  # a read changes nothing
                await write(0, ..., 1.0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.backward()
            await close_all([one, two])

    run(main())


def test_what_one_rank_asks_of_one_owner_is_in_order(run, groups):
    async def main():
        async with groups(2) as ranks:
            xs = [np.zeros(LARGE), None]
            one, two = await windows_of(ranks, xs)
            works = [two.put(0, ..., np.full(LARGE, 3.0)), two.put(0, slice(0, 2), 4.0)]
            works += [two.accumulate(0, 0, 1.0), two.get(0, slice(0, 3))]
            assert (await works[-1]).tolist() == [5.0, 4.0, 3.0]
            assert all(work.done() for work in works)
            assert [work.op for work in works] == ["put", "put", "accumulate", "get"]
            await close_all([one, two])

    run(main())


def test_none_is_seen_half_done(run, groups):
    async def main():
        async with groups(3) as ranks:
            xs = [np.zeros(LARGE), None, None]
            windows = await windows_of(ranks, xs)

            async def write(window, base):
                for value in range(base, base + 5):
                    await window.put(0, ..., np.full(LARGE, float(value)))

            async def look():
                while not writing.done():
                    assert len(set(xs[0][:: LARGE // 10].tolist())) == 1
                    got = await windows[0].get(0)
                    assert got.min() == got.max()

            writing = asyncio.gather(write(windows[1], 10), write(windows[2], 20))
            await asyncio.gather(writing, look())
            await close_all(windows)

    run(main())


def test_fence(run, groups):
    async def main():
        async with groups(3) as ranks:
            xs = [np.zeros(2) for _ in ranks]
            windows = await windows_of(ranks, xs)
            for window in windows:
                for owner in range(3):
                    window.accumulate(owner, ..., 1.0)
            await asyncio.gather(*[window.fence() for window in windows])
            assert [x.tolist() for x in xs] == [[3.0, 3.0]] * 3
            # One that is cancelled while it waits takes the others along, and the next one is well.
            holding = windows[0].get(1)
            fences = [asyncio.ensure_future(window.fence()) for window in windows]
            await asyncio.sleep(0)
            fences[0].cancel()
            outcomes = await asyncio.gather(*fences, return_exceptions=True)
            assert isinstance(outcomes[0], asyncio.CancelledError)
            assert all(isinstance(one, aiodist.CollectiveAbortedError) for one in outcomes[1:])
            await holding
            await asyncio.gather(*[window.fence() for window in windows])
            await close_all(windows)

    run(main())


def test_a_fence_does_not_wait_longer_than_its_timeout_for_operations(run, groups):
    async def main():
        async with groups(2) as ranks:
            windows = await windows_of(ranks, [np.zeros(2), np.zeros(2)])
            for task in windows[1]._serving:
                task.cancel()
            waits = windows[0].get(1, timeout=math.inf)
            fences = windows[0].fence(timeout=0.01), windows[1].fence()
            for fence in fences:
                with pytest.raises(aiodist.CollectiveTimeoutError, match="not answered") as caught:
                    await fence
                assert caught.value.missing == (1,)
            with pytest.raises(ValueError, match="timeout is more than 0"):
                await windows[0].fence(timeout=0)
            with pytest.raises(aiodist.CollectiveAbortedError, match="timeout is more than 0"):
                await windows[1].fence()
            waits.cancel()
            await close_all(windows)

    run(main())


def test_a_window_closes_after_operations_with_longer_timeouts_than_the_group(
    run, groups, monkeypatch
):
    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(2), np.zeros(2)])
            for task in two._serving:
                task.cancel()
            await asyncio.wait(two._serving)
            with monkeypatch.context() as patched:
                patched.setattr(one._group._context, "op_timeout", 0.01)
                waits = one.get(1, timeout=math.inf)
                closing = asyncio.ensure_future(one.close())
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert one._fences
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await one.get(1)  # fails after the time that the fence would have
                assert not closing.done()
            two._serving = [asyncio.ensure_future(two._serve(rank)) for rank in range(2)]
            assert (await waits).tolist() == [0, 0]
            await asyncio.gather(closing, two.close())

    run(main())


def test_the_error_of_a_fence_names_a_short_number_of_seconds(run, groups):
    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(2), np.zeros(2)])
            one.get(1)
            for fence in partial(one.fence, timeout=0.05), two.fence:
                with pytest.raises(aiodist.CollectiveTimeoutError, match=r"within 0\.\d{1,3} s"):
                    await fence()
            await close_all([one, two])

    run(main())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: w.get(2), ValueError, "rank=2 is not a rank of this group of 2"),
        (lambda w: w.get(True), TypeError, "rank is a rank, an int, not True"),
        (lambda w: w.put("0", 0, 1), TypeError, "rank is a rank, an int, not '0'"),
        (lambda w: w.get(1, 4), IndexError, "out of bounds"),
        (lambda w: w.get(1, (0, 0)), IndexError, "too many indices"),
        (lambda w: w.get(1, "a"), TypeError, "ints, slices of ints and ..., not"),
        (lambda w: w.get(1, True), TypeError, "ints, slices of ints and ..., not"),
        (lambda w: w.get(1, out=np.zeros(3)), ValueError, r"float64\[4\]"),
        (lambda w: w.get(1, out=np.zeros(4, "f4")), TypeError, "float32"),
        (lambda w: w.put(1, ..., np.zeros(3)), ValueError, "broadcast"),
        (lambda w: w.put(1, ..., 1j), TypeError, "cannot be converted to float64"),
        (lambda w: w.accumulate(1, 0, 1.0, max), TypeError, "accumulate takes SUM"),
        (lambda w: w.accumulate(1, 0, 1.0, ReduceOp.AVG), TypeError, "accumulate takes SUM"),
        (lambda w: w.accumulate(1, 0, 1.0, ReduceOp.BAND), TypeError, "no meaning for float64"),
    ],
)
def test_mistakes_are_seen_by_who_makes_them(run, call, error, words):
    async def main():
        async with aiodist.local(2) as ranks:
            windows = await windows_of(ranks, [np.zeros(4), np.zeros(4)])
            with pytest.raises(error, match=words):
                call(windows[0])
            await close_all(windows)

    run(main())


@pytest.mark.parametrize("x", [3, np.float64(1), b"ab", np.zeros(3)[::1].astype(object)])
def test_what_cannot_be_exposed_on_one_rank(run, groups, x):
    async def main():
        async with groups(3) as ranks:
            first = ranks[0].expose(np.zeros(2))
            with pytest.raises(TypeError):
                ranks[1].expose(x)
            for work in (first, ranks[2].expose()):
                with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                    await work
                error = caught.value
                assert (error.rank, error.group, error.op) == (1, "world", "expose")
            await close_all(await windows_of(ranks, [np.zeros(2), None, None]))

    run(main())


def test_the_owner_dies(run, groups):
    async def main():
        async with groups(3) as ranks:
            xs = [np.zeros(LARGE) for _ in ranks]
            windows = await windows_of(ranks, xs)
            works = [windows[0].get(2), windows[0].put(2, ..., 1.0), windows[1].accumulate(2, 0, 1)]
            ranks[2].abort("enough")
            for work in works:
                with pytest.raises(aiodist.PeerLostError, match="enough") as caught:
                    await work
                assert (caught.value.op, caught.value.tag) == (work.op, None)
            with pytest.raises(aiodist.PeerLostError):
                await windows[0].get(2)
            # The memory of the others can be used all the same.
            await windows[0].put(1, 0, 5.0)
            assert xs[1][0] == 5.0
            for window in windows[:2]:
                with pytest.raises(aiodist.PeerLostError):
                    await window.close()
                with pytest.raises(aiodist.GroupClosedError):
                    window.get(0)
                if window is windows[0]:  # it has left, too
                    with pytest.raises(aiodist.PeerLostError, match="it closed") as caught:
                        await windows[1].get(0)
                    assert caught.value.ranks == (0,)

    run(main())


def test_who_asked_dies(run, groups):
    async def main():
        async with groups(3) as ranks:
            x = np.zeros(LARGE)
            windows = await windows_of(ranks, [x, None, None])
            windows[2].put(0, ..., np.ones(LARGE)).add_done_callback(lambda work: work.exception())
            ranks[2].abort("enough")
            assert (await windows[1].get(0)).tolist() == x.tolist()
            assert x.min() == x.max()

    run(main())


def test_a_cancelled_call(run, groups):
    async def main():
        async with groups(2) as ranks:
            x = np.ones(LARGE)
            one, two = await windows_of(ranks, [x, None])
            out = np.zeros(LARGE)
            works = [two.get(0, out=out), two.put(0, ..., np.full(LARGE, 2.0)), two.get(0, 0)]
            for work in works:
                work.cancel()
            assert not out.any()
            await asyncio.gather(one.fence(), two.fence())
            assert float(await two.get(0, 0)) in (1.0, 2.0)
            assert x.min() == x.max()
            assert not out.any()
            # The mailbox keeps no answer that no call waits for, even if the other rank has taken a
            # request whose send was cancelled.
            gone = two._group.recv(src=0, tag=-1)
            gone.cancel()
            two._leave(0, -1, gone, gone)
            one._group.send(None, 1, tag=-1)
            await two.get(0, 1)
            assert not two._group.iprobe()
            await close_all([one, two])

    run(main())


def test_an_answer_that_is_too_large(run, groups):
    async def main():
        async with groups(2, max_message_bytes=1 << 16) as ranks:
            one, two = await windows_of(ranks, [np.zeros(LARGE), None])
            with pytest.raises(aiodist.MessageTooLargeError):
                await two.get(0)
            await two.get(0, 0)  # the loop has turned
            assert not two._group._context.p2p.pending
            assert not two._group.iprobe()
            await close_all([one, two])

    run(main())


def test_an_owner_that_is_busy(run, groups):
    """Its loop turns, but its service does not come to it: as if it were at work."""

    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(3), None])
            stop_serving(one)
            for work in (two.get(0, timeout=0.01), two.put(0, 0, 1.0, timeout=0.01)):
                with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                    await work
                # What the program called, and not the messages for it.
                assert (caught.value.op, caught.value.tag) == (work.op, None)
            await asyncio.gather(one.close(), two.close())

    run(main())


def test_an_open_window_is_no_operation_that_waits(run, groups):
    async def main():
        async with groups(2) as ranks:
            doings = [RankDoings(group._actor) for group in ranks]
            one, two = await windows_of(ranks, [np.zeros(3), None])
            await asyncio.sleep(0)
            assert one._group._context.p2p.pending  # it waits for requests now
            assert [len(rank.now().waits) for rank in doings] == [0, 0]
            for task in one._serving:
                task.cancel()
            await asyncio.wait(one._serving)
            get = two.get(0)
            await asyncio.wait([get], timeout=0)
            assert [len(rank.now().waits) for rank in doings] == [0, 1]
            assert doings[1].now().waits[0].op == "get"
            get.cancel()
            await asyncio.sleep(0)  # then its answer has another receive, which is no call
            assert two._group._context.p2p.pending
            assert [len(rank.now().waits) for rank in doings] == [0, 0]
            await asyncio.gather(one.close(), two.close())

    run(main())


BEYOND = Exposed("float64", (100,))
"""What a rank takes the memory of another for, in place of four elements: so its own checks let
everything through, as those of a rank that is not what it should be."""


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda w: w.get(0, 50), "IndexError: index 50 is out of bounds"),
        (lambda w: w.get(0, 50, out=np.zeros(())), "IndexError: index 50 is out of bounds"),
        (lambda w: w.put(0, ..., np.ones(100)), "ValueError: could not broadcast"),
        (lambda w: w.accumulate(0, ..., np.ones(100)), "ValueError: .* broadcast"),
        (
            lambda w: w._ask("steal", 0, [0], (), None, "", None, None),
            "ValueError: windows have no",
        ),
        (lambda w: w._ask("get", 0, [[0] * 9], (), None, "", None, None), "TypeError: .*'list'"),
        (lambda w: w._ask("get", 0, None, (), None, "", None, None), "TypeError: .*NoneType"),
        (lambda w: w._ask("put", 0, [0], (), "much", "", None, None), "ValueError: .*'much'"),
        (lambda w: w._ask("accumulate", 0, [0], (), 1.0, "WORSE", None, None), "Error: .*WORSE"),
    ],
)
@pytest.mark.sample(19)
def test_what_the_owner_cannot_carry_out_harms_nobody_but_who_asked(run, groups, call, reason):
    async def main():
        async with groups(3) as ranks:
            x = np.arange(4.0)
            windows = await windows_of(ranks, [x, None, None])
            windows[1]._exposed[0] = BEYOND
            with pytest.raises(aiodist.CollectiveAbortedError, match="rank 0 could not") as caught:
                await call(windows[1])
            assert re.search(reason, caught.value.reason)
            assert caught.value.rank == 0
            assert x.tolist() == [0, 1, 2, 3]
            for window in windows[1:]:
                assert (await window.get(0, slice(4))).tolist() == [0, 1, 2, 3]
            # Nothing of the refusal is left behind.
            assert not windows[1]._group.iprobe()
            await close_all(windows)

    run(main())


def test_an_owner_without_memory_for_the_answer(run, groups, monkeypatch):
    class Scarce:
        def __getitem__(self, index):
            raise MemoryError("64 GiB")

    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(LARGE), None])
            out = np.ones(LARGE)
            with monkeypatch.context() as patch:
                patch.setattr(window, "memory_of", lambda x: SimpleNamespace(base=Scarce()))
                for options in ({}, {"out": out}):
                    with pytest.raises(aiodist.CollectiveAbortedError, match="MemoryError: 64 GiB"):
                        await two.get(0, **options)
            assert out.all()
            await two.get(0, out=out)
            assert not out.any()
            await close_all([one, two])

    run(main())


@pytest.mark.parametrize(
    "message",
    [None, "get", ("get", 1), ("get", "1", [], None, ""), ("get", 0, [], None, ""), list(range(6))],
)
def test_a_request_that_is_none(run, message, caplog):
    """There is nobody to answer it to: it has no number."""

    async def main():
        async with aiodist.local(3) as ranks:
            windows = await windows_of(ranks, [np.arange(4.0), None, None])
            await windows[1]._group.send(message, 0, tag=REQUESTS)
            for window in windows[1:]:
                assert float(await window.get(0, 3)) == 3.0
            await close_all(windows)

    with caplog.at_level(logging.WARNING, "aiodist.group"):
        run(main())
    (record,) = caplog.records
    assert "asked for nonsense by rank 1" in record.getMessage()
    assert reprlib.repr(message) in record.getMessage()


def test_an_owner_that_fails_in_a_way_that_nobody_foresaw(run, groups, monkeypatch, caplog):
    def broken(**_):
        raise LookupError("what is that?")

    async def main():
        async with groups(3) as ranks:
            windows = await windows_of(ranks, [np.zeros(4), None, None])
            waiting = [window.get(0) for window in windows[1:]]
            await asyncio.gather(*waiting)
            monkeypatch.setattr(windows[0]._group, "recv", broken)
            for window in windows[1:]:
                with pytest.raises(aiodist.PeerLostError, match="what is that"):
                    await window.get(0)
                    await window.get(0)  # the first was taken by the receive before
            with pytest.raises(aiodist.GroupClosedError, match="what is that"):
                windows[0].get(0)
            await asyncio.gather(*[group.barrier() for group in ranks])  # the others are well
            for window in windows[1:]:
                with pytest.raises(aiodist.PeerLostError):
                    await window.close()

    run(main())
    assert any(record.exc_info and record.levelname == "ERROR" for record in caplog.records)
    caplog.clear()  # what it was raised in holds the ranks' memory


def test_nothing_holds_the_memory_of_a_closed_window(run, groups):
    class Memory(np.ndarray):
        """One that can be watched."""

    async def main():
        async with groups(2) as ranks:
            x = np.zeros(4).view(Memory)
            watched = weakref.ref(x)
            windows = await windows_of(ranks, [x, None])
            await windows[1].put(0, 0, 1.0)
            await close_all(windows)
            del x
            gc.collect()
            assert watched() is None
            await windows[0].close()  # once more

    run(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_tasks_of_one_rank_close_a_window_together(run, groups, is_cancelled):
    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(4), None])
            closing = [asyncio.create_task(one.close()) for _ in range(3)]
            await asyncio.sleep(0)
            if is_cancelled:  # the other tasks go on waiting
                closing[0].cancel()
            await two.close()
            errors = await asyncio.gather(*closing, return_exceptions=True)
            assert [type(error) for error in errors[1:]] == [type(None)] * 2
            assert isinstance(errors[0], asyncio.CancelledError if is_cancelled else type(None))

    run(main())


def test_a_close_ends_if_all_tasks_that_wait_for_it_are_cancelled(run, groups):
    """It does not wait for what is pending."""

    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [None, np.zeros(LARGE)])
            stop_serving(two)
            put = one.put(1, ..., np.ones(LARGE), timeout=math.inf)
            closing = [asyncio.create_task(one.close()) for _ in range(2)]
            await asyncio.sleep(0)
            for task in closing:
                task.cancel()
            await asyncio.wait(closing)
            assert all(task.cancelled() for task in closing)
            with pytest.raises(aiodist.GroupClosedError):
                await put
            with pytest.raises((aiodist.CollectiveAbortedError, aiodist.PeerLostError)):
                await two.close()
            await asyncio.gather(one.close(), two.close())  # both are closed

    run(main())


@pytest.mark.parametrize("is_called_again", [False, True])
def test_a_close_that_is_cancelled_at_any_time_closes_the_window(run, groups, is_called_again):
    async def main():
        async with groups(2) as ranks:
            for turns in range(1, 13):
                one, two = await windows_of(ranks, [np.zeros(4), np.zeros(4)])
                closing = [asyncio.create_task(window.close()) for window in (two, one)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                closing[1].cancel()
                await asyncio.sleep(0)
                if is_called_again:  # by a task that is not cancelled
                    await one.close()
                await asyncio.wait(closing)
                assert one._group.closed and one._x is None, turns
                await one.close()

    run(main())


def test_windows_end_with_their_group(run, groups):
    async def main():
        async with groups(2) as ranks:
            windows = await windows_of(ranks, [np.zeros(4), np.zeros(4)])
            ranks[0].revoke()
            await windows[0].put(1, 0, 1.0)  # a group of its own
        with pytest.raises(aiodist.GroupClosedError):
            windows[0].get(1)
        assert all(task.done() for window in windows for task in window._serving)

    run(main())


def test_a_block_that_fails_leaves_no_window(run, groups):
    """It does not wait for what is pending, and the others hear why."""

    async def main():
        async with groups(2) as ranks:
            one, two = await windows_of(ranks, [np.zeros(LARGE), None])
            stop_serving(one)
            with pytest.raises(LookupError):
                async with two:
                    put = two.put(0, ..., np.ones(LARGE), timeout=math.inf)
                    raise LookupError("of rank 1")
            with pytest.raises(aiodist.GroupClosedError, match="LookupError: of rank 1"):
                await put
            with pytest.raises(aiodist.PeerLostError, match="LookupError: of rank 1"):
                await one.fence()
            await asyncio.gather(one.close(), two.close(), return_exceptions=True)
            assert one._group.closed and two._group.closed

    run(main())
