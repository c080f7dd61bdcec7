"""all_reduce of known shapes: a prepared call gives what the ordinary way gives."""

from __future__ import annotations

import asyncio
import math
import warnings

import numpy as np
import pytest
from idle_time import on_idle_time
from sharing import everyone, sharing

import aiodist
from aiodist import ReduceOp
from aiodist.prepared.express import Express
from aiodist.transports import polling as progress

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("no_turn_is_due")


@pytest.fixture
def taken(monkeypatch):
    """For each all_reduce that could be prepared, whether it was done that way."""
    seen = []
    real = Express.all_reduce

    def noted(self, *args, **kwargs):
        work = real(self, *args, **kwargs)
        seen.append(work is not None)
        return work

    monkeypatch.setattr(Express, "all_reduce", noted)
    return seen


def as_array(x):
    if isinstance(x, torch.Tensor):
        x = x.detach().clone()
        return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


RNG = np.random.default_rng(0)
FLOATS = RNG.uniform(-3, 3, (3, 40_000))
KINDS = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32),
    "float16": lambda x: x.astype(np.float16),
    "big endian": lambda x: x.astype(">f4"),
    "int8": lambda x: (x * 40).astype(np.int8),
    "uint64": lambda x: (x + 3).astype(np.uint64),
    "bool": lambda x: x > 0,
    "complex128": lambda x: x + 1j * x[::-1],
    "torch float32": lambda x: torch.tensor(x, dtype=torch.float32),
    "torch float16": lambda x: torch.tensor(x, dtype=torch.float16),
    "torch bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "torch int64": lambda x: torch.tensor(x * 40).long(),
    "torch bool": lambda x: torch.tensor(x > 0),
    "leaf": lambda x: torch.tensor(x, requires_grad=True),
    "view": lambda x: torch.tensor(np.concatenate([x, x, x]))[len(x) : 2 * len(x)],
    "slice": lambda x: np.concatenate([x, x])[len(x) :],
    "strided": lambda x: np.stack([x, x], axis=1)[:, 0],
    "transposed": lambda x: torch.tensor(np.stack([x, x])).T,
}
OPS = [
    ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.LAND, ReduceOp.BXOR,
    ReduceOp.premul_sum(0.5), ReduceOp.premul_sum(3),
    ReduceOp.custom(lambda a, b: a + b, elementwise=True, commutative=True),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_the_same_as_the_long_way(run, kind):
    make = KINDS[kind]

    async def outcome(ranks, op, length, tag):
        values = [make(FLOATS[group.rank, :length].copy()) for group in ranks]
        started = []
        refused = []
        for group, x in zip(ranks, values, strict=True):
            try:
                started.append(group.all_reduce(x, op, tag=tag))
            except TypeError as error:
                refused.append(str(error))
        if refused:
            assert not started
            return refused[0]
        results = await asyncio.gather(*started)
        for result, x in zip(results, values, strict=True):
            assert result is x
        shown = [as_array(result).tobytes() for result in results]
        assert len(set(shown)) == 1
        return shown[0]

    async def main():
        async with sharing(2) as ranks:
            for op in OPS:
                for length in (0, 1, 5, 3000, 40_000):
                    long_way = await outcome(ranks, op, length, "tagged")
                    for _ in range(2):  # the first call makes the recipe, the second uses it
                        assert await outcome(ranks, op, length, None) == long_way

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(main())


def test_three_ranks(run):
    async def main():
        async with sharing(3) as ranks:
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN):
                for length in (1, 100, 40_000):
                    tagged = [FLOATS[g.rank, :length].copy() for g in ranks]
                    await everyone(
                        ranks, lambda g, x=tagged, o=op: g.all_reduce(x[g.rank], o, tag=1)
                    )
                    for _ in range(3):
                        arrays = [FLOATS[g.rank, :length].copy() for g in ranks]
                        await everyone(ranks, lambda g, x=arrays, o=op: g.all_reduce(x[g.rank], o))
                        for x, y in zip(arrays, tagged, strict=True):
                            np.testing.assert_array_equal(x, y)

    run(main())


@pytest.mark.parametrize("size", [2, 3])
def test_overflow_is_no_warning(run, recwarn, size):
    async def main():
        async with sharing(size) as ranks:
            for dtype in (np.float64, np.float32, np.float16, np.complex64):
                for length in (1, 40_000):
                    for _ in range(3):
                        big = np.finfo(dtype).max
                        x = await everyone(
                            ranks,
                            lambda g, d=dtype, b=big, n=length: g.all_reduce(np.full(n, b, d)),
                        )
                        assert all(np.isinf(y.real).all() for y in x)
                        x = await everyone(
                            ranks,
                            lambda g, d=dtype, n=length: g.all_reduce(
                                np.full(n, np.inf if g.rank else -np.inf, d)
                            ),
                        )
                        assert all(np.isnan(y.real).all() for y in x)
                    # The user's settings of numpy are unchanged.
                    with pytest.raises(FloatingPointError), np.errstate(over="raise"):
                        np.full(2, big, dtype) * dtype(2)

    run(main())
    assert not recwarn.list


