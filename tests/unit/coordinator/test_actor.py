"""The coordinator before it was started, and what it logs."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import aiodist
from aiodist.coordinator.actor import Coordinator


async def test_its_address_is_known_while_it_listens() -> None:
    coordinator = Coordinator()
    with pytest.raises(RuntimeError, match=r"does not listen: call start\(\) first"):
        _ = coordinator.address
    await coordinator.start()
    try:
        assert coordinator.address.startswith("tcp://127.0.0.1:")
    finally:
        await coordinator.stop()


async def test_groups_of_channels_are_logged_below_debug(caplog: pytest.LogCaptureFixture) -> None:
    """A subscriber makes one group, and more for each version: nobody's program has made these."""
    caplog.set_level(logging.DEBUG, "aiodist.coordinator")
    async with (
        Coordinator("inproc://channels-in-the-log") as coordinator,
        aiodist.publisher("policy", address=coordinator.address) as out,
        aiodist.subscriber("policy", address=coordinator.address) as weights,
    ):
        await out.publish({"w": np.ones(3)}, version=1)
        await weights.latest()
    assert not [one for one in caplog.messages if "channel policy" in one]
