"""`Group.empty`: arrays that all ranks of a host see; elsewhere arrays like others."""

from __future__ import annotations

import asyncio
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from aiodist import CollectiveAbortedError, GroupClosedError, MismatchError, ReduceOp
from aiodist.phases.pulls import PAUSE
from aiodist.shared_memory.board import AREAS
from aiodist.shared_memory.heap import address_of
from aiodist.transports import polling as progress

pytestmark = pytest.mark.strength(2)

MANY = 50_000
"""float32 elements: more than what everyone reduces for itself."""


async def shown(ranks):
    """All have mapped the arrays of all, and share memory."""
    await asyncio.gather(*[group.barrier() for group in ranks])
    await until(lambda: all(g._context.heap.shows_any and g._context.express for g in ranks))


async def until(condition):
    """Give the loop turns until `condition()`."""
    async with asyncio.timeout(20):
        while not condition():
            await turn()


def is_seen(group, array):
    """Whether all others have mapped an array of `Group.empty`."""
    return group._context.heap.place_of([array]) > 0


def turn():
    """One turn of the loop."""
    return asyncio.sleep(0)


def untouched(group):
    """Whether nothing large was ever staged. Offers are small; whole elements are looked at, for
    the first bytes of 1.0 are zero."""
    areas = [group._context.lane.board.area(group.rank, index) for index in range(len(AREAS))]
    return not any(any(area[16384 + byte :: 4096]) for area in areas for byte in range(4))


def mapped():
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("aiodist-array")


def test_what_it_gives(run, groups):
    async def main():
        async with groups(2) as (group, _):
            array = group.empty((3, 4), np.float64)
            assert isinstance(array, np.ndarray)
            assert (array.shape, array.dtype) == ((3, 4), np.float64)
            assert not array.any()
            array += 1
            tensor = group.empty(5, torch.bfloat16)
            assert (tuple(tensor.shape), tensor.dtype) == ((5,), torch.bfloat16)
            assert group.empty([2], "int16").dtype == np.int16
            assert group.empty(2, like=tensor).dtype == torch.bfloat16
            assert group.empty((), like=array).shape == ()
            assert group.empty((0, 3), like=array).shape == (0, 3)
            assert group.empty(np.prod((2, 3)), "int16").shape == (6,)
            assert group.empty(np.array([2, 3]), "int16").shape == (2, 3)

    run(main())


@pytest.mark.parametrize(
    ("shape", "options", "error", "text"),
    [
        (3, {}, TypeError, "give a dtype, or like="),
        (3, {"dtype": "f4", "like": np.ones(1)}, TypeError, "give a dtype, or like="),
        (3, {"dtype": object}, TypeError, "does not travel"),
        (3, {"dtype": torch.qint8}, TypeError, "does not travel"),
        (3, {"like": "text"}, TypeError, "expected an array, got str"),
        ((3, -1), {"dtype": "f4"}, ValueError, "negative"),
        (1.5, {"dtype": "f4"}, TypeError, "shape is an int or a sequence of ints, not 1.5"),
        ((3, 1.5), {"dtype": "f4"}, TypeError, "each size in shape is an int, not 1.5"),
    ],
)
def test_what_it_refuses(run, groups, shape, options, error, text):
    async def main():
        async with groups(2) as (group, _):
            with pytest.raises(error, match=text):
                group.empty(shape, **options)

    run(main())


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("transport", ["shm"])
def test_nothing_is_staged(run, groups, everyone, size, transport):
    async def main():
        async with groups(size) as ranks:
            wholes = [group.empty((2, MANY), np.float32) for group in ranks]
            tensors = [torch.from_numpy(whole) for whole in wholes]
            await shown(ranks)
            total = size * (size + 1) / 2
            for parts in (wholes, tensors, [whole[1] for whole in wholes]):
                for group, part in zip(ranks, parts, strict=True):
                    part[...] = group.rank + 1
                results = await everyone(ranks, lambda g, parts=parts: g.all_reduce(parts[g.rank]))
                for group, part, result in zip(ranks, parts, results, strict=True):
                    assert result is part
                    assert (part == total).all()
                    assert untouched(group)
            works = [g.all_reduce(wholes[g.rank], ReduceOp.MAX) for g in ranks]
            await asyncio.gather(*works)
            assert all(map(untouched, ranks))

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_nothing_is_staged_after_calls_with_other_arrays(run, groups, everyone, transport):
    async def main():
        async with groups(2) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            await until(lambda: all(group._context.express for group in ranks))
            others = [np.zeros(MANY, np.float32) for _ in ranks]  # zeros leave no trace
            for _ in range(4):
                await everyone(ranks, lambda g: g.all_reduce(others[g.rank]))
            wholes = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            for whole in wholes:
                whole[...] = 1
            await everyone(ranks, lambda g: g.all_reduce(wholes[g.rank]))
            assert all((whole == 2).all() for whole in wholes)
            assert all(map(untouched, ranks))

    run(main())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm"])
