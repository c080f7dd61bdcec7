"""all_reduce by a codec, of ranks on several hosts that are names alone."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from seeds import seeds
from turns import after_turns

import aiodist
from aiodist import CollectiveAbortedError, MismatchError, ReduceOp
from aiodist.codecs import Codec, bf16, int4, int8, topk
from aiodist.collectives import coded
from aiodist.prepared import express
from aiodist.testing import Simulation
from aiodist.testing.virtual_loop import VirtualLoop, current_process

LAYOUTS = ["ab", "abc", "aabb", "abab", "abb", "aabccc", "abbaccab"]
CODECS: list[Codec] = [bf16(), int8(block=64), int4(), topk(0.2)]

pytestmark = pytest.mark.strength(2)


class Exact(Codec):
    """Loses nothing, in no fewer bytes."""

    name = "exact()"

    def nbytes(self, count):
        return 4 * count

    def encode(self, values, out):
        out[:] = values.view(np.uint8)
        return out.size

    def decode(self, data, out):
        if data.size != out.nbytes:
            raise self.refuse(data, out.size)
        out[:] = data.view(np.float32)


def given(rank: int, length: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


def through(codec: Codec, values: Any) -> Any:
    """What becomes of `values`, in pieces as they are coded."""
    there = np.empty_like(values)
    for start in range(0, values.size, coded.PIECE):
        part = values[start : start + coded.PIECE]
        data = np.empty(codec.nbytes(part.size), np.uint8)
        size = codec.encode(part, data)
        codec.decode(data[:size], there[start : start + coded.PIECE])
    return there


def expected(layout: str, xs: list[Any], codec: Codec, average: bool = False) -> Any:
    """The same by numpy: each host's sum coded once, and the total once more."""
    hosts = sorted(set(layout), key=layout.index)
    sums = []
    for host in hosts:
        of_host = [x for x, name in zip(xs, layout, strict=True) if name == host]
        sums.append(of_host[0].copy())
        for x in of_host[1:]:
            sums[-1] += x
    length = xs[0].size
    bounds = [*np.cumsum([0, *map(len, np.array_split(np.arange(length), len(layout)))])]
    result = np.empty(length, np.float32)
    for start, stop in itertools.pairwise(bounds):
        total = through(codec, sums[0][start:stop])
        for of_host in sums[1:]:
            total += through(codec, of_host[start:stop])
        if average:
            total /= np.float32(len(layout))
        result[start:stop] = through(codec.of_sum(len(hosts)), total)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("length", [0, 1, 5, 1000, 20_003])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("piece", [coded.PIECE, 300])
def test_all_ranks_have_what_numpy_says(
    on_hosts, run, layout, codec, length, average, piece, monkeypatch
):
    monkeypatch.setattr(coded, "PIECE", piece)
    op = ReduceOp.AVG if average else ReduceOp.SUM

    async def main():
        async with on_hosts(layout) as ranks:
            xs = [given(rank, length) for rank in range(len(layout))]
            want = expected(layout, xs, codec, average)
            got = await asyncio.gather(
                *[group.all_reduce(x, op, codec=codec) for group, x in zip(ranks, xs, strict=True)]
            )
            for x, result in zip(xs, got, strict=True):
                assert result is x
                assert x.tobytes() == want.tobytes()

    run(main())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("tag", [None, "t"])
def test_an_exact_codec_gives_the_sum(on_hosts, run, wait, tag):
    async def main():
        async with on_hosts("aab", wait=wait) as ranks:
            for _ in range(3):
                xs = [np.arange(5000, dtype=np.float32) + group.rank for group in ranks]
                await asyncio.gather(
                    *[
                        g.all_reduce(x, codec=Exact(), tag=tag)
                        for g, x in zip(ranks, xs, strict=True)
                    ]
                )
                assert all(np.array_equal(x, 3 * np.arange(5000) + 3) for x in xs)

    run(main())


def test_arrays_of_all_kinds(on_hosts, run):
    async def main():
        async with on_hosts("abb") as ranks:

            async def one(group):
                strided = np.ones((4, 6), np.float32)[:, ::2]
                whole = [
                    strided,
                    torch.ones(3, dtype=torch.bfloat16),
                    np.full(2, 2, np.float16),
                    np.empty((0, 3), np.float32),
                ]
                got = await group.all_reduce(whole, codec=bf16())
                assert got is whole or all(a is b for a, b in zip(got, whole, strict=True))
                assert (strided == 3).all() and whole[1].eq(3).all() and (whole[2] == 6).all()
                x, out = np.ones(7, np.float32), torch.zeros(7)
                assert await group.all_reduce(x, codec=bf16(), out=out) is out
                assert (x == 1).all() and out.eq(3).all()
                mean = await group.all_reduce(np.float32([group.rank]), ReduceOp.AVG, codec=int8())
                assert mean.dtype == np.float32 and mean == pytest.approx(1, rel=0.02)

            await asyncio.gather(*map(one, ranks))

    run(main())


