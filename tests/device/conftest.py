"""Stand-in devices, one a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aiodist.testing.standin import StandinDevice

Devices = Callable[[int], list[StandinDevice]]


@pytest.fixture
def devices() -> Iterator[Devices]:
    made: list[StandinDevice] = []

    def make(count: int) -> list[StandinDevice]:
        made.extend(StandinDevice() for _ in range(count))
        return made

    yield make
    for device in made:
        device.close()
    made.clear()
