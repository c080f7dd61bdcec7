"""Values that are no arrays by the short way: what arrives, and what comes in their place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.buffers import values
from aiodist.buffers.encoding import encode
from aiodist.errors import ProtocolError
from aiodist.p2p import frames
from aiodist.p2p.credit import EAGER
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

VALUES = [
    None, True, 7, -(2**63), 0.5, "text", "x" * 100, "\udcff", b"bytes", 2**70, 1j,
    (), [], {}, {"task": 3, "of": ["a", (1, 2.5)], (1, "b"): None}, list(range(100)), [[1], [[]]],
]  # fmt: skip


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow test is not due for a turn of the loop."""
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", 60.0)


@asynccontextmanager
async def pair(transport: str) -> AsyncIterator[list[aiodist.Group]]:
    """Two ranks that have a link."""
    async with aiodist.local(2, transports=(transport,), op_timeout=30.0) as ranks:
        a, b = [group._context.p2p for group in ranks]
        a.send(None, 1)
        await b.recv()
        yield ranks


async def there(a: aiodist.Group, b: aiodist.Group, x: Any, **options: Any) -> tuple[Any, bool]:
    """Send `x`; return what arrives, and whether it was received within the call."""
    sent = a.send(x, 1, **options)
    received = b.recv(src=0, **options)
    value = await received
    assert (received.source, received.tag, received.op) == (0, options.get("tag", 0), "recv")
    assert received.nbytes == sent.nbytes
    return value, received.is_prepared


@pytest.mark.parametrize("x", VALUES, ids=lambda x: repr(x)[:20])
async def test_a_value_arrives(transport: str, x: Any) -> None:
    async with pair(transport) as (a, b):
        for tag in (0, 5, "rows"):
            found = [await there(a, b, x, tag=tag) for _ in range(3)]
            for value, _ in found:
                assert (type(value), repr(value)) == (type(x), repr(x))
            first, second, third = [value for value, _ in found]
            if isinstance(x, (list, dict)):
                assert first is not second is not third
        assert [is_prepared for _, is_prepared in found] == [transport == "shm"] * 3


def arrays_of(number: int) -> list[Any]:
    """Values with arrays, of the same sizes for each number."""
    x = np.arange(12, dtype=np.float32) + number
    found = [
        {"x": x, "reward": number / 7, "done": number % 2 == 0, "step": number},
        [x, x[:0], (x > 5, x.astype(np.int16))],
        (x.reshape(3, 4).T, x[::2], x.astype(">i4"), np.array(number), np.float64(number)),
        [{"of": x, (1, "b"): np.array([[number]], np.uint64)}, "text", x.astype(np.bool_)],
        [np.ones(2), np.full((2, 2), number, np.complex128), 2**70 + number],
    ]
    if torch is not None:
        t = torch.arange(6.0).reshape(2, 3) + number
        found.append({"t": t, "half": t.bfloat16(), "x": x, "none": t[:, :0], "turned": t.T})
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(b) is (tuple if isinstance(a, tuple) else list) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        is_like = a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape
        return type(b) is np.ndarray and is_like and bool((a == b).all())
    if torch is not None and isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("which", range(6))
async def test_values_with_arrays_arrive(transport: str, which: int) -> None:
    if which == 5 and torch is None:
        pytest.skip("torch is not installed")
    async with pair(transport) as (a, b):
        before: Any = None
        for number in range(4):
            x = arrays_of(number)[which]
            value, is_prepared = await there(a, b, x, tag="rows")
            assert same(x, value), (x, value)
            assert before is None or same(arrays_of(number - 1)[which], before)
            assert is_prepared == (transport == "shm" and number > 0)
            before = value


async def test_records_show_the_arrays_of_values(transport: str) -> None:
    """As the ordinary way does."""
    async with pair(transport) as (a, b):
        for x in ({"x": np.ones(3), "y": [np.ones((2, 2), np.int8)]}, [np.ones(2)] * 6, {"n": 1}):
            for _ in range(2):
                await there(a, b, x)
            await asyncio.gather(a.ssend(x, 1), b._context.p2p.recv(0))
            for group, ops in ((a, ("send", "ssend")), (b, ("recv",))):
                entries = group._context.endpoint.recorder.entries(0.0)
                found = [(entry.call, entry.nbytes) for entry in entries if entry.op in ops]
                assert len(set(found[-3:])) == 1


async def test_pickles_take_the_ordinary_way(transport: str) -> None:
    options = {"transports": (transport,), "op_timeout": 30.0, "allow_pickle": True}
    async with aiodist.local(2, **options) as (a, b):  # type: ignore[arg-type]
        for number in range(4):
            x = {"set": {number}, "x": np.full(3, number)}
            value, is_prepared = await there(a, b, x)
            assert same(x.pop("x"), value.pop("x")) and x == value and not is_prepared


async def test_a_message_that_lies_about_its_arrays(transport: str) -> None:
    """It is as long as the last one, but has more or fewer bytes of arrays than it says."""
    async with pair(transport) as (a, b):
        x = [np.ones(8)]
        meta = encode(x).meta
        for lie in (encode([np.ones(7)]).meta, encode([np.ones(9)]).meta):
            for _ in range(2):
                assert same(x, (await there(a, b, x))[0])
            assert len(lie) == len(meta)
            header = pack_fields(kinds.P2P, a._context.id, frames.EAGER, 0, False, len(lie))
            a._context.peers[1].send(header, [memoryview(lie + bytes(64))])
            with pytest.raises(ProtocolError, match=r"but there are 64"):
                await b.recv(src=0)
            assert same(x, (await there(a, b, x))[0])


