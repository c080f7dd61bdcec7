"""The coordinator before it was started."""

from __future__ import annotations

import pytest

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
