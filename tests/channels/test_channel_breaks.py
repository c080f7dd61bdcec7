"""Connections of a channel break between two that live: versions come whole, and nothing is copied
for that, but what a user may write again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage

from aiodist.transports.retransmission import LentFrame

FLOATS = 40_000
"""Of each of the arrays of a version: it comes in several parts, each of several packets."""


def weights(version):
    return {name: np.full(FLOATS, float(version)) for name in "abcdefgh"}


def taken(at, *, arrived=False, lend=False, versions=3):
    """A subscriber takes some versions, whose memory is used again for each; a connection between
    the two breaks after so many bytes. How often one broke."""
    stage = ChannelStage(2, seed=at)
    sim = stage.sim
    has = [asyncio.Event() for _ in range(versions)]
    if at:
        sim.network.break_after(sim.nodes[0], sim.nodes[1], at, arrived=arrived)

    async def publishes():
        async with stage.publisher(keep=1, deltas=False) as out:
            for version in range(versions):
                params = weights(version)
                await out.publish(params, version=version, lend=lend)
                await has[version].wait()
                if lend:
                    await out.take_back(version)
                for array in params.values():
                    array[:] = -1.0
            await stage.done.wait()

    async def subscribes():
        async with stage.subscriber() as inside:
            async for version, tree in inside:
                assert all((array == version).all() for array in tree.values())
                has[version].set()
                if version == versions - 1:
                    break
        stage.done.set()

    stage.play({0: publishes(), 1: subscribes()})
    return sim.network.broken


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("arrived", [False, True], ids=["in flight", "arrived"])
@pytest.mark.sample(3)
def test_versions_come_whole_wherever_a_connection_breaks(arrived, lend):
    size = sum(array.nbytes for array in weights(0).values())
    ats = range(size // 7, 3 * size, size // 2)
    assert sum(taken(at, arrived=arrived, lend=lend) for at in ats) >= len(ats) - 1


@pytest.mark.parametrize("lend", [False, True])
def test_what_may_be_sent_again_is_copied_only_of_what_was_lent(monkeypatch, lend):
    copied = []
    copy = LentFrame.copy

    def counted(lent, copies):
        copied.append(lent.nbytes)
        copy(lent, copies)

    monkeypatch.setattr(LentFrame, "copy", counted)
    taken(0, lend=lend)
    assert (sum(copied) > 0) == lend
