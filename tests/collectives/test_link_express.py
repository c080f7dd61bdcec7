"""Small all-reduces over sockets that are done within the call, beside ordinary ones."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest
from over_links import OVER_SOCKETS, exchanging_lengths, nothing_is_left, ordinary, until

import aiodist
from aiodist import ReduceOp
from aiodist.engine import deadlines
from aiodist.prepared.link_express import LinkExpress, LinkRecipe
from aiodist.transports import polling
from aiodist.transports.framed import FramedLink

pytestmark = OVER_SOCKETS


async def learn(ranks, *arrays):
    """Have all ranks connected to their partners, by the ordinary way."""
    for array in arrays:
        await asyncio.gather(*[group.all_reduce(array.copy()) for group in ranks])


async def test_the_last_rank_is_done_within_its_call(groups, every_tag):
    async with groups(2) as ranks:
        assert all(type(group._context.express) is LinkExpress for group in ranks)
        x = np.arange(5.0)
        await learn(ranks, x)
        for early in (False, True):
            mine, theirs = x.copy(), x + 1
            first = ranks[0].all_reduce(mine)
            if early:
                await until(lambda: ranks[1]._context.calls.arrivals.early)
            second = ranks[1].all_reduce(theirs)
            assert second.done()
            assert (second.op, second.tag, second.seq, second.nbytes) == (
                "all_reduce",
                every_tag,
                1 + early,
                40,
            )
            assert second.result() is theirs
            assert await first is mine
            assert first.seq == second.seq
            assert (mine == 2 * x + 1).all()
            assert (theirs == 2 * x + 1).all()
        nothing_is_left(ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, "f4"),
        (ReduceOp.AVG, "f4"),
        (ReduceOp.AVG, "f2"),
        (ReduceOp.SUM, "f2"),
        (ReduceOp.MAX, "i2"),
        (ReduceOp.premul_sum(0.5), "f8"),
        (ReduceOp.PRODUCT, "c8"),
        (ReduceOp.LAND, "i4"),
    ],
    ids=str,
)
async def test_it_gives_what_the_ordinary_way_gives(groups, size, op, dtype):
    random = np.random.default_rng(size)
    values = [(random.normal(size=(3, 7)) * 10).astype(dtype) for _ in range(size)]
    async with groups(size) as ranks:
        arrays = [value.copy() for value in values]
        await asyncio.gather(*[g.all_reduce(x, op) for g, x in zip(ranks, arrays, strict=True)])
        for first in range(size):  # another one is late each time, and some go the ordinary way
            again = [value.copy() for value in values]
            order = [*range(first, size), *range(first)]
            with ordinary(ranks[first]) if first % 2 else ExitStack():
                works = [ranks[rank].all_reduce(again[rank], op) for rank in order]
                await asyncio.gather(*works)
            for x, expected in zip(again, arrays, strict=True):
                assert x.tobytes() == expected.tobytes()
        nothing_is_left(ranks)


@pytest.mark.parametrize("size", [2, 3, 5])
async def test_recipes_share_the_memory_of_partial_results(groups, size):
    """One call at a time uses it, whatever it reduces."""
    async with groups(size) as ranks:
        for number in range(60):
            # Lengths and bytes of a number change up and down.
            length, dtype = 2000 + number * (-1) ** number, ("f4", "f2", "f8")[number % 3]
            works = [g.all_reduce(np.full(length, g.rank + 1, dtype)) for g in ranks]
            for found in await asyncio.gather(*works):
                assert (found == size * (size + 1) / 2).all()
        for group in ranks:
            recipes = [*group._context.express._recipes.values()]
            assert len(recipes) >= 60  # one more if the first call had none
            memories = [recipe.phase.memory for recipe in recipes]
            cells = {cell for memory in memories for cell in memory._cells}
            views = [view for memory in memories for view, _ in memory._cells.values()]
            views += [memory._result for memory in memories if memory._result is not None]
            places = {np.asarray(view).ctypes.data for view in views}
            assert len(places) <= 4 * (len(cells) + 1)


async def test_large_numbers_are_written_as_others_write_them(groups, every_tag):
    async with groups(2) as ranks:
        x = np.ones(3, np.float32)
        await learn(ranks, x)
        for start in (126, 254, 65534, 2**32 - 2):
            for group in ranks:
                group._context.calls.tags.numbers[every_tag] = start
            for turn in range(4):
                arrays = [x.copy(), x.copy()]
                with ordinary(ranks[turn % 2]):
                    works = [g.all_reduce(y) for g, y in zip(ranks, arrays, strict=True)]
                    await asyncio.gather(*works)
                assert [work.seq for work in works] == [start + turn] * 2
                assert (arrays[0] == 2).all()
        nothing_is_left(ranks)


@pytest.mark.parametrize("who", [0, 1])
async def test_different_calls_are_told(groups, who):
    async with groups(2) as ranks:
        x, y = np.ones(3), np.ones(4)
        await learn(ranks, x, y)
        works = [ranks[who].all_reduce(x), ranks[1 - who].all_reduce(y)]
        await asyncio.wait(works)
        for work in works:
            error = work.exception()
            assert isinstance(error, aiodist.MismatchError)
            assert "float64[3]" in str(error)
            assert "float64[4]" in str(error)
        await learn(ranks, x, y)
        nothing_is_left(ranks)


async def test_a_cancelled_one_is_given_up_by_all(groups):
    async with groups(3) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        works = [ranks[rank].all_reduce(x.copy()) for rank in (0, 1)]
        assert not any(work.done() for work in works)
        works[0].cancel()
        with pytest.raises(aiodist.CollectiveAbortedError):
            await works[1]
        with pytest.raises(aiodist.CollectiveAbortedError):
            await ranks[2].all_reduce(x.copy())
        await learn(ranks, x)
        nothing_is_left(ranks)


async def test_a_word_right_behind_the_contribution_counts(groups):
    """Both have come when the late rank calls: it fails, though it could have completed."""
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        ranks[0].all_reduce(x.copy()).cancel()
        late = ranks[1].all_reduce(x.copy())
        assert late.done()
        with pytest.raises(aiodist.CollectiveAbortedError):
            await late
        await learn(ranks, x)
        nothing_is_left(ranks)


async def test_who_asks_gets_an_answer(groups, every_tag):
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        first = ranks[0].all_reduce(x.copy())
        context = ranks[0]._context
        operation = context.calls.ops[every_tag, first.seq]
        deadlines.inquire(context.calls, operation, 1.0)
        await until(lambda: operation.seen)  # "not entered": rank 1 keeps the question
        second = ranks[1].all_reduce(x.copy())
        await asyncio.gather(first, second)
        nothing_is_left(ranks)


async def test_a_deadline_passes_while_it_waits(groups):
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await ranks[0].all_reduce(x.copy(), timeout=0.05)
        assert caught.value.missing == (1,)
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await ranks[1].all_reduce(x.copy())
        await learn(ranks, x)
        nothing_is_left(ranks)


async def test_a_peer_leaves_while_it_waits(groups):
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        work = ranks[0].all_reduce(x.copy())
        ranks[1].abort("enough")
        with pytest.raises(aiodist.AiodistError, match=r"enough|lost"):
            await work


async def test_others_pending_do_not_matter(groups):
    """Tagged ones that wait, untagged ones that overlap: each gets its own data."""
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        waiting = ranks[0].all_reduce(np.full(3, 10.0), tag="later")
        works = []
        for number in range(20):
            order = [ranks[number % 2], ranks[1 - number % 2]]
            works += [(number, group.all_reduce(x * number)) for group in order]
        other = ranks[1].all_reduce(np.full(3, 20.0), tag="later")
        for number, work in works:
            assert (await work == 2 * number).all()
        assert (await waiting == 30).all()
        assert (await other == 30).all()
        nothing_is_left(ranks)


async def test_messages_come_in_between(groups):
    async with groups(2) as ranks:
        x = np.ones(3)
        await learn(ranks, x)
        sends = [ranks[0].send(np.full(length, 7.0), 1) for length in (3, 200_000)]
        first = ranks[0].all_reduce(x.copy())
        second = ranks[1].all_reduce(x.copy())
        for length in (3, 200_000):
            value = await ranks[1].recv()
            assert value.shape == (length,)
            assert (value == 7).all()
        assert (await first == 2).all()
        assert (await second == 2).all()
        await asyncio.gather(*sends)


async def test_torch_is_told(groups):
    torch = pytest.importorskip("torch")
    async with groups(2) as ranks:
        for _ in range(3):
            tensors = [torch.ones(3), torch.ones(3)]
            versions = [tensor._version for tensor in tensors]
            works = [g.all_reduce(t) for g, t in zip(ranks, tensors, strict=True)]
            await asyncio.gather(*works)
            for tensor, version in zip(tensors, versions, strict=True):
                assert tensor.tolist() == [2, 2, 2]
                assert tensor._version > version


@pytest.mark.parametrize("size", [2, 4])
async def test_at_once_sends_what_the_executor_sends(groups, monkeypatch, size):
    """Frame by frame, whoever is late, and with the same results."""
    real = FramedLink.send_copy

    async def outcome(at_once):
        monkeypatch.setattr(LinkRecipe, "has_rounds", property(lambda self: at_once))
        sent, results = [], []
        monkeypatch.setattr(
            FramedLink,
            "send_copy",
            lambda link, prefix, data: (
                sent.append((prefix[-30:], bytes(data))),
                real(link, prefix, data),
            ),
        )
        async with groups(size) as ranks:
            await learn(ranks, np.ones(3))
            sent.clear()
            for first in range(size):
                arrays = [np.arange(3.0) * rank + first for rank in range(size)]
                order = [*range(first, size), *range(first)]
                await asyncio.gather(*[ranks[rank].all_reduce(arrays[rank]) for rank in order])
                results += [array.tobytes() for array in arrays]
            nothing_is_left(ranks)
        assert sent
        return sorted(sent), results

    assert await outcome(True) == await outcome(False)


async def test_who_calls_late_hears_of_it_over_a_link_that_the_call_does_not_need(
    groups, monkeypatch
):
    """Rank 3 gives up when the partners of rank 0, ranks 1 and 2, have sent all that it needs."""
    monkeypatch.setattr(polling, "UNREAD", 0.0)
    async with groups(4) as ranks:
        x = np.arange(5.0)
        await learn(ranks, x)
        # So every rank is linked to all others.
        await asyncio.gather(*[group.all_to_all([1] * 4) for group in ranks])
        arrays = [x.copy() for _ in ranks]
        # The loop has no turn from here to the call of rank 0: so nothing is read meanwhile.
        others = [ranks[rank].all_reduce(arrays[rank]) for rank in (3, 2, 1)]
        assert not any(work.done() for work in others)
        others[0].cancel()
        late = ranks[0].all_reduce(arrays[0])
        for work in (late, others[1], others[2]):
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                await work
            assert caught.value.rank == 3
        for array in arrays:
            array[:] = x
        await asyncio.gather(*[g.all_reduce(a) for g, a in zip(ranks, arrays, strict=True)])
        assert all((array == 4 * x).all() for array in arrays)
        nothing_is_left(ranks)


@pytest.mark.parametrize("waits", [False, True])
async def test_two_values_that_exchange_their_lengths(groups, waits):
    """Their frame is as long as expected, but a part of it that is sent on is not."""
    async with groups(7) as ranks:
        await exchanging_lengths(ranks, waits)
        nothing_is_left(ranks)
