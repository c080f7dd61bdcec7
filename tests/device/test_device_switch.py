"""`transports=` says whether ranks read each other's devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from standin import StandinDevice

import aiodist
from aiodist.transports import registry

Devices = Callable[[int], list[StandinDevice]]


def test_names() -> None:
    assert registry.allows_devices(None)
    assert registry.allows_devices("tcp, cuda_ipc") and registry.choose("tcp,cuda_ipc") == ("tcp",)
    assert not registry.allows_devices(("inproc", "tcp"))
    with pytest.raises(ValueError, match="'cuda_ipc'"):
        registry.choose("cuda")
    with pytest.raises(ValueError, match="no transport"):
        registry.choose("cuda_ipc")


async def test_left_out_all_goes_through_the_host(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2, transports=("inproc",)) as groups:
        xs = [device.put(np.full(9, 1.0 + r)) for r, device in enumerate(ranks)]
        await asyncio.gather(*(g.all_reduce(x) for g, x in zip(groups, xs, strict=True)))
        got = await asyncio.gather(*(g.all_gather(x) for g, x in zip(groups, xs, strict=True)))
        _, message = await asyncio.gather(groups[0].send(xs[0], 1), groups[1].recv())
        for device, parts in zip(ranks, got, strict=True):
            for part in parts:
                np.testing.assert_array_equal(device.get(part), np.full(9, 3.0))
        np.testing.assert_array_equal(ranks[1].get(message), np.full(9, 3.0))
        assert [device.opened for device in ranks] == [0, 0]
