"""Subscribers of one host that want slices: each byte crosses to the host once, and lies there once
for all who want the same."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from channel_stage import ChannelStage

import aiodist
from aiodist.channels import manifest, store
from aiodist.channels.lots import Lot
from aiodist.channels.memory import VersionMemory
from aiodist.channels.slicing import Slicing
from aiodist.schedules.resharding import volume

CHUNK = 1 << 16
SHAPE = (512, 512)
W = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64).reshape(SHAPE)
COLUMN = W.nbytes // SHAPE[1]
SAID = 60_000
"""Bytes at most that are said about slices, and not theirs."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def columns(first, last, *, of=np.int64):
    index = (slice(None), slice(first, last))
    return {"w": aiodist.Shard(np.zeros((SHAPE[0], last - first), of), index, SHAPE)}


def are_right(into):
    shard = into["w"]
    return np.array_equal(shard.array, W[shard.index])


def mapped_here():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}


def sent(*those):
    """Bytes, also to those who have not been left yet."""
    return sum(one._participant.meetings.bytes_moved[0] for one in those)


class Site:
    """A coordinator, publishers that seem to be on another host, and subscribers of this one."""

    def __init__(self, stack, address):
        self.stack = stack
        self.options = {"address": address, "patience": 5.0}

    async def publisher(self, value, **more):
        out = aiodist.publisher("policy", **{**self.options, "transports": ("tcp",), **more})
        await self.stack.enter_async_context(out)
        await out.publish(value, version=1)
        return out

    async def subscribers(self, count):
        return [
            await self.stack.enter_async_context(aiodist.subscriber("policy", **self.options))
            for _ in range(count)
        ]


@pytest.fixture
def play(run):
    def played(scenario):
        async def main():
            async with (
                aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
                AsyncExitStack() as stack,
            ):
                await scenario(Site(stack, coordinator.address))

        run(main())
        assert not mapped_here()

    return played


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("wanted", "memories"),
    [
        ([(0, 200)] * 3, 1),
        ([(0, 200), (100, 300), (50, 250)], 3),
        ([(0, 400), (100, 300), (100, 300)], 2),
    ],
)
def test_what_crosses_is_what_somebody_of_the_host_wants(play, wanted, memories, at_once):
    """And not more, whoever wants how much of it; memory is had by those who want something
    else."""

    @play
    async def scenario(site):
        out = await site.publisher({"w": W})
        servers = await site.subscribers(len(wanted))
        intos = [columns(*one) for one in wanted]
        takes = [one.latest(into=into) for one, into in zip(servers, intos, strict=True)]
        if at_once:
            await asyncio.gather(*takes)
        else:
            for take in takes:
                await take
        assert all(are_right(into) for into in intos)
        assert len(mapped_here()) == memories
        union = COLUMN * (max(last for _, last in wanted) - min(first for first, _ in wanted))
        assert union < sent(out) < union + SAID
        assert sent(*servers) < SAID


def test_nothing_crosses_on_the_publishers_host(play):
    @play
    async def scenario(site):
        out = await site.publisher({"w": W}, transports=None)
        (server,) = await site.subscribers(1)
        into = columns(3, 77, of=np.float32)
        into["w"].array[:] = 0
        with pytest.raises(TypeError, match=r"into\['w'\]"):
            await server.latest(into=into)
        into = columns(3, 77)
        assert await server.latest(into=into) == 1
        assert are_right(into)
        assert sent(out) < SAID


def test_a_version_of_several_shares_lies_once_on_a_host(play):
    """Also as a whole tree: arrays of all subscribers are one memory."""

    @play
    async def scenario(site):
        half = SHAPE[0] // 2
        outs = [aiodist.publisher("policy", **site.options, part=(at, 2)) for at in (0, 1)]
        for at, out in enumerate(outs):
            out._participant.store._options = {"transports": ("tcp",)}
            await site.stack.enter_async_context(out)
            rows = slice(at * half, at * half + half)
            await out.publish({"w": aiodist.Shard(W[rows], (rows, slice(None)), SHAPE)}, version=1)
        servers = await site.subscribers(3)
        found = [await one.latest() for one in servers]
        assert all(version == 1 and np.array_equal(tree["w"], W) for version, tree in found)
        assert not any(tree["w"].flags.writeable for _, tree in found)
        assert len(mapped_here()) == 1
        assert sent(*outs) < W.nbytes + 2 * SAID
        assert np.array_equal(found[0][1]["w"], W)  # what was given stays
        del found