def test_what_is_moved_is_not_staged(run, groups, everyone, size, transport):
    async def main():
        async with groups(size) as ranks:
            wholes = [group.empty((size, MANY), np.float32) for group in ranks]
            await shown(ranks)
            for group, whole in zip(ranks, wholes, strict=True):
                whole[...] = 10 * (group.rank + 1) + np.arange(size)[:, None]

            results = await everyone(ranks, lambda g: g.all_gather(wholes[g.rank][0]))
            for result in results:
                for rank, array in enumerate(result):
                    assert (array == 10 * (rank + 1)).all()
            results = await everyone(ranks, lambda g: g.all_to_all(list(wholes[g.rank])))
            for rank, result in enumerate(results):
                for src, array in enumerate(result):
                    assert (array == 10 * (src + 1) + rank).all()
            x = {0: {"a": torch.from_numpy(wholes[0]), "b": "text"}}
            results = await everyone(ranks, lambda g: g.broadcast(x.get(g.rank)))
            for result in results:
                assert result["b"] == "text"
                assert (result["a"].numpy() == wholes[0]).all()
            results = await everyone(ranks, lambda g: g.gather(wholes[g.rank][1], dst=1))
            for rank, array in enumerate(results[1]):
                assert (array == 10 * (rank + 1) + 1).all()
            slots = {1: list(wholes[1])}
            results = await everyone(ranks, lambda g: g.scatter(slots.get(g.rank), src=1))
            for rank, array in enumerate(results):
                assert (array == 20 + rank).all()
            results = await everyone(ranks, lambda g: g.reduce_scatter(wholes[g.rank]))
            for rank, array in enumerate(results):
                assert (array == 10 * sum(range(size + 1)) + size * rank).all()
            assert all(map(untouched, ranks))

            # Where one of them lies elsewhere, that one is staged.
            wholes[1] = wholes[1].copy()
            results = await everyone(ranks, lambda g: g.all_gather(wholes[g.rank][0]))
            for result in results:
                for rank, array in enumerate(result):
                    assert (array == 10 * (rank + 1)).all()
            assert [untouched(group) for group in ranks] == [rank != 1 for rank in range(size)]

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_a_message_is_read_where_it_lies(run, groups, transport):
    async def main():
        async with groups(2) as (sender, receiver):
            x = sender.empty((2, 1 << 20), np.float32)
            x[...] = [[1], [2]]
            out = receiver.empty(1 << 20, np.float32)
            await shown((sender, receiver))
            for part in (x[1], torch.from_numpy(x[1])):
                before = receiver._context.endpoint.traffic.moved.received
                sending = sender.send(part, 1)
                receiving = receiver.recv(src=0, out=out)
                await asyncio.gather(sending, receiving)
                assert (out == 2).all()
                assert receiver._context.endpoint.traffic.moved.received - before == out.nbytes
            # Two parts that do not lie one behind the other are sent as others are.
            receiving = receiver.recv(src=0)
            await asyncio.gather(sender.send(x[:, : 1 << 19], 1), receiving)
            assert (receiving.result() == [[1], [2]]).all()

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_reading_goes_on_until_all_have_read(run, groups, transport):
    """A slow reader keeps the array: until it has read, the others are not done."""

    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            for array in arrays:
                array[...] = 1
            first = ranks[0].reduce_scatter(arrays[0])
            for _ in range(20):
                await turn()
            assert not first.done()
            arrays[1][...] = 2
            second = ranks[1].reduce_scatter(arrays[1])
            assert (await first == 3).all()
            arrays[0][...] = 7
            assert (await second == 3).all()

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_where_one_rank_has_another_array(run, groups, everyone, transport):
    async def main():
        async with groups(3) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            arrays[1] = np.empty(MANY, np.float32)
            other = [np.empty(2 * MANY, np.float32)[::2] for _ in ranks]
            for mixed in (arrays, [arrays[0], other[1], arrays[2]]):
                for group, array in zip(ranks, mixed, strict=True):
                    array[...] = group.rank
                await everyone(ranks, lambda g, mixed=mixed: g.all_reduce(mixed[g.rank]))
                assert all((array == 3).all() for array in mixed)

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_a_cancel_frees_the_array(run, groups, everyone, transport):
    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            for array in arrays:
                array[...] = 1
            first, second = (g.all_reduce(arrays[g.rank]) for g in ranks)
            first.cancel()
            arrays[0][...] = 7
            with pytest.raises(CollectiveAbortedError) as caught:
                await second
            assert caught.value.rank == 0
            arrays[1][...] = 2
            await everyone(ranks, lambda g: g.all_reduce(arrays[g.rank]))
            assert all((array == 9).all() for array in arrays)

    run(main())


