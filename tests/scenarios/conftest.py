"""Coordinators that go away and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodist.coordinator.actor import Coordinator
from aiodist.membership import recovery


class Machine:
    """Where coordinators run one after the other, at one address."""

    coordinator: Coordinator

    def __init__(self, state: Path | None) -> None:
        self.state = state
        self.address = "tcp://127.0.0.1:0"

    async def start(self, **options: Any) -> None:
        self.coordinator = Coordinator(self.address, state=self.state, **options)
        await self.coordinator.start()
        self.address = self.coordinator.address

    async def kill(self) -> None:
        """End it as a SIGKILL does: nobody is told, and nothing more is written."""
        coordinator = self.coordinator
        coordinator._stopping = True
        if coordinator._journal is not None:
            coordinator._journal._waiting.clear()
            coordinator._journal._carry_out = lambda effects: None
        for connection in list(coordinator._clients._connections.values()):
            connection.abort()
        await coordinator.stop()

    async def restart(self, **options: Any) -> None:
        await self.kill()
        await self.start(**options)


@pytest.fixture
def machine_with() -> Callable[[Path | None], Machine]:
    """``machine_with(state)``: one whose coordinators have that state file, or none."""
    return Machine


@pytest.fixture(params=["state", "no state"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "state" if request.param == "state" else None)


@pytest.fixture
def durable(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "state")


@pytest.fixture
def forgetful() -> Machine:
    return Machine(None)


@pytest.fixture
def no_ruling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator does not rule on broken links. Else it does so after half a second, which on
    a slow machine is amid what these tests still do with a rank that others have lost."""
    monkeypatch.setattr(recovery, "RULING_SECONDS", 3600.0)
