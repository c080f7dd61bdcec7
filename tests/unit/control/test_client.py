"""What one membership asks of the coordinator."""

from __future__ import annotations

import pytest

import aiodist
from aiodist.control.client import ControlClient
from aiodist.wire.messages import JoinRequest


@pytest.mark.parametrize(
    ("left", "says"),
    [(0.0, "the group is not complete: 1 of 2"), (-0.02, ".* no time was left to join")],
)
async def test_a_join_that_comes_late_names_the_whole_timeout(left: float, says: str) -> None:
    async with aiodist.Coordinator("inproc://late-join") as coordinator:
        client = await ControlClient.open(coordinator.address)
        with pytest.raises(aiodist.JoinTimeoutError, match=f"gave up joining after 4 s: {says}"):
            await client.join(JoinRequest(group="g", id="me", size=2), left, 4.0)
        client.close()
        await client.closed()