async def test_a_message_that_cannot_be_kept_ends_its_link(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next receive would get the message behind it."""

    def frame(*_: Any) -> Any:
        raise MemoryError("no memory for a frame")

    async with pair(transport) as (a, b):
        for _ in range(2):
            assert (await there(a, b, {"x": np.ones(3)}))[0]["x"].tolist() == [1] * 3
        a.send({"x": np.ones(3)}, 1)
        monkeypatch.setattr(values, "read", frame)
        monkeypatch.setattr(b._context.p2p, "frame", frame)
        with pytest.raises(aiodist.PeerLostError, match="no memory for a frame"):
            await b.recv(src=0)


async def test_numbers_may_change_and_lengths_too(transport: str) -> None:
    async with pair(transport) as (a, b):
        for number in range(20):
            for x in ({"task": number, "loss": number / 7}, "x" * number, number):
                assert (await there(a, b, x))[0] == x


async def test_what_is_as_long_may_be_something_else(transport: str) -> None:
    """An array without elements, a numpy scalar, a message that waits for its receive, and bytes
    that make no sense."""
    others = [np.empty((0,), np.int16), np.float64(1.5), np.empty((2, 0), np.int32)]
    async with pair(transport) as (a, b):
        for other in others:
            text = "x" * (len(encode(other).meta) - 2)
            for _ in range(3):
                assert (await there(a, b, text))[0] == text
            value, _ = await there(a, b, other)
            assert same(other, value)
        waiting = a.ssend("12345678", 1)
        assert await b.recv(src=0) == "12345678"
        await waiting
        for _ in range(2):
            assert (await there(a, b, "12345678"))[0] == "12345678"
        header = pack_fields(kinds.P2P, a._context.id, frames.EAGER, 0, False, 10)
        a._context.peers[1].send(header, [memoryview(b"\xc1" * 10)])
        with pytest.raises(ProtocolError, match="metadata"):
            await b.recv(src=0)
        assert (await there(a, b, "fine"))[0] == "fine"


async def test_a_place_of_as_many_bytes_is_no_place_for_a_value(transport: str) -> None:
    async with pair(transport) as (a, b):
        for _ in range(4):
            assert (await there(a, b, "hello"))[0] == "hello"
            sent = a.send("hello", 1)
            out = np.zeros(len(encode("hello").meta), np.uint8)
            with pytest.raises(aiodist.MismatchError, match="the incoming value is str"):
                await b.recv(src=0, out=out)
            assert not out.any()
            assert await b.recv(src=0) == "hello"
            await sent


async def test_what_is_not_plain_is_not_overtaken(transport: str) -> None:
    """By messages that came in one piece with it."""
    async with pair(transport) as (a, b):
        for _ in range(20):
            assert (await there(a, b, "abc"))[0] == "abc"
            sends = [a.send(x, 1) for x in ("\ud800", "second", "third")]
            assert [await b.recv(src=0) for _ in range(3)] == ["\ud800", "second", "third"]
            await asyncio.gather(*sends)


async def test_values_of_nearly_the_most_bytes(transport: str) -> None:
    """Also if arrays of that size may be pushed."""
    async with pair(transport) as (a, b):
        for length in (20_000, *range(EAGER - 40, EAGER + 8)):
            x = np.ones(length) if length == 20_000 else "x" * length
            for _ in range(3):
                received = b.recv(src=0)
                await asyncio.sleep(0)  # it says that it waits
                sent = a.send(x, 1)
                value = await received
                assert (value == x).all() if isinstance(x, np.ndarray) else value == x
                await sent


async def test_a_message_that_is_there_before_the_group_ends_is_received(transport: str) -> None:
    async with pair(transport) as (a, b):
        for _ in range(3):
            assert (await there(a, b, "hello"))[0] == "hello"
        a.send(5, 1)
        a.revoke()
        assert await b.recv(src=0) == 5


async def test_values_take_turns_with_arrays(transport: str) -> None:
    """The compiled part knows the arrays, and leaves the values to the Python code."""
    async with pair(transport) as (a, b):
        for _ in range(4):
            assert ((await there(a, b, np.ones(3)))[0] == 1).all()
        found = [await there(a, b, x) for _ in range(3) for x in (np.zeros(3), 7)]
        assert [value for value, _ in found[1::2]] == [7] * 3
        assert transport != "shm" or all(is_prepared for _, is_prepared in found[2:])


async def test_values_keep_their_order(transport: str) -> None:
    async with pair(transport) as (a, b):
        assert (await there(a, b, 0))[0] == 0
        early = b.recv(src=0)
        sends = [a.send(number, 1, tag=number % 2) for number in range(1, 200)]
        assert await early == 1
        assert await b.recv(src=0, tag=0) == 2
        assert [await b.recv(src=0) for _ in range(197)] == list(range(3, 200))
        await asyncio.gather(*sends)
