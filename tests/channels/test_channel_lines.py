"""Versions are found at those that have them after the coordinator has forgotten the lines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage


@pytest.mark.parametrize("durable", [True, False])
def test_a_late_subscriber_takes_a_version_whose_publisher_died_before_a_restart(durable):
    """A model of channels found this: subscribers that had a version did not list it again."""
    stage = ChannelStage(3, durable=durable)
    taken = asyncio.Event()

    async def publish():
        async with stage.publisher() as out:
            await out.publish({"w": np.arange(1000)}, version=1)
            await taken.wait()

    async def first():
        async with stage.subscriber() as weights:
            await weights.latest()
            taken.set()
            await asyncio.sleep(5)
            stage.sim.restart_coordinator(0.5)
            await stage.done.wait()

    async def late():
        await asyncio.sleep(10)
        async with stage.subscriber() as weights:
            try:
                return await weights.latest(timeout=60)
            finally:
                stage.done.set()

    version, tree = stage.play({0: publish(), 1: first(), 2: late()})[2]
    assert version == 1
    assert np.array_equal(tree["w"], np.arange(1000))
