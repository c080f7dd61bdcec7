"""array.array, bytearray, memoryview: what is a buffer and nothing else is taken for an array."""

from __future__ import annotations

import asyncio
from array import array
from collections import namedtuple

import numpy as np
import pytest

from aiodist import ReduceOp

pytestmark = pytest.mark.strength(2)

Point = namedtuple("Point", "x y")


def test_reduced_in_place(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            own = [array("d", [1.0, 2.0, group.rank]) for group in ranks]
            results = await everyone(ranks, lambda g: g.all_reduce(own[g.rank]))
            assert all(result is given for result, given in zip(results, own, strict=True))
            assert [given.tolist() for given in own] == [[2.0, 4.0, 1.0]] * 2
            out = [bytearray(2) for _ in ranks]
            flags = bytes([0, 1])
            results = await everyone(
                ranks, lambda g: g.reduce(memoryview(flags), op=ReduceOp.MAX, out=_at(g, out))
            )
            assert results == [out[0], None]
            assert out == [bytearray(flags), bytearray(2)]

    run(main())


def _at(group, out):
    return out[0] if group.rank == 0 else None


@pytest.mark.parametrize("length", [3, 100_000])
def test_sent_and_received(run, groups, length):
    async def main():
        async with groups(2) as (one, two):
            given = array("i", range(length))
            into = array("i", bytes(4 * length))
            sending = one.send(given, 1)
            assert await two.recv(out=into) is into
            await sending
            assert into == given
            into.append(1)  # nobody holds its memory any more
            sending = one.send({"b": bytearray(b"xy"), "m": memoryview(b"abcd")[::2]}, 1)
            got = await two.recv()
            await sending
            assert {key: value.tobytes() for key, value in got.items()} == {"b": b"xy", "m": b"ac"}
            assert all(value.dtype == np.uint8 for value in got.values())

    run(main())


def test_in_other_collectives(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            own = [bytearray(b"%d" % group.rank * 3) for group in ranks]
            assert await everyone(ranks, lambda g: g.broadcast(own[g.rank])) == own
            assert own == [bytearray(b"000")] * 2
            out = [array("B", bytes(2)) for _ in ranks]
            await everyone(
                ranks, lambda g: g.all_gather(memoryview(bytes([g.rank])), out=out[g.rank])
            )
            assert [given.tolist() for given in out] == [[0, 1]] * 2

    run(main())


def test_what_is_refused(run, groups):
    async def main():
        async with groups(2) as (one, two):
            released = memoryview(b"x")
            released.release()
            with pytest.raises(TypeError, match=r"value\['k'\]: numpy cannot read this memoryview"):
                one.send({"k": released}, 1)
            await one.send(np.zeros(2, np.uint8), 1)
            with pytest.raises(Exception, match="is read-only"):
                await two.recv(out=memoryview(b"ab"))
            await two.recv()

    run(main())


def test_named_tuples_are_refused_or_arrive_as_they_are(run, groups):
    async def main():
        async with groups(2) as (one, _):
            with pytest.raises(TypeError, match=r"value\[0\]: a Point, a named tuple"):
                one.send([Point(1, 2)], 1)
        async with groups(2, allow_pickle=True) as (one, two):
            await asyncio.gather(one.send([Point(1, np.ones(2))], 1))
            (got,) = await two.recv()
            assert isinstance(got, Point)
            assert got.y.tolist() == [1, 1]

    run(main())
