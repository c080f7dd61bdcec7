"""Versions are found at those that have them after the coordinator has forgotten the lines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage

from aiodist import Shard

N = 1000


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("shares", "sliced"), [(1, False), (2, False), (1, True)])
def test_a_late_subscriber_takes_a_version_whose_publisher_died_before_a_restart(
    durable, shares, sliced
):
    """A model of channels found this: subscribers that had a version did not list it again."""
    stage = ChannelStage(shares + 2, durable=durable)
    taken = asyncio.Event()

    async def publish(at):
        async with stage.publisher(part=(at, shares)) as out:
            rows = slice(at * N // shares, (at + 1) * N // shares)
            await out.publish({"w": Shard(np.arange(N)[rows], (rows,), (N,))}, version=1)
            await taken.wait()

    async def take(weights, first):
        got = np.zeros(first if sliced else N, int)
        into = {"w": Shard(got, (slice(first),), (N,)) if sliced else got}
        assert await weights.latest(into=into, timeout=8) == 1
        assert np.array_equal(got, np.arange(N)[: len(got)])

    async def first():
        async with stage.subscriber() as weights:
            await take(weights, N // 2)
            taken.set()
            await asyncio.sleep(5)
            stage.sim.restart_coordinator(0.5)
            await stage.done.wait()

    async def late():
        await asyncio.sleep(10)
        async with stage.subscriber() as weights:
            await take(weights, N // 4)
        stage.done.set()

    stage.play({**{at: publish(at) for at in range(shares)}, shares: first(), shares + 1: late()})
