"""Servers have the newest of what a trainer has learned."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import aiodist

PROGRAM = Path(__file__).parents[2] / "examples" / "weights" / "policy.py"


async def test_servers_follow_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("policy", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
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
