"""Channels between hosts that are far from each other, beside a broadcast of the same bytes. All
seconds are virtual ones of the simulation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage, line

from aiodist.channels import transfers
from aiodist.testing import Simulation

MIB = 1 << 20
DELAY = 0.05
NBYTES = 2 * MIB
LINE = line(12.5e6, DELAY)


def seconds_of_broadcast(size):
    async def program(group):
        x = np.zeros(NBYTES, np.uint8)
        await group.broadcast(x)
        await group.barrier()
        start = asyncio.get_running_loop().time()
        await group.broadcast(x)
        return asyncio.get_running_loop().time() - start

    return max(Simulation(size, seed=1, conditions=LINE).run(program))


def seconds_of_channel(size, versions=3, late=0.0):
    """Of each version, from the call of `publish` until all have it; and the bytes that the
    publisher sent. Each time another subscriber asks `late`, so many seconds after the others."""
    stage = ChannelStage(size, seed=1, conditions=LINE)
    taken = [[] for _ in range(versions)]
    all_have = [asyncio.Event() for _ in range(versions)]

    async def publish():
        begun = []
        async with stage.publisher(deltas=False) as out:
            await asyncio.sleep(3)  # all have come
            for version in range(versions):
                begun.append(stage.sim.loop.time())
                await out.publish(np.full(NBYTES, version, np.uint8), version=version)
                await all_have[version].wait()
                await asyncio.sleep(1.5)
            stage.done.set()
            return begun, out.bytes_sent

    async def follow(rank):
        async with stage.subscriber() as weights:
            for version in range(versions):
                await weights.wait(newer_than=version - 1)
                if version and version % (size - 1) == rank - 1:
                    await asyncio.sleep(late)
                _, got = await weights.latest(newer_than=version - 1)
                assert (got == version).all()
                taken[version].append(stage.sim.loop.time())
                if len(taken[version]) == size - 1:
                    all_have[version].set()
            await stage.done.wait()

    outcomes = stage.play({0: publish(), **{rank: follow(rank) for rank in range(1, size)}})
    begun, sent = outcomes[0]
    return [max(ends) - start for ends, start in zip(taken, begun, strict=True)], sent


@pytest.mark.parametrize("hosts", [1, 3])
def test_the_line_is_busy_while_a_version_comes(hosts):
    """Chunks that go one after the other take two round trips each."""
    broadcast = seconds_of_broadcast(1 + hosts)
    (first, *others), sent = seconds_of_channel(1 + hosts)
    trip = 2 * DELAY
    assert max(others) <= 1.2 * broadcast + 2 * trip
    # For the first one, each looks for somebody and meets him, and then the next one does.
    assert first <= broadcast + 20 * trip
    assert sent <= 1.05 * 3 * NBYTES  # once, for each version


def test_one_whose_program_asks_a_little_late_keeps_those_behind_it():
    """They would take it from the publisher, which would send each version twice from then on."""
    versions = 4
    _, sent = seconds_of_channel(4, versions, late=0.3)
    assert sent <= 1.05 * versions * NBYTES


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_busy_machine_does_not_make_each_chunk_late(monkeypatch, hosts):
    """A thread waits there for its turn. What has come meanwhile is not waited for one by one."""
    turn = 0.04

    async def in_thread(work):
        await asyncio.sleep(turn)
        return work()

    (_, *quiet), _ = seconds_of_channel(1 + hosts)
    monkeypatch.setattr(transfers, "in_thread", in_thread)
    (_, *others), sent = seconds_of_channel(1 + hosts)
    assert max(others) <= max(quiet) + 2 * turn * hosts
    assert sent <= 1.05 * 3 * NBYTES


def test_those_behind_one_that_lags_catch_up_while_versions_go_on():
    """They give up a version that others have replaced, rather than ask them all for it."""
    size, step, last = 10, 1.0, 16
    stage = ChannelStage(size, seed=1, conditions=LINE)
    stage.options["patience"] = 5.0
    missed = {}

    async def publish():
        async with stage.publisher() as out:
            await asyncio.sleep(2 * size)  # all come and form a chain
            for version in range(1, last + 1):
                await out.publish(np.full(1000, version), version=version)
                await asyncio.sleep(step if version > 1 else 2 * size)
            await stage.done.wait()

    async def follow(rank):
        await asyncio.sleep(2 * size + 2 * rank)  # the first to come is the source of the next
        async with stage.subscriber() as weights:
            version, _ = await weights.latest()
            if rank == 1:
                await stage.done.wait()
                return
            taken = [version]
            while version < last:
                version, got = await weights.latest(newer_than=version)
                assert (got == version).all()
                taken.append(version)
            missed[rank] = last - len(taken)
            if len(missed) == size - 2:
                stage.done.set()
            await stage.done.wait()

    stage.play({0: publish(), **{rank: follow(rank) for rank in range(1, size)}})
    assert max(missed.values()) <= 2, missed