def test_zero_dimensions_and_no_elements(run, taken):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                for make in (
                    lambda: np.array(2.0),
                    lambda: torch.tensor(2.0),
                    lambda: np.full((2, 1, 3), 2.0),
                    lambda: np.zeros((0, 3)),
                    lambda: torch.zeros(3, 0),
                ):
                    values = await everyone(ranks, lambda g, m=make: g.all_reduce(m()))
                    for value in values:
                        assert value.shape == make().shape
                        assert type(value) is type(make())
                        assert bool((value == 4.0).all())
            assert all(taken)

    run(main())


def test_arguments_that_make_no_sense_start_nothing(run):
    async def main():
        async with sharing(2) as ranks:
            frozen = np.ones(3)
            frozen.flags.writeable = False
            wrong = [
                (ValueError, (frozen,)),
                (ValueError, (np.broadcast_to(np.ones(1), 3),)),
                (ValueError, (torch.ones(1).expand(3),)),
                (TypeError, (np.array([None]),)),
                (TypeError, (np.ma.ones(3),)),
                (TypeError, (torch.eye(2).to_sparse(),)),
                (TypeError, (torch.empty(3, device="meta"),)),
                (TypeError, (np.ones(3), "SUM")),
                (TypeError, (np.ones(3, np.int64), ReduceOp.AVG)),
                (TypeError, (np.ones(3), ReduceOp.BAND)),
                (TypeError, ("text",)),
            ]
            for _ in range(2):
                for group in ranks:
                    for error, arguments in wrong:
                        with pytest.raises(error):
                            group.all_reduce(*arguments)
                    for timeout in (0, -1, "1", True, math.nan):
                        with pytest.raises((TypeError, ValueError), match="timeout"):
                            group.all_reduce(np.ones(3), timeout=timeout)
                # All ranks still have the same next number.
                results = await everyone(ranks, lambda g: g.all_reduce(np.ones(3)))
                assert all((x == 2).all() for x in results)

    run(main())


def test_autograd_hears_of_it(run, taken):
    async def main():
        async with sharing(2) as ranks:
            whole = [torch.ones(10, dtype=torch.float64) for _ in ranks]
            parts = [x[2:5] for x in whole]
            for number in range(1, 5):
                before = [x._version for x in parts]
                await everyone(ranks, lambda g: g.all_reduce(parts[g.rank]))
                assert [x._version for x in parts] == [version + 1 for version in before]
                for x in whole:
                    assert x.tolist() == [1.0] * 2 + [2.0**number] * 3 + [1.0] * 5
            # The same holds for a call that had to wait.
            first = ranks[0].all_reduce(parts[0])
            version = parts[0]._version
            await asyncio.gather(first, ranks[1].all_reduce(parts[1]))
            assert parts[0]._version == version + 1
            assert all(taken)
            # A graph that saved the old value notices.
            leaf = torch.ones(3, requires_grad=True)
            saved = (leaf * 2).detach()
            product = (leaf * saved).sum()
            await asyncio.gather(ranks[0].all_reduce(saved), ranks[1].all_reduce(torch.ones(3)))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
            with torch.inference_mode():
                values = [torch.ones(3) for _ in ranks]
                await everyone(ranks, lambda g: g.all_reduce(values[g.rank]))
                assert values[0].tolist() == [2.0] * 3

    run(main())


@pytest.mark.parametrize("length", [4, 40_000])
def test_one_rank_takes_the_long_way(run, taken, length):
    """A non-contiguous array of the same shape, a tensor, or `out=` on one rank matches the
    others."""

    async def main():
        async with sharing(2) as ranks:
            for order in ((0, 1), (1, 0)):
                for _ in range(3):
                    out = np.empty(length)
                    others = [
                        (np.ones((length, 2))[:, 1], {}),
                        (np.ones(length, ">f8"), {}),
                        (torch.ones(length, dtype=torch.float64), {}),
                        (torch.ones(length, dtype=torch.float64, requires_grad=True), {}),
                        (np.ones(length), {"out": out}),
                    ]
                    for x, options in others:
                        plain = np.ones(length)
                        calls = {
                            0: lambda p=plain: ranks[0].all_reduce(p),
                            1: lambda x=x, o=options: ranks[1].all_reduce(x, **o),
                        }
                        works = [calls[rank]() for rank in order]
                        await asyncio.gather(*works)
                        assert (plain == 2).all()
                        result = options.get("out", x)
                        assert bool((result == 2).all())
        assert True in taken
        assert False in taken

    run(main())


