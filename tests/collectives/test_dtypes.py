"""Arrays that aiodist makes are like those that numpy makes, whatever way they came."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytestmark = pytest.mark.strength(2)

NUMBERS = ["i2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G"]
ALL = [*NUMBERS, "?", "b", "S3", "U2", "M8[ns]", "M8", "m8[s]"]
LARGE = 70_001


def check(array, dtype):
    """`array` is what numpy makes: of this machine's order, said as numpy says it, and the
    caller's own."""
    expected = np.dtype(dtype)
    assert type(array) is np.ndarray
    assert array.dtype == expected
    assert (array.dtype.byteorder, str(array.dtype)) == (expected.byteorder, str(expected))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    if expected.kind not in "mM":
        view = memoryview(array)
        assert view.format == memoryview(np.empty(0, expected)).format
        if expected.char in "?bhilBHILfd":
            assert view.tolist() == array.tolist()


def swap(group, x):
    return group.sendrecv(x, 1 - group.rank, src=1 - group.rank)


@pytest.mark.parametrize("sent", ["as it is", "big-endian", "strided"])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("length", [3, LARGE])
@pytest.mark.sample(30)
def test_what_arrives(run, groups, everyone, dtype, sent, length):
    """Big-endian arrays, too, arrive in this machine's order: their values travel, not their
    bytes. Those that are given to be written keep theirs."""

    async def main():
        x = (np.arange(length) % 100).astype(dtype)
        if sent == "big-endian":
            x = x.astype(x.dtype.newbyteorder(">"))
        elif sent == "strided":
            x = np.stack([x, x], axis=1)[:, 0]
        async with groups(2) as ranks:
            found = []
            for _ in range(2):
                found += await everyone(ranks, lambda g: swap(g, x))
                found += await everyone(ranks, lambda g: g.broadcast(None if g.rank else x, 0))
                for start in (
                    lambda g: g.all_gather(x),
                    lambda g: g.all_to_all([x, x]),
                ):
                    for rows in await everyone(ranks, start):
                        found += rows
                found += (await everyone(ranks, lambda g: g.gather(x, 0)))[0]
                found += await everyone(ranks, lambda g: g.scatter(None if g.rank else [x, x], 0))
                found += [
                    tree["k"][0] for tree in await everyone(ranks, lambda g: swap(g, {"k": [x]}))
                ]
                _, (value, *_) = await asyncio.gather(
                    ranks[0].send(x, 1, tag="m"), anext(aiter(ranks[1].messages(tag="m")))
                )
                found.append(value)
            for array in found:
                if array is not x:
                    check(array, dtype)
                np.testing.assert_array_equal(array, x)
            out = np.empty_like(x)
            results = await everyone(
                ranks, lambda g: g.recv(src=0, out=out) if g.rank else g.send(x, 1)
            )
            assert results[1] is out
            assert out.dtype.byteorder == x.dtype.byteorder
            np.testing.assert_array_equal(out, x)

    run(main())


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("length", [4, LARGE])
def test_what_is_reduced(run, groups, everyone, dtype, length):
    """Results that are new arrays, what operators of users are given, and shared memory."""

    async def main():
        x = (np.arange(length) % 100).astype(dtype)
        x.flags.writeable = False
        seen = []

        def add(a, b):
            seen.extend((a, b))
            return a + b

        async with groups(2) as ranks:
            made = await everyone(ranks, lambda g: g.reduce_scatter([x, x]))
            made += await everyone(ranks, lambda g: g.reduce_scatter([x, x], add))
            for array in made:
                check(array, dtype)
                np.testing.assert_array_equal(array, x + x)
            assert seen
            for array in seen:
                check(array, dtype)
            for group in ranks:
                for array in (group.empty(3, dtype), group.empty((2, 3), None, like=x)):
                    check(array, dtype)

    run(main())