def test_one_host_loses_nothing(on_hosts, run):
    async def main():
        async with on_hosts("aaa") as ranks:
            xs = [given(rank, 1000) for rank in range(3)]
            want = xs[0] + xs[1] + xs[2]
            codec = topk(0.1, error_feedback=True)
            works = [
                group.all_reduce(x, codec=codec, tag="t")
                for group, x in zip(ranks, xs, strict=True)
            ]
            await asyncio.gather(*works)
            assert all(np.array_equal(x, want) for x in xs)

    run(main())


@pytest.mark.parametrize("layout", ["aa", "ab", "aab"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_among_all_reduces_without_a_codec(on_hosts, run, monkeypatch, layout, compiled, seed):
    """Calls of numbers and arrays are prepared. No call with a codec is taken for one of them."""
    if not compiled:
        monkeypatch.setattr(express, "core", None)
    numbers = random.Random(seed)

    async def main():
        async with on_hosts(layout) as ranks:
            size = len(ranks)
            for _ in range(60):
                kind = numbers.choice(["number", "array", "coded"])
                tag = numbers.choice([None, "t"])
                out, codec = numbers.random() < 0.5, Exact() if kind == "coded" else None

                def call(group, kind=kind, tag=tag, out=out, codec=codec):
                    if kind == "number":
                        return group.all_reduce(group.rank + 0.5, tag=tag)
                    x = np.full(8, group.rank + 0.5, np.float32)
                    into = np.empty_like(x) if out else None
                    return group.all_reduce(x, out=into, codec=codec, tag=tag)

                for total in await asyncio.gather(*map(call, ranks)):
                    assert np.all(total == size * size / 2), (kind, tag, out)

    run(main())


@pytest.mark.parametrize("layout", ["ab", "aabb", "abb"])
@pytest.mark.parametrize("codec", [int4(error_feedback=True), topk(0.05, error_feedback=True)])
@pytest.mark.sample(4)
def test_error_feedback_brings_everything_in_time(on_hosts, run, layout, codec):
    rounds = 60

    async def main():
        async with on_hosts(layout) as ranks:
            sums = [np.zeros(1000) for _ in ranks]

            async def one(group, total):
                for _ in range(rounds):
                    x = given(group.rank, 1000)
                    total += await group.all_reduce(x, codec=codec, tag="gradient")

            await asyncio.gather(*map(one, ranks, sums))
            want = sum(given(group.rank, 1000).astype(np.float64) for group in ranks)
            assert all(np.array_equal(total, sums[0]) for total in sums)
            once = expected(layout, [given(g.rank, 1000) for g in ranks], codec) - want
            assert np.linalg.norm(sums[0] / rounds - want) < np.linalg.norm(once) / 3

    run(main())


def test_residuals_belong_to_a_tag_and_to_calls_of_one_kind(on_hosts, run):
    codec = topk(0.1, error_feedback=True)

    async def main():
        async with on_hosts("ab") as ranks:

            async def one(group):
                async def sent(length, tag, codec=codec):
                    return await group.all_reduce(
                        np.arange(1, length + 1, dtype=np.float32), codec=codec, tag=tag
                    )

                first = (await sent(20, "a")).copy()
                assert not np.array_equal(await sent(20, "a"), first)
                assert np.array_equal(await sent(20, "b"), first)
                await sent(30, "a")  # begins anew
                assert np.array_equal(await sent(20, "a"), first)

            await asyncio.gather(*map(one, ranks))

    run(main())


def test_a_call_that_fails_leaves_residuals_as_they_were(on_hosts, run):
    class Fails(topk):
        calls = 0

        def decode(self, data, out):
            self.calls += 1
            if self.calls == self.fails_at:
                raise ZeroDivisionError("codec")
            super().decode(data, out)

        fails_at = -1

    async def main():
        async with on_hosts("ab") as ranks:
            codecs = [Fails(0.1, error_feedback=True) for _ in ranks]

            async def all_of(tag):
                xs = [np.arange(1, 21, dtype=np.float32) for _ in ranks]
                works = [
                    g.all_reduce(x, codec=c, tag=tag)
                    for g, x, c in zip(ranks, xs, codecs, strict=True)
                ]
                return await asyncio.gather(*works, return_exceptions=True)

            want = [(await all_of("a"))[0] for _ in range(2)]
            assert np.array_equal((await all_of("b"))[0], want[0])
            codecs[1].fails_at = codecs[1].calls + 2
            kinds = [type(each) for each in await all_of("b")]
            assert ZeroDivisionError in kinds and CollectiveAbortedError in kinds
            assert np.array_equal((await all_of("b"))[0], want[1])

    run(main())


def test_two_calls_of_one_tag_at_once(on_hosts, run):
    async def main():
        async with on_hosts("ab") as ranks:
            codec = int8(error_feedback=True)
            works = [
                group.all_reduce(np.ones(100, np.float32), codec=codec, tag="t")
                for group in ranks
                for _ in range(2)
            ]
            got = await asyncio.gather(*works, return_exceptions=True)
            errors = [each for each in got if isinstance(each, Exception)]
            assert errors and all(
                isinstance(each, RuntimeError | CollectiveAbortedError) for each in errors
            )
            assert any("await it first" in str(each) for each in errors)

    run(main())


def test_codecs_that_differ(on_hosts, run):
    async def main():
        async with on_hosts("abb") as ranks:
            works = [
                group.all_reduce(np.ones(9, np.float32), codec=int8(block=8 + group.rank // 2))
                for group in ranks
            ]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
                assert "int8(block=8)" in str(result) and "int8(block=9)" in str(result)

    run(main())


class Wider(Exact):
    """Has the name of another codec, and needs more bytes: for all values, or for sums only."""

    def __init__(self, more: int, of_sums: int) -> None:
        self.more, self.of_sums = more, of_sums

    def nbytes(self, count):
        return 4 * count + self.more

    def of_sum(self, members):
        return Wider(self.of_sums, self.of_sums)


@pytest.mark.parametrize("layout", ["ab", "aab"])
@pytest.mark.parametrize("codec", [Wider(8, 8), Wider(0, 8)], ids=["all", "sums"])
def test_codecs_of_one_name_and_other_sizes(on_hosts, run, layout, codec):
    async def main():
        async with on_hosts(layout) as ranks:
            works = [
                group.all_reduce(np.ones(999, np.float32), codec=Exact() if group.rank else codec)
                for group in ranks
            ]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError), result
                assert "sums in" in str(result)
            works = [group.all_reduce(np.ones(9, np.float32), codec=Exact()) for group in ranks]
            for x in await asyncio.gather(*works):  # still in step
                assert (x == len(layout)).all()

    run(main())


@pytest.mark.parametrize(
    ("codec", "share"),
    # Top-k: 2 % on the way there, and the union of the places of four hosts on the way back.
    [(bf16(), 0.5), (int8(), 0.26), (int4(), 0.14), (topk(0.01), (0.02 + 4 * 0.02) / 2)],
    ids=str,
)
def test_bytes_between_hosts(on_hosts, run, codec, share):
    async def main():
        async with on_hosts("abcd") as ranks:

            def sent() -> int:
                links = [
                    group._actor.endpoint.peer(peer).link
                    for group in ranks
                    for peer in range(4)
                    if peer != group.rank
                ]
                return sum(link.sent_bytes for link in links if link is not None)

            moved = []
            for each in (None, codec):
                await asyncio.gather(*[g.all_reduce(given(0, 400_000), codec=each) for g in ranks])
                before = sent()
                await asyncio.gather(*[g.all_reduce(given(0, 400_000), codec=each) for g in ranks])
                moved.append(sent() - before)
            assert moved[0] == 4 * 2 * 3 / 4 * 1_600_000
            assert moved[1] <= share * moved[0] + 4096

    run(main())


class Plain:
    """A codec that derives from nothing."""

    name, error_feedback = "plain()", False

    def __init__(self) -> None:
        self.exact = Exact()
        self.nbytes, self.encode, self.decode = (
            self.exact.nbytes,
            self.exact.encode,
            self.exact.decode,
        )


def test_a_codec_that_derives_from_nothing(on_hosts, run):
    async def main():
        async with on_hosts("ab") as ranks:
            works = [group.all_reduce(np.ones(9, np.float32), codec=Plain()) for group in ranks]
            assert all((x == 2).all() for x in await asyncio.gather(*works))

    run(main())


@pytest.mark.parametrize("layout", ["aa", "ab"])
@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "is no codec", {"codec": "int8"}),
        (TypeError, "is no codec", {"codec": int8}),
        (TypeError, "SUM and AVG, not MAX", {"codec": int8(), "op": ReduceOp.MAX}),
        (TypeError, "SUM and AVG", {"codec": int8(), "op": np.add}),
        (ValueError, "give tag=", {"codec": int8(error_feedback=True)}),
        (TypeError, "not float64", {"codec": int8(), "x": np.ones(3)}),
        (TypeError, "not int64", {"codec": int8(), "x": np.ones(3, np.int64)}),
        (TypeError, "not float", {"codec": int8(), "x": 1.5}),
    ],
)
def test_arguments_that_are_refused(on_hosts, run, layout, error, text, arguments):
    async def main():
        async with on_hosts(layout) as ranks:
            for group in ranks:
                with pytest.raises(error, match=text):
                    await group.all_reduce(**{"x": np.ones(3, np.float32), **arguments})
            works = [g.all_reduce(np.ones(3, np.float32), codec=bf16()) for g in ranks]
            assert all((x == 2).all() for x in await asyncio.gather(*works))  # still in step

    run(main())


