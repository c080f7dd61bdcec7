"""Arrays of the stand-in device, moved between ranks of one loop, on the device and by the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import StandinDevice, hold

import aiodist
from aiodist import Group, MismatchError

Devices = Callable[[int], list[StandinDevice]]


async def each(groups: list[Group], call: Callable[[Group, int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))


def of_rank(rank: int, more: int = 0) -> Any:
    return np.arange(6.0 + rank + more) + 10 * rank


def check(device: StandinDevice, got: Any, due: Any) -> None:
    np.testing.assert_array_equal(device.get(got), due)


async def test_gathered(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        xs = [device.put(of_rank(r)) for r, device in enumerate(ranks)]
        for got, device in zip(
            await each(groups, lambda g, r: g.all_gather(xs[r])), ranks, strict=True
        ):
            assert len(got) == 3
            for src, part in enumerate(got):
                check(device, part, of_rank(src))
        outs = [device.new("float64", (6 + r,)) for r, device in enumerate([ranks[1]] * 3)]
        got = await each(groups, lambda g, r: g.gather(xs[r], 1, out=outs if r == 1 else None))
        assert got[0] is got[2] is None and got[1] is outs
        for src, part in enumerate(outs):
            check(ranks[1], part, of_rank(src))


async def test_broadcast_of_a_view(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        x = np.arange(12).reshape(3, 4)
        xs = [device.put(x.T.copy() if r != 1 else x) for r, device in enumerate(ranks)]
        for r, device in enumerate(ranks):
            if r != 1:
                device.fill(xs[r], 0)
        given = [array.T if r == 1 else array for r, array in enumerate(xs)]
        got = await each(groups, lambda g, r: g.broadcast(given[r], 1))
        for device, own, result in zip(ranks, given, got, strict=True):
            assert result is own
            check(device, result, x.T)


async def test_scattered(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        slots = [ranks[0].put(of_rank(r)) for r in range(3)]
        outs = [device.new("float64", (6 + r,)) for r, device in enumerate(ranks)]
        got = await each(
            groups, lambda g, r: g.scatter(slots if r == 0 else None, 0, out=outs[r] if r else None)
        )
        for r, (device, result) in enumerate(zip(ranks, got, strict=True)):
            check(device, result, of_rank(r))
        xs = [[device.put(of_rank(r, dst)) for dst in range(3)] for r, device in enumerate(ranks)]
        got = await each(groups, lambda g, r: g.all_to_all(xs[r]))
        for r, (device, result) in enumerate(zip(ranks, got, strict=True)):
            for src, part in enumerate(result):
                check(device, part, of_rank(src, r))


SHARED: dict[str, Callable[[Group, list[Any]], Any]] = {
    "all_to_all": lambda g, xs: g.all_to_all(xs, out=xs),
    "all_gather": lambda g, xs: g.all_gather(xs[0], out=[*xs[1:], xs[0]]),
    "gather": lambda g, xs: g.gather(xs[0], out=None if g.rank else [*xs[1:], xs[0]]),
    "scatter": lambda g, xs: g.scatter(None if g.rank else xs, out=xs[1]),
}
DUE: dict[str, list[list[int]]] = {  # of the arrays with 10 * rank + index, by rank and index
    "all_to_all": [[0, 10, 20], [1, 11, 21], [2, 12, 22]],
    "all_gather": [[20, 0, 10]] * 3,
    "gather": [[20, 0, 10], [10, 11, 12], [20, 21, 22]],
    "scatter": [[0, 0, 2], [10, 1, 12], [20, 2, 22]],
}


@pytest.mark.parametrize("op", SHARED)
async def test_all_inputs_are_read_before_out_is_written(
    ranks: list[StandinDevice], op: str
) -> None:
    async with aiodist.local(3) as groups:
        xs = [
            [device.put(np.full(4, 10 * r + i)) for i in range(3)] for r, device in enumerate(ranks)
        ]
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        works = [SHARED[op](g, xs[g.rank]) for g in groups]
        for _ in range(10):  # the others would have written by then
            await each(groups, lambda g, r: g.all_reduce(1, tag="other"))
        gate.set()
        await asyncio.gather(*works)
        for device, arrays, due in zip(ranks, xs, DUE[op], strict=True):
            assert [int(device.get(array)[0]) for array in arrays] == due


async def test_what_lies_in_its_own_slot_is_not_copied(
    ranks: list[StandinDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiodist.local(3) as groups:
        outs = [device.put(np.full((3, 4), r)) for r, device in enumerate(ranks)]
        for device in ranks:
            monkeypatch.setattr(device, "empty", None)
        await each(groups, lambda g, r: g.all_gather(outs[r][r], out=outs[r]))
        for device, out in zip(ranks, outs, strict=True):
            check(device, out, np.repeat(np.arange(3), 4).reshape(3, 4))


async def test_what_lies_where_a_longer_value_goes_is_not_read_too_late(
    ranks: list[StandinDevice], request: pytest.FixtureRequest
) -> None:
    """Rank 1 cannot know in the call that its value does not lie in its own slot."""
    async with aiodist.local(3) as groups:
        outs = [device.put(np.arange(12.0)) for device in ranks]
        xs = [device.put(np.full(2 + 2 * r, 10.0 * r)) for r, device in enumerate(ranks)]
        xs[1] = outs[1][4:8]  # the slot of a second of three equal values
        works = [g.all_gather(xs[g.rank], out=outs[g.rank]) for g in groups]
        ends = await asyncio.gather(*works, return_exceptions=True)
        if request.node.callspec.params["ranks"] == "device":
            assert {type(end) for end in ends} == {MismatchError}
            assert all("x lies in out where the value of another" in str(end) for end in ends)
        else:
            for device, out in zip(ranks, outs, strict=True):
                check(device, out, [0.0] * 2 + [4.0, 5.0, 6.0, 7.0] + [20.0] * 6)


async def test_a_rank_uses_two_devices_at_once(devices: Devices) -> None:
    ranks = [devices(2), devices(2)]
    async with aiodist.local(2) as groups:
        xs = [[device.put(of_rank(0, i)) for i, device in enumerate(pair)] for pair in ranks]
        for turn in range(2):  # the second time, the handles are known
            where = [(g, i) for i in range(2) for g in groups]
            await asyncio.gather(*(g.all_reduce(xs[g.rank][i], tag=i) for g, i in where))
            got = await asyncio.gather(*(g.all_gather(xs[g.rank][i], tag=i) for g, i in where))
            for number, parts in enumerate(got):
                index, rank = divmod(number, 2)
                for part in parts:
                    assert part.__aiodist_device__ is ranks[rank][index]
                    check(ranks[rank][index], part, of_rank(0, index) * 2 ** (turn + 1))


async def test_places_that_share_memory(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(2) as groups:
        x = device.put(np.ones(4))
        with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] share memory"):
            groups[0].all_gather(x, out=[x, x])
        with pytest.raises(ValueError, match="share a part of their memory"):
            groups[0].broadcast([x, x[1:]], 1)


async def test_out_that_does_not_fit(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        xs = [device.put(np.ones(4 if r == 0 else 5)) for r, device in enumerate(ranks)]
        works = [g.broadcast(x, 0) for g, x in zip(groups, xs, strict=True)]
        ends = await asyncio.gather(*works, return_exceptions=True)
        assert any(isinstance(end, MismatchError) for end in ends[1:])
        assert all(isinstance(end, aiodist.AiodistError) for end in ends)


INTO: dict[str, Callable[[Group, Any, Any], Any]] = {
    "broadcast": lambda g, x, out: g.broadcast(x if out is None else out, 1),
    "all_gather": lambda g, x, out: g.all_gather(x[g.rank], out=out),
    "scatter": lambda g, x, out: g.scatter(None if g.rank == 0 else [x, x], 1, out=out),
    "all_to_all": lambda g, x, out: g.all_to_all(list(x), out=out),
}


@pytest.mark.parametrize("op", INTO)
async def test_what_comes_from_hosts_comes_after_the_stream_of_the_call(
    devices: Devices, op: str
) -> None:
    """Whichever stream is the current one when it is there."""
    (device,) = devices(1)
    x = np.ones((2, 3))
    async with aiodist.local(2) as groups:
        out = device.new("float64", (2, 3))
        usual, side = device.current(), device.stream()
        device._current = side
        gate = side.hold()
        device.fill(out, 7.0)
        work = INTO[op](groups[0], x, out)
        device._current = usual
        other = INTO[op](groups[1], x, None)
        for _ in range(10):  # however long it is waited
            await each(groups, lambda g, r: g.all_reduce(1, tag="other"))
        assert not work.done()
        gate.set()
        await asyncio.gather(work, other)
        check(device, out, x)


async def test_what_has_to_be_made_flat_is_read_once_it_is(devices: Devices) -> None:
    ranks = devices(2)
    x = np.arange(12.0).reshape(3, 4)
    async with aiodist.local(2) as groups:
        given, out = ranks[0].put(x), ranks[1].new("float64", (4, 3))
        ranks[0].get(given)
        gate = hold(groups[0]._context.device_memory.stream(ranks[0]))
        works = [groups[0].broadcast(given.T, 0), groups[1].broadcast(out, 0)]
        for _ in range(10):  # however long it is waited
            await each(groups, lambda g, r: g.all_reduce(1, tag="other"))
        gate.set()
        await asyncio.gather(*works)
        check(ranks[1], out, x.T)