def test_who_took_it_for_the_others_leaves_in_the_middle(play, monkeypatch):
    """Who has part of its memory has its own from then on, and asks for the rest."""
    has_half, fill = asyncio.Event(), Lot.fill
    has_lot = asyncio.Event()

    def filled(lot, piece):
        fill(lot, piece)
        has_lot.set()
        if lot.here > W.nbytes / 2 and lot.memory.is_own:
            has_half.set()

    monkeypatch.setattr(Lot, "fill", filled)

    @play
    async def scenario(site):
        out = await site.publisher({"w": W})
        first, other = await site.subscribers(2)
        whole = (0, SHAPE[1])
        going = asyncio.ensure_future(first.latest(into=columns(*whole)))
        await has_lot.wait()
        into = columns(*whole)
        taking = asyncio.ensure_future(other.latest(into=into))
        await has_half.wait()
        going.cancel()
        await first.__aexit__(None, None, None)
        with pytest.raises((asyncio.CancelledError, aiodist.GroupClosedError)):
            await going
        assert await taking == 1
        assert are_right(into)
        (lot,) = other._participant.stock.lots.values()
        assert lot.memory.is_own or lot.is_whole
        assert sent(out) < 1.9 * W.nbytes


def test_memory_that_cannot_be_mapped_is_no_hindrance(play, monkeypatch):
    async def refused(*_, **__):
        raise ConnectionError("no memory is passed on")

    @play
    async def scenario(site):
        await site.publisher({"w": W})
        first, other = await site.subscribers(2)
        await first.latest(into=columns(0, 9))
        monkeypatch.setattr("aiodist.channels.parcels.take_segment", refused)
        into = columns(5, 12)
        assert await other.latest(into=into) == 1
        assert are_right(into)


@pytest.mark.parametrize("seed", range(6))
def test_what_crosses_to_each_host_is_the_union_of_what_its_ranks_want(monkeypatch, seed):
    """On simulated hosts, of three ranks each, where memory is not mapped."""
    chance = random.Random(seed)
    ranks = range(1, 7)
    stage = ChannelStage(1 + len(ranks), seed=seed)
    hosts = {f"10.0.1.{1 + rank}": "AB"[rank > 3] for rank in ranks}
    found, take_from = store.memory_of, Slicing._take
    wanted = {host: np.zeros(SHAPE[1], bool) for host in "AB"}
    crossed = dict.fromkeys(wanted, 0)
    left = {*ranks}

    def memory_of(member):
        return found(member)._replace(host=hosts.get(member.host, ""))

    def nbytes(ask):
        return sum(8 * volume(piece.box) for parcel in ask.parcels for piece in parcel)

    async def take_counted(slicing, lot, ask, base):
        asked = nbytes(ask)
        try:
            await take_from(slicing, lot, ask, base)
        finally:
            if not slicing._is_near(ask.place):
                crossed[at[slicing._participant.store.id]] += asked - nbytes(ask)

    at: dict[str, str] = {}
    monkeypatch.setattr(store, "memory_of", memory_of)
    monkeypatch.setattr(Slicing, "_take", take_counted)
    monkeypatch.setattr(VersionMemory, "words", lambda memory: None)

    async def publish():
        async with stage.publisher() as out:
            await out.publish({"w": W}, version=1)
            await stage.done.wait()
            await asyncio.sleep(1)  # those it has met have left
            return out.bytes_sent

    async def take(rank):
        host = "AB"[rank > 3]
        first, last = sorted(chance.sample(range(SHAPE[1] + 1), 2))
        wanted[host][first:last] = True
        await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.1)]))
        async with stage.subscriber() as weights:
            at[weights._participant.store.id] = host
            into = columns(first, last)
            await weights.latest(into=into)
            assert are_right(into)
            left.discard(rank)
            if not left:
                stage.done.set()
            await stage.done.wait()

    sent, *_ = stage.play({0: publish(), **{rank: take(rank) for rank in ranks}})
    assert crossed == {host: COLUMN * int(mask.sum()) for host, mask in wanted.items()}
    union = COLUMN * int((wanted["A"] | wanted["B"]).sum())
    assert union < sent < union + SAID