@pytest.mark.parametrize("canceller", [0, 1])
@pytest.mark.parametrize(
    "call",
    [
        lambda group, array: group.reduce_scatter(array),
        lambda group, array: group.all_gather(array),
        lambda group, array: group.broadcast(array if group.rank == 0 else None),
    ],
)
@pytest.mark.parametrize("transport", ["shm"])
def test_a_cancel_frees_an_array_that_is_read(run, groups, everyone, transport, call, canceller):
    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            for array in arrays:
                array[...] = 1
            works = [call(group, array) for group, array in zip(ranks, arrays, strict=True)]
            works[canceller].cancel()
            arrays[canceller][...] = 7
            with pytest.raises(CollectiveAbortedError) as caught:
                await works[1 - canceller]
            assert caught.value.rank == canceller
            await everyone(ranks, lambda g: g.all_reduce(arrays[g.rank]))
            assert all((array == 8).all() for array in arrays)

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_what_is_made_of_an_array_that_was_taken_back(run, groups, transport, monkeypatch):
    """An operator that does not like what it is given says nothing of who called it off."""
    pieces = []

    def add(a, b):
        pieces.append(len(a))
        if (a > 50).any() or (b > 50).any():
            raise ValueError("too much")
        return a + b

    plus = ReduceOp.custom(add, commutative=True, elementwise=True, name="plus")

    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(8 * PAUSE // 4, np.float32) for group in ranks]
            await shown(ranks)
            for array in arrays:
                array[...] = 1
            first = ranks[0].reduce_scatter(arrays[0], plus)
            monkeypatch.setattr(progress, "LOOP_DUE", -1.0)
            second = ranks[1].reduce_scatter(arrays[1], plus)
            assert pieces
            assert sum(pieces) < len(arrays[1]) // 2
            first.cancel()
            arrays[0][...] = 99
            with pytest.raises(CollectiveAbortedError, match="cancelled"):
                await second
            works = [g.reduce_scatter(arrays[g.rank], plus) for g in ranks]
            with pytest.raises(CollectiveAbortedError, match="too much"):
                await works[0]
            with pytest.raises((CollectiveAbortedError, ValueError), match="too much"):
                await works[1]

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_memory_lives_as_long_as_its_last_view(run, groups, everyone, transport):
    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
            await shown(ranks)
            await everyone(ranks, lambda g: g.all_reduce(arrays[g.rank]))
            view = torch.from_numpy(arrays[0][10:20])
            arrays.clear()
            gc.collect()
            await until(lambda: mapped() <= 2)  # here and at the peer
            view += 1
            del view
            await until(lambda: not mapped())
            assert not any(g._context.heap.shows_any for g in ranks)

    run(main())


async def all_to_all(group, x):
    return np.concatenate(await group.all_to_all(list(x.reshape(group.size, -1))))


async def passed_on(group, x):
    return (await group.sendrecv(x, 1 - group.rank, src=1 - group.rank))[0]


@pytest.mark.parametrize("fresh", ["empty", "plain", "tensor"])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda group, x: group.all_reduce(x), lambda rank: 21),
        (lambda group, x: group.all_reduce(x, tag="t"), lambda rank: 21),
        (lambda group, x: group.reduce_scatter(x.reshape(2, -1)), lambda rank: 21),
        (lambda group, x: group.broadcast(x, 0), lambda rank: 10),
        (all_to_all, lambda rank: np.repeat([10, 11], MANY)),
        (lambda group, x: group.all_gather(x), lambda rank: [[10], [11]]),
        (passed_on, lambda rank: 11 - rank),
    ],
)
@pytest.mark.parametrize("transport", ["shm"])
def test_an_array_at_the_address_of_one_that_was_dropped(run, groups, fresh, call, expected):
    """The system gives the address again at once, where the others still map what was there."""

    def at(address, make):
        tried = []  # kept, so that no two of them get the same address
        while len(tried) < 50 and (not tried or address_of(tried[-1]) != address):
            tried.append(make())
        return tried.pop()

    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(2 * MANY, np.float64) for group in ranks]
            kept = ranks[0].empty(1, np.float64)  # so that the group has something to look up
            await shown(ranks)
            await until(lambda: all(map(is_seen, [ranks[0], *ranks], [kept, *arrays])))
            for x in arrays:
                x[:] = -1
            del x
            address = address_of(arrays.pop(0))
            # The loop does not turn from here on.
            nbytes = arrays[0].nbytes
            if fresh == "empty":
                x = at(address, lambda: ranks[0].empty(2 * MANY, np.float64))
            else:
                x = at(address, lambda: np.frombuffer(mmap.mmap(-1, nbytes), np.float64))
            arrays.insert(0, torch.from_numpy(x) if fresh == "tensor" else x)
            for rank, x in enumerate(arrays):
                x[:] = 10 + rank
            works = [call(g, x) for g, x in zip(ranks, arrays, strict=True)]
            for rank, result in enumerate(await asyncio.gather(*works)):
                found = np.stack(result) if isinstance(result, list) else np.asarray(result)
                assert (found == expected(rank)).all()

    run(main())