class Counted(Exact):
    """Counts how often it has coded since the loop has turned."""

    name = "counted()"
    since = most = 0

    def encode(self, values, out):
        self._count()
        return super().encode(values, out)

    def decode(self, data, out):
        self._count()
        super().decode(data, out)

    def _count(self) -> None:
        self.since += 1
        self.most = max(self.most, self.since)


@pytest.mark.parametrize("most", [coded.MAX_PAYLOAD, 1000], ids=["whole", "halved"])
def test_the_loop_turns_after_each_piece(on_hosts, run, monkeypatch, most):
    """Also if coded pieces of the usual size do not fit into a frame."""
    monkeypatch.setattr(coded, "PIECE", 400)
    monkeypatch.setattr(coded, "MAX_PAYLOAD", most)
    codec = Counted()

    async def main():
        async with on_hosts("ab") as ranks:
            works = [group.all_reduce(np.ones(8000, np.float32), codec=codec) for group in ranks]
            while not all(work.done() for work in works):
                codec.since = 0
                await asyncio.sleep(0)
            assert all((x == 2).all() for x in await asyncio.gather(*works))
        assert codec.most <= len(ranks)

    run(main())


def test_blocking_groups(on_hosts, run):
    async def main():
        async with on_hosts("ab") as ranks:

            def one(group):
                x = np.ones(5, np.float32)
                return group.all_reduce(x, codec=aiodist.codecs.bf16(), tag="t")

            threads = [asyncio.to_thread(one, group.blocking()) for group in ranks]
            assert all((x == 2).all() for x in await asyncio.gather(*threads))

    run(main())