@pytest.mark.parametrize("short_first", [True, False])
def test_calls_that_differ(run, short_first):
    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))
            others = [
                lambda g: g.all_reduce([np.ones(4)]),
                lambda g: g.all_reduce(np.ones(5)),
                lambda g: g.all_reduce(np.ones((4, 1))),
                lambda g: g.all_reduce(np.ones(4, np.float32)),
                lambda g: g.all_reduce(torch.ones(4)),
                lambda g: g.all_reduce(np.ones(4), ReduceOp.MAX),
                lambda g: g.all_reduce(np.ones(4), ReduceOp.premul_sum(2.0)),
                lambda g: g.all_reduce(1.0),
                lambda g: g.barrier(),
                lambda g: g.reduce(np.ones(4), 0),
                lambda g: g.broadcast(np.ones(4), 1),
            ]
            for other in others:
                for _ in range(3):
                    calls = [lambda: ranks[0].all_reduce(np.ones(4)), lambda o=other: o(ranks[1])]
                    works = [call() for call in (calls if short_first else calls[::-1])]
                    await asyncio.wait(works)
                    for work in works:
                        error = work.exception()
                        assert isinstance(error, aiodist.MismatchError)
                        assert set(error.calls) == {0, 1}
                        assert error.calls[0] == "all_reduce(SUM, float64[4])"
                        assert error.calls[1] != error.calls[0]
                        assert error.calls[1] in str(error)
                    results = await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))
                    assert all((x == 2).all() for x in results)

    run(main())


def test_given_up_while_it_waits(run, taken):
    async def main():
        async with sharing(3) as ranks:
            for _ in range(2):
                x = np.ones(4)
                work = ranks[0].all_reduce(x)
                assert work.cancel()
                x[:] = 99.0
                for rank in (1, 2):
                    with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                        await ranks[rank].all_reduce(np.ones(4))
                    assert caught.value.rank == 0
                assert (x == 99).all()
                # A call is given up by its own timeout.
                work = ranks[1].all_reduce(np.ones(4), timeout=0.05)
                with pytest.raises(aiodist.CollectiveTimeoutError) as late:
                    await work
                assert late.value.missing == (0, 2)
                assert late.value.op == "all_reduce"
                assert late.value.seq == work.seq
                for rank in (0, 2):
                    with pytest.raises(aiodist.CollectiveTimeoutError):
                        await ranks[rank].all_reduce(np.ones(4), timeout=math.inf)
                # One of several waiting calls is given up.
                works = [ranks[0].all_reduce(np.full(4, float(n))) for n in range(4)]
                works[2].cancel()
                for n in range(4):
                    rest = [g.all_reduce(np.full(4, float(n))) for g in ranks[1:]]
                    outcomes = await asyncio.gather(*rest, return_exceptions=True)
                    if n == 2:
                        assert all(isinstance(o, aiodist.CollectiveAbortedError) for o in outcomes)
                    else:
                        assert all((o == 3 * n).all() for o in outcomes)
                        assert (await works[n] == 3 * n).all()

    run(main())


@on_idle_time
def test_what_the_missing_rank_did_last(run):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                works = [group.all_reduce(np.ones(4)) for group in ranks]
                await asyncio.gather(*works)
            last = works[0].seq
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await ranks[0].all_reduce(np.ones(4), timeout=0.05)
            assert f"all_reduce #{last} done" in caught.value.last_seen[1]

    run(main())


def test_among_other_operations(run, taken):
    """Others are under way: with and without tags, point to point, and in subgroups."""

    async def main():
        async with sharing(3) as ranks:
            pairs = await asyncio.gather(*[g.subgroup([0, 2]) for g in (ranks[0], ranks[2])])
            while any(group._context.express is None for group in pairs):
                await everyone(pairs, lambda g: g.barrier())

            async def program(group):
                pair = {0: pairs[0], 2: pairs[1]}.get(group.rank)
                for number in range(15):
                    works = [
                        group.all_reduce(np.full(3, float(number))),
                        group.all_reduce(np.full(3, 2.0 * number)),
                        group.all_reduce(np.full(3, 3.0 * number), tag="x"),
                        group.all_reduce(torch.full((3,), 4.0 * number)),
                        group.sendrecv(
                            np.full(3, 5.0), (group.rank + 1) % 3, src=(group.rank + 2) % 3
                        ),
                    ]
                    if pair is not None:
                        both = [pair.all_reduce(np.full(3, 1.0)) for _ in range(3)]
                        for x in await asyncio.gather(*both):
                            assert (x == 2).all()
                    results = await asyncio.gather(*works)
                    for factor, x in enumerate(results[:4], 1):
                        assert bool((x == 3 * factor * number).all())

            await asyncio.gather(*[program(group) for group in ranks])
            assert True in taken

    run(main())


