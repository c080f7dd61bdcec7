"""Servers have the newest of what a trainer has learned."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing.simulation import Simulation

PROGRAM = Path(__file__).parents[2] / "examples" / "weights" / "policy.py"


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("policy", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize("durable", [True, False])
def test_all_go_on_when_the_coordinator_is_restarted(
    program: Any, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIST_TRANSPORTS", "tcp")
    sim = Simulation(2, durable=durable)
    server = program.Server()

    async def restart() -> None:
        await asyncio.sleep(1)
        sim.restart_coordinator(20)

    async def train() -> None:
        restarting = asyncio.ensure_future(restart())
        await program.train(sim.address)
        await restarting

    sim.play({0: train(), 1: server.follow(sim.address, last=program.STEPS - 1)})
    assert server.version == program.STEPS - 1


async def test_servers_follow_a_trainer(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program.STEPS = 3
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        servers = [program.Server() for _ in range(2)]
        following = [server.follow(coordinator.address, last=2) for server in servers]
        await asyncio.gather(program.train(coordinator.address), *following)
    for server in servers:
        assert server.version == 2
        assert np.allclose(server.tree["w"], program.TRUTH * 7 / 8)
        assert server.answer([1, 1, 1]) == pytest.approx(1.75)
    assert "version 2: 1.750" in capsys.readouterr().out
