"""Stand-in devices, one a rank, and ranks that cannot read the others'."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from standin import StandinDevice

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


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandinDevice], None]:
    """``blind(device)``: from there, nothing can be read that lies on other devices."""

    def refuse(handle: bytes) -> None:
        raise OSError("no peer access")

    return lambda device: monkeypatch.setattr(device, "open", refuse)


@pytest.fixture(params=["device", "host"])
def ranks(
    request: pytest.FixtureRequest, devices: Devices, blind: Callable[[StandinDevice], None]
) -> list[StandinDevice]:
    """Three devices. What goes to the last of them has to pass through the host, or does not."""
    made = devices(3)
    if request.param == "host":
        blind(made[2])
    return made
