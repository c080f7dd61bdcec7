"""Codecs of the user that do what they must not do."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiodist import (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    PeerLostError,
    ProtocolError,
)
from aiodist.codecs import bf16, int8

pytestmark = pytest.mark.strength(2)


class Liar(int8):
    """Writes less than the others expect, or says that it has written more than fits."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.name, self.more = int8().name, more

    def encode(self, values, out):
        return super().encode(values, out) + self.more


@pytest.mark.parametrize(
    ("more", "own", "others"), [(-1, ProtocolError, ProtocolError), (9, ValueError, None)]
)
def test_bytes_that_are_no_values(on_hosts, run, more, own, others):
    async def main():
        async with on_hosts("ab") as ranks:
            codecs = [int8(), Liar(more)]
            works = [
                group.all_reduce(np.ones(99, np.float32), codec=codec)
                for group, codec in zip(ranks, codecs, strict=True)
            ]
            other, liar = await asyncio.gather(*works, return_exceptions=True)
            assert isinstance(liar, own | CollectiveAbortedError), liar
            assert isinstance(other, CollectiveAbortedError | (others or CollectiveAbortedError))
            works = [group.all_reduce(np.ones(9, np.float32), codec=bf16()) for group in ranks]
            assert all((x == 2).all() for x in await asyncio.gather(*works))  # still in step

    run(main())


class Broken(bf16):
    """One of its methods does what it must not do."""

    name = "broken()"

    def __init__(self, method: str, does: Any) -> None:
        setattr(self, method, does)


def written_to(values, out):
    values[:] = 0
    return out.size


def raising(data, out):
    raise IndexError("not there")


@pytest.mark.parametrize(
    ("method", "does", "error", "text"),
    [
        ("nbytes", lambda count: None, ValueError, r"broken\(\)\.nbytes\(\d+\) returned None"),
        ("nbytes", lambda count: 4.0 * count, ValueError, "expected the number of bytes, an int"),
        ("nbytes", lambda count: -4 * count, ValueError, "0 or more"),
        ("encode", lambda values, out: None, ValueError, r"broken\(\)\.encode returned None"),
        ("encode", lambda values, out: out.size + 1, ValueError, "an int, 0 to 10"),
        ("encode", written_to, ValueError, "read-only"),
        ("of_sum", lambda members: None, TypeError, r"broken\(\)\.of_sum\(2\)=None is no codec"),
        ("decode", raising, ProtocolError, r"broken\(\) cannot decode: IndexError: not there"),
    ],
)
def test_codecs_that_do_what_they_must_not(on_hosts, run, method, does, error, text):
    async def main():
        async with on_hosts("ab") as ranks:
            codec = Broken(method, does)

            async def one(group):
                return await group.all_reduce(np.ones(10, np.float32), codec=codec)

            got = await asyncio.gather(*map(one, ranks), return_exceptions=True)
            for result in got:
                assert isinstance(result, (error, CollectiveAbortedError))
                assert re.search(text, str(result))
            assert any(isinstance(result, error) for result in got)
            works = [group.all_reduce(np.ones(9, np.float32), codec=bf16()) for group in ranks]
            assert all((x == 2).all() for x in await asyncio.gather(*works))  # still in step

    run(main())


class Panic(BaseException):
    """Extensions in Rust raise such an exception."""


ERRORS = {
    "Panic": partial(Panic, "boom"),
    # aiodist raises these for other reasons, and they mean something else then.
    "PeerLostError": partial(PeerLostError, "boom", ranks=[0]),
    "CollectiveTimeoutError": partial(CollectiveTimeoutError, "boom", missing=[0]),
    "RecursionError": partial(RecursionError, "boom"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("method", ["encode", "decode"])
@pytest.mark.parametrize(("layout", "length"), [("ab", 10), ("ab", 400_000), ("aab", 10)])
def test_what_a_codec_raises_fails_the_call_alone(on_hosts, run, name, method, layout, length):
    """Small pieces are coded in a callback of a link, and large ones in one of the loop."""

    raised = ERRORS[name]()

    def raises(*args):
        raise raised

    async def main():
        async with on_hosts(layout) as ranks:
            codecs = [bf16() for _ in ranks]
            codecs[1] = Broken(method, raises)
            codecs[1].name = bf16().name
            works = [
                group.all_reduce(np.ones(length, np.float32), codec=codec, timeout=10)
                for group, codec in zip(ranks, codecs, strict=True)
            ]
            await asyncio.wait(works)
            assert works[1].exception() is raised
            for error in (work.exception() for work in works if work is not works[1]):
                assert isinstance(error, CollectiveAbortedError)
                assert (error.rank, error.reason) == (1, f"the codec raised {name}: boom")
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [len(ranks)] * len(
                ranks
            )

    run(main())