@pytest.mark.parametrize("length", [8, 50_000])
def test_a_rank_that_dies_at_any_time_is_named(length):
    """The others have the result, the same bits, or hear which rank was lost."""
    ends = set()
    for turn in (*range(2, 14), 17, 22, 30, 40, 60, 90, 130, 200, 400, 800):

        async def program(group, turn=turn):
            x = given(group.rank, length)
            await group.barrier()
            if group.rank == 1:
                after_turns(turn, current_process().kill)
            try:
                await group.all_reduce(x, codec=int8(error_feedback=True), tag="t")
            except aiodist.PeerLostError as error:
                assert error.ranks == (1,)
                return "lost"
            return x.tobytes()

        simulation = Simulation(3, seed=turn, lease=5.0, op_timeout=20.0)
        zero, _, two = simulation.run(program)
        assert not isinstance(zero, Exception) and not isinstance(two, Exception), (zero, two)
        results = {zero, two} - {"lost"}
        assert len(results) <= 1, turn
        ends |= {"whole"} if results else {"lost"}
    assert ends == {"whole", "lost"}


@pytest.mark.parametrize("layout", ["abc", "aab"])
def test_a_rank_that_has_its_result_may_leave_while_others_decode(monkeypatch, layout):
    """The ranks of a host share no memory here, so they send each other the results."""
    own = VirtualLoop.identity

    def identity(loop):
        process, host, *rest = own(loop)
        rank = int(host.rpartition(".")[2]) - 1
        return (process, layout[rank] if host.startswith("10.0.1.") else host, *rest)

    monkeypatch.setattr(VirtualLoop, "identity", identity)

    async def program(group):
        x = np.ones(400_000, np.float32)
        await group.all_reduce(x, codec=int8())
        return x[0] == x[-1] == pytest.approx(len(layout), rel=0.02)

    for seed in range(6):
        outcomes = Simulation(len(layout), seed=seed).run(program)
        assert outcomes == [True] * len(layout), seed
