"""The stand-in device between processes: on a lane, over links, and when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
from standin import StandinDevice

import aiodist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory")


async def lane_is_there(group: aiodist.Group) -> bool:
    over = 0
    while not over:  # as often on all ranks
        setup = group._context._setup
        over = await group.all_reduce(int(setup is None or setup.over), aiodist.ReduceOp.MIN)
    return group._context.lane is not None


async def repeated(group: aiodist.Group) -> tuple[bool, float, int]:
    on_lane = await lane_is_there(group)
    device = StandinDevice()
    x = device.put(np.zeros(100_000, np.float32))
    for turn in range(30):
        device.fill(x, group.rank + turn)
        await group.all_reduce(x, tag=None if turn % 3 else "tagged")
        got = device.get(x)
        due = 3 * turn + 3
        assert (got == due).all(), (turn, got[:4], due)
    value = float(device.get(x)[0])
    device.close()
    return on_lane, value, device.opened


def test_between_processes() -> None:
    assert aiodist.run(repeated, 3) == [(True, 90.0, 2)] * 3


async def one_dies(group: aiodist.Group) -> str:
    await lane_is_there(group)
    device = StandinDevice()
    x = device.put(np.ones(1000))
    await group.all_reduce(x)
    device.fill(x, 1.0)
    if group.rank == 1:
        device.current().hold()  # it never comes to the end
    work = group.all_reduce(x)
    if group.rank == 1:
        for _ in range(20):
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await work
    except aiodist.PeerLostError as error:
        device.get(x)  # nothing holds the stream up
        device.close()
        return str(error.ranks)
    return "done"


async def survivors(group: aiodist.Group) -> str:
    return await one_dies(group)


def test_a_killed_rank_fails_the_others() -> None:
    with pytest.raises(Exception) as caught:
        aiodist.run(survivors, 3)
    assert "1" in str(caught.value)
