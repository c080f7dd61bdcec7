"""Small reductions with tags, of ranks that share memory, as programs call them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from idle_time import on_idle_time
from sharing import unmapping_all

import aiodist
from aiodist import CollectiveAbortedError, CollectiveTimeoutError, MismatchError, ReduceOp, trace
from aiodist.engine import waiting_calls
from aiodist.prepared import post_express
from aiodist.rank import doings

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

torch = pytest.importorskip("torch")


async def everyone(ranks, start):
    return list(await asyncio.gather(*[start(group) for group in ranks]))


@asynccontextmanager
async def sharing(size):
    async with aiodist.local(size, transports=("shm",), op_timeout=30.0) as ranks:
        while any(group._context.post_express is None for group in ranks):
            await everyone(ranks, lambda g: g.barrier(tag="begin"))
        yield ranks


@pytest.fixture
def posted(monkeypatch):
    """The calls that were posted, by tag and number."""
    seen, noted = [], set()
    real = post_express.PostExpress._use_compiled

    def noting(express, start):
        def note(*args):
            tag, posted = args[-1], express._posts._head
            number = express._calls.tags.upcoming(tag)
            work = start(*args)
            call = express, tag, number
            if express._posts._head > posted and tag != "begin" and call not in noted:
                noted.add(call)  # count once, because the compiled part may call the Python code
                seen.append((tag, number))
            return work

        return note

    def use(self, *args, **more):
        real(self, *args, **more)
        for name in ("all_reduce", "_run", "start"):
            setattr(self, name, noting(self, getattr(self, name)))

    monkeypatch.setattr(post_express.PostExpress, "_use_compiled", use)
    return seen


MAKES = {
    "numpy": lambda n: np.full(n, 2.0),
    "torch": lambda n: torch.full((n,), 2.0),
    "long": lambda n: np.full(n * 1000, 2.0),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("tag", ["a", 7, -(1 << 62)])
def test_who_comes_last_is_done_within_the_call(run, posted, make, tag):
    async def main():
        async with sharing(3) as ranks:
            for _ in range(3):
                arrays = [make(3) for _ in ranks]
                works = [
                    group.all_reduce(x, tag=tag) for group, x in zip(ranks, arrays, strict=True)
                ]
                assert [work.done() for work in works] == [False, False, True]
                for work, x in zip(works, arrays, strict=True):
                    assert await work is x
                    assert (x == 6.0).all()
            assert posted == [(tag, number) for number in range(3) for _ in ranks]
            (entry, *_) = [
                one
                for one in ranks[2]._context.endpoint.recorder.entries(0.0)
                if (one.tag, one.seq) == (tag, 2)
            ]
            assert entry.state == "done"

    run(main())


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


KINDS = {
    "broadcast": lambda g, **k: g.broadcast(np.arange(3.0) if g.rank == 1 else None, 1, **k),
    "broadcast in place": lambda g, **k: g.broadcast(np.full(3, 1.0 + g.rank), 1, **k),
    "broadcast of a tensor": lambda g, **k: g.broadcast(torch.full((3,), 1.0 + g.rank), 1, **k),
    "tree": lambda g, **k: g.broadcast(
        {"a": np.ones(2), "b": "x"} if g.rank == 1 else None, 1, **k
    ),
    "all_gather": lambda g, **k: g.all_gather(np.full(2, g.rank), **k),
    "all_gather of all sizes": lambda g, **k: g.all_gather(np.full(g.rank + 1, g.rank), **k),
    "gather": lambda g, **k: g.gather(np.full(2, g.rank), 1, **k),
    "scatter": lambda g, **k: g.scatter(
        [np.full(2, dst) for dst in range(g.size)] if g.rank == 1 else None, 1, **k
    ),
    "all_to_all": lambda g, **k: g.all_to_all(
        [np.full(2, 10 * g.rank + dst) for dst in range(g.size)], **k
    ),
    "barrier": lambda g, **k: g.barrier(**k),
    "reduce": lambda g, **k: g.reduce(np.full(2, 1.0 + g.rank), 1, **k),
    "reduce of a tensor": lambda g, **k: g.reduce(torch.full((2,), 1.0 + g.rank), 1, **k),
    "reduce_scatter": lambda g, **k: g.reduce_scatter(np.arange(7.0) + g.rank, **k),
    "reduce_scatter of slots": lambda g, **k: g.reduce_scatter(
        [np.full(slot + 1, 1.0 + g.rank) for slot in range(g.size)], ReduceOp.MAX, **k
    ),
    "reduce_scatter of numbers": lambda g, **k: g.reduce_scatter([g.rank] * g.size, **k),
    "number": lambda g, **k: g.all_reduce(1 + g.rank, **k),
    "scan": lambda g, **k: g.scan(np.full(2, 1.0 + g.rank), **k),
}


@pytest.mark.parametrize("start", KINDS.values(), ids=KINDS)
def test_every_kind_is_posted(run, posted, start):
    async def main():
        async with sharing(3) as ranks:
            due = plain(await everyone(ranks, start))
            for _ in range(3):
                works = [start(group, tag="a") for group in ranks]
                assert plain(await asyncio.gather(*works)) == due
            works = [start(group, tag="a") for group in ranks]
            assert [work.done() for work in works] == [False, False, True]
            assert plain(await asyncio.gather(*works)) == due
            assert posted == [("a", number) for number in range(4) for _ in ranks]
            many = [start(g, tag=tag) for tag in "bcd" for g in ranks]
            assert plain(await asyncio.gather(*many)) == due * 3

    run(main())


LARGE = {
    "all_reduce": lambda g, x, **k: g.all_reduce(x, **k),
    "all_reduce to another array": lambda g, x, **k: g.all_reduce(x, out=np.empty_like(x), **k),
    "reduce": lambda g, x, **k: g.reduce(x, 1, **k),
    "reduce_scatter": lambda g, x, **k: g.reduce_scatter(x, **k),
}


@pytest.mark.parametrize("start", LARGE.values(), ids=LARGE)
def test_a_group_that_ends_unmaps_its_memory_without_the_collector(run, start):
    async def main():
        async with sharing(3) as ranks:
            for length in (8, 1 << 15, 1 << 18):
                for _ in range(6):
                    await everyone(ranks, lambda g, n=length: start(g, np.ones(n), tag="a"))

    with unmapping_all():
        run(main())


@pytest.mark.parametrize("nbytes", [1 << 18, 3 << 20])
@pytest.mark.parametrize("start", LARGE.values(), ids=LARGE)
def test_large_reductions_are_prepared(run, posted, start, nbytes, monkeypatch):
    """None of them starts a program, not even the first one."""

    async def main():
        async with sharing(3) as ranks:
            monkeypatch.setattr(post_express, "PostedProgram", None)
            for number in range(3):
                arrays = [np.arange(nbytes // 8) + float(group.rank) for group in ranks]
                found = await everyone(
                    ranks, lambda g, arrays=arrays: start(g, arrays[g.rank].copy(), tag="a")
                )
                total = sum(arrays)
                slots = np.array_split(total, 3)
                for rank, result in enumerate(found):
                    if result is None:
                        assert (start, rank) in ((LARGE["reduce"], 0), (LARGE["reduce"], 2))
                    else:
                        due = slots[rank] if start is LARGE["reduce_scatter"] else total
                        assert (result == due).all()
                assert posted == [("a", each) for each in range(number + 1) for _ in ranks]

    run(main())


MEDIUM = {
    "broadcast": lambda g, x, **k: g.broadcast(x if g.rank == 1 else None, 1, **k),
    "all_gather": lambda g, x, **k: g.all_gather(x, **k),
    "gather": lambda g, x, **k: g.gather(x, 1, **k),
    "scatter": lambda g, x, **k: g.scatter([x, x] if g.rank == 1 else None, 1, **k),
    "all_to_all": lambda g, x, **k: g.all_to_all([x, x], **k),
    "reduce_scatter": lambda g, x, **k: g.reduce_scatter(np.concatenate([x, x]), **k),
}


@pytest.mark.parametrize("start", MEDIUM.values(), ids=MEDIUM)
def test_up_to_three_mebibytes_are_posted(run, posted, start, monkeypatch):
    """They are prepared, too: once they are known, they start no program."""
    nbytes = 1 << 20 if start is MEDIUM["reduce_scatter"] else 3 << 19

    async def main():
        async with sharing(2) as ranks:
            for number in range(5):
                if number == 3:
                    monkeypatch.setattr(post_express, "PostedProgram", None)
                values = [np.full(nbytes // 8, 1.0 + number + group.rank) for group in ranks]
                found = await everyone(ranks, lambda g, v=values: start(g, v[g.rank], tag="a"))
                shown = [{*np.ravel(result)[::5000]} for result in found if result is not None]
                every = {1.0 + number, 2.0 + number}
                if start in (MEDIUM["broadcast"], MEDIUM["scatter"]):
                    every = {2.0 + number}
                elif start is MEDIUM["reduce_scatter"]:
                    every = {3.0 + 2 * number}
                assert shown == [every] * (1 if start is MEDIUM["gather"] else 2)
                assert posted == [("a", each) for each in range(number + 1) for _ in ranks]

    run(main())


def test_a_slot_of_the_largest_size_may_be_a_frame(run, monkeypatch):
    """With the words before it, the frame has more than a mebibyte."""

    async def main():
        async with sharing(2) as ranks:
            own = ranks[0]._context.post_express._posts
            for name, answer in (("put_parts", -1), ("has_room", False)):
                monkeypatch.setattr(own, name, lambda *_, answer=answer: answer)
            values = [np.full(2 << 17, 1.0 + group.rank) for group in ranks]
            for result in await everyone(
                ranks, lambda g: g.reduce_scatter(values[g.rank], tag="a")
            ):
                assert result.nbytes == 1 << 20
                assert {*result} == {3.0}

    run(main())


def test_what_does_not_fit_on_one_rank_is_written_on_none(run):
    async def main():
        async with sharing(3) as ranks:
            arrays = [np.zeros(3) for _ in ranks]
            for _ in range(3):
                works = [g.broadcast(x, 0, tag="a") for g, x in zip(ranks, arrays, strict=True)]
                await asyncio.gather(*works)
            arrays[0][:] = 1
            short = np.zeros(2)
            places = [*arrays[:2], short]
            works = [g.broadcast(x, 0, tag="a") for g, x in zip(ranks, places, strict=True)]
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(error, MismatchError)
            assert not arrays[1].any()
            assert not short.any()

    run(main())


def test_a_post_has_its_own_length_even_if_another_was_learnt_since_the_call(run, monkeypatch):
    async def main():
        async with sharing(2) as ranks:

            def gather(rank, length, tag):
                return ranks[rank].all_gather(np.full(length, rank), tag=tag)

            for tag in "abab":
                await asyncio.gather(gather(0, 3, tag), gather(1, 200, tag))
            works = [gather(0, 3, "a"), gather(1, 300, "a")]
            # Rank 0 takes the post for a, which has another length, within its call of b. Then it
            # looks for a moment, in which rank 1 posts for b.
            monkeypatch.setattr(
                ranks[0]._context.post_express,
                "_news",
                lambda call: works.append(gather(1, 200, "b")) or True,
            )
            works.append(gather(0, 3, "b"))
            assert len(works) == 4 and works[3].done()
            for work, length in zip(works, (300, 300, 200, 200), strict=True):
                assert plain(await work) == [[0] * 3, [1] * length]

    run(main())


def test_ranks_that_call_something_else(run):
    async def main():
        async with sharing(3) as ranks:
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_gather(np.ones(2), tag="a"))
            works = [g.all_gather(np.ones(2), tag="a") for g in ranks[:2]]
            works.append(ranks[2].barrier(tag="a"))
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(error, MismatchError)
                assert error.calls[2] == "barrier()"
            await everyone(ranks, lambda g: g.all_gather(np.ones(2), tag="a"))

    run(main())


TOO_LARGE = 2**64

TAKE_NUMBERS = {
    "all_reduce": lambda g, x: g.all_reduce(x, tag="a"),
    "all_reduce avg": lambda g, x: g.all_reduce(x, ReduceOp.AVG, tag="a"),
    "reduce": lambda g, x: g.reduce(x, 0, tag="a"),
    "reduce_scatter": lambda g, x: g.reduce_scatter([x] * g.size, tag="a"),
    "scan": lambda g, x: g.scan(x, tag="a"),
    "exscan": lambda g, x: g.exscan(x, tag="a"),
}


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("start", TAKE_NUMBERS.values(), ids=TAKE_NUMBERS)
def test_a_number_that_is_too_large_is_refused_for_all(run, start, warm):
    """The call counts on its rank, and the others hear of it."""

    async def main():
        async with sharing(2) as ranks:
            for _ in range(warm):
                await everyone(ranks, lambda g: start(g, 1))
            early = start(ranks[0], 1)
            with pytest.raises(OverflowError):
                start(ranks[1], TOO_LARGE)
            with pytest.raises(CollectiveAbortedError, match="OverflowError"):
                await early
            assert await everyone(ranks, lambda g: g.all_reduce(1, tag="a")) == [2, 2]

    run(main())


def test_a_list_that_changes_after_the_call(run):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_to_all([np.ones(2), np.ones(2)], tag="a"))
            works = []
            for group in ranks:
                slots = [np.full(2, 1.0 + group.rank), np.full(2, 3.0 + group.rank)]
                works.append(group.all_to_all(slots, tag="a"))
                slots[:] = ["not", "these"]
                group._context.calls.waiting.settle()
            assert plain(await asyncio.gather(*works)) == [[[1, 1], [2, 2]], [[3, 3], [4, 4]]]

    run(main())


OTHERS = {
    "half": lambda g: g.all_reduce(np.ones(3, np.float16), tag="a"),
    "own": lambda g: g.all_reduce(np.ones(3), ReduceOp.custom(np.add), tag="a"),
}


@pytest.mark.parametrize("start", OTHERS.values(), ids=OTHERS)
def test_what_is_not_posted(run, posted, start):
    async def main():
        async with sharing(3) as ranks:
            for result in await everyone(ranks, start):
                assert np.all(np.asarray(result) == 3)
        assert not posted

    run(main())


def test_a_hook_hears_of_every_step(run, posted):
    points = []

    async def main():
        trace.install(lambda scope, point, *_: points.append(point))
        async with sharing(2) as ranks:
            points.clear()
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2), tag="a"))
        assert not posted

    run(main())
    for point in ("start", "entered", "before_complete"):
        assert points.count(point) == 2


@on_idle_time
@pytest.mark.parametrize("long", [0.0, 0.2, 1.0])
def test_deadlines_name_who_is_missing_and_count_from_the_call(run, posted, monkeypatch, long):
    monkeypatch.setattr(waiting_calls, "LONG", long)

    async def main():
        async with sharing(3) as ranks:
            works = [group.all_reduce(np.ones(2), tag="a", timeout=0.3) for group in ranks[:2]]
            for work in works:
                with pytest.raises(CollectiveTimeoutError, match=r"within 0\.3 s") as caught:
                    await work
                assert caught.value.missing == (2,)
                assert caught.value.tag == "a"

    run(main())
    assert posted


def test_a_late_rank_hears_why(run):
    async def main():
        async with sharing(2) as ranks:
            one = ranks[0].all_reduce(np.ones(2), tag="a")
            with pytest.raises(TypeError):
                ranks[1].all_reduce(np.ones(2), "no operator", tag="a")
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                await one
            assert caught.value.rank == 1
            works = [g.all_reduce(np.ones(2 + g.rank), tag="b") for g in ranks]
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(error, MismatchError)
                assert sorted(error.calls) == [0, 1]

    run(main())


def test_what_waits_is_seen(run):
    """A waiting call is among the pending Works, and the coordinator knows which rank is
    missing."""

    async def main():
        async with sharing(3) as ranks:
            works = [g.all_reduce(np.ones(2), tag="a") for g in ranks[:2]]
            context = ranks[0]._context
            assert context.pending == [works[0]]
            recorder = context.endpoint.recorder

            def noted():
                found = [one for one in recorder.entries(0.0, context.pending) if one.tag == "a"]
                return [(one.op, one.seq, one.call, one.state) for one in found]

            call = "all_reduce(SUM, float64[2])"
            assert noted() == [("all_reduce", 0, call, "waits")]
            context.calls.waiting.settle()
            (found,) = doings.pending_in(context)
            assert found.work is works[0]
            assert doings.wait_of(found, {0: 0, 1: 1, 2: 2}).op == "all_reduce"
            assert ranks[0]._context.pending == [works[0]]
            assert noted() == [("all_reduce", 0, call, "waits")]
            works.append(ranks[2].all_reduce(np.ones(2), tag="a"))
            assert all((x == 3).all() for x in await asyncio.gather(*works))
            assert noted() == [("all_reduce", 0, call, "done")]

            works = [g.all_reduce(np.ones(2), tag="a") for g in ranks]
            await asyncio.gather(*works)  # these become no operations
            assert noted()[1:] == [("all_reduce", 1, call, "done")]

    run(main())


def test_a_function_that_fails_fails_the_call(run, monkeypatch):
    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2), tag="a"))
            works = [ranks[0].all_reduce(np.ones(2), tag="a")]

            def fail(*values, out):
                raise MemoryError("none left")

            with monkeypatch.context() as patch:
                for group in ranks:
                    (*_, recipe) = group._context.post_express._recipes.values()
                    patch.setattr(recipe, "_plain", fail)
                    patch.setattr(recipe, "tapes", (None, None))  # so that Python reduces
                works.append(ranks[1].all_reduce(np.ones(2), tag="a"))
                with pytest.raises(MemoryError):
                    await works[1]
                with pytest.raises((MemoryError, aiodist.CollectiveAbortedError)):
                    await works[0]
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2), tag="a"))

    run(main())


def test_a_tensor_is_reduced_for_one_rank_while_another_is_late(run):
    """A rank without a result has no tensor to mark as written, even if its call is an
    operation."""

    async def main():
        async with sharing(2) as ranks:
            for late in range(3):
                xs = [torch.ones(3) for _ in ranks]
                waiting = ranks[1].reduce(xs[1], 0, tag="t")
                if late:
                    ranks[1]._context.calls.waiting.by_key["t", late].to_operation()
                total = await ranks[0].reduce(xs[0], 0, tag="t")
                assert total.tolist() == [2.0] * 3
                assert await waiting is None
                assert xs[1].tolist() == [1.0] * 3

    run(main())