def test_the_work(run, taken):
    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))
            number = ranks[0]._context.calls.tags.upcoming(None)
            waiting = ranks[0].all_reduce(np.ones(4))
            x = np.ones(4)
            at_once = ranks[1].all_reduce(x)
            assert taken[-2:] == [True, True]
            assert at_once.done()
            assert not waiting.done()
            await waiting
            for work in (waiting, at_once):
                assert isinstance(work, aiodist.Work)
                told = (work.op, work.tag, work.seq, work.nbytes)
                assert told == ("all_reduce", None, number, 32)
                assert work.source is None
                elapsed = work.elapsed
                assert elapsed >= 0
                assert work.elapsed == elapsed
                assert not work.cancel()
                assert not work.cancelled()
                assert f"#{number} done" in repr(work)
            calls = []
            at_once.add_done_callback(calls.append)
            assert not calls
            await asyncio.sleep(0)
            assert await at_once is x
            assert await at_once is x
            assert await at_once.wait(1) is x
            assert calls == [at_once]
            assert (await asyncio.gather(at_once, waiting))[0] is x

    run(main())


def has_turned(group):
    """Pretend that the loop had its turn some time ago."""
    polling = group._context.endpoint.progress
    polling._turned()
    assert not polling.is_due()
    assert polling.is_due()


def test_the_loop_gets_its_turn(run, taken, monkeypatch):
    """The data is reduced within the call all the same, because other ranks wait for it."""

    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))
            arrays = [np.ones(4), np.ones(4)]
            waiting = ranks[0].all_reduce(arrays[0])
            monkeypatch.setattr(progress, "LOOP_DUE", -1.0)
            has_turned(ranks[1])
            work = ranks[1].all_reduce(arrays[1])
            assert taken[-1]
            assert (arrays[1] == 2).all()
            assert not work.done()
            await asyncio.sleep(0)
            assert work.done()
            assert await work is arrays[1]
            await waiting

            # The other rank has its result, so it cannot be cancelled meanwhile.
            waiting = ranks[0].all_reduce(arrays[0])
            has_turned(ranks[1])
            work = ranks[1].all_reduce(arrays[1])
            assert not work.cancel()
            assert work.result() is arrays[1]
            assert (await waiting == 4).all()
            await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))

    run(main())


def test_many_shapes_take_no_more_memory_than_allowed(run):
    async def main():
        async with sharing(2) as ranks:
            for length in range(600):
                for x in await everyone(ranks, lambda g, n=length: g.all_reduce(np.ones(n))):
                    assert (x == 2).all()
            for length in (300_000, 299_999) * 2:
                for x in await everyone(ranks, lambda g, n=length: g.all_reduce(np.ones(n))):
                    assert (x == 2).all()

    run(main())


def test_an_operator_made_for_each_call(run):
    """Recipes are found by the operator's id, which a later operator may get again."""

    async def main():
        async with sharing(2) as ranks:
            for number in range(1, 50):
                operators = [ReduceOp.premul_sum(float(number)) for _ in ranks]
                values = await everyone(
                    ranks, lambda g, o=operators: g.all_reduce(np.ones(3), o[g.rank])
                )
                assert values[0].tolist() == [2.0 * number] * 3
                del operators

                def take(a, b, n=number):
                    return a + b * n

                values = await everyone(ranks, lambda g, f=take: g.all_reduce(np.ones(3), f))
                assert values[0].tolist() == [1.0 + number] * 3

    run(main())


def test_after_the_end(run):
    async def main():
        async with sharing(2) as ranks:
            parts = await everyone(ranks, lambda g: g.dup())
            while any(group._context.express is None for group in parts):
                await everyone(parts, lambda g: g.barrier())
            await everyone(parts, lambda g: g.all_reduce(np.ones(3)))
            waiting = parts[1].all_reduce(np.ones(3))
            parts[0].abort("over")
            with pytest.raises(aiodist.PeerLostError):
                await waiting
            with pytest.raises(aiodist.GroupClosedError):
                parts[0].all_reduce(np.ones(3))
            for _ in range(2):
                with pytest.raises(aiodist.PeerLostError):
                    await parts[1].all_reduce(np.ones(3))
            # The parent group is still usable.
            values = await everyone(ranks, lambda g: g.all_reduce(np.ones(3)))
            assert values[1].tolist() == [2.0] * 3

    run(main())