def test_arrays_outlive_the_group(run, groups):
    async def main():
        async with groups(2) as ranks:
            arrays = [group.empty(MANY, np.float32) for group in ranks]
        for array in arrays:
            array += 1
        with pytest.raises(GroupClosedError):
            ranks[0].empty(3, np.float32)
        del array
        arrays.clear()

    run(main())


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("transport", ["shm"])
def test_what_is_gathered_may_lie_where_it_goes(run, groups, shift, flat, transport):
    """It is read where it lies, also after this rank has begun to write: in its own place it may
    stay, and goes from there without a copy; in that of another rank it is copied first."""

    async def main():
        async with groups(3) as ranks:
            outs = [group.empty((3, 4 * MANY), "f4") for group in ranks]
            await shown(ranks)
            works = []
            for group, out in zip(ranks, outs, strict=True):
                x = out[(group.rank + shift) % 3]
                x[:] = group.rank + 1
                works.append(group.all_gather(x, out=out.reshape(-1) if flat else out))
            await asyncio.gather(*works)
            for out in outs:
                assert (out == np.array([[1], [2], [3]])).all()
            if not shift:
                assert all(map(untouched, ranks))

    run(main())


@pytest.mark.parametrize("transport", ["shm"])
def test_what_others_were_told_to_read_lies_where_results_go(run, groups, transport):
    """Rank 1 takes that for its own place; nobody can know better before all have said how long
    their values are, and then it is too late."""

    async def main():
        async with groups(3) as ranks:
            n = 4 * MANY
            outs = [group.empty(3 * n, "f4") for group in ranks]
            await shown(ranks)
            works = []
            for group, out in zip(ranks, outs, strict=True):
                start = group.rank * n - (group.rank == 2)
                works.append(group.all_gather(out[start:][: n - 1 + group.rank], out=out))
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
                assert "x lies in out where the value of another rank goes" in result.calls[1]
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [3] * 3

    run(main())
