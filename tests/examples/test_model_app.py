"""Web workers with weights: two of them in this process, and a publisher."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist

APP = Path(__file__).parents[2] / "examples" / "service" / "model_app.py"

pytestmark = pytest.mark.timeout(120)


def worker() -> Any:
    """The module of the example, as a process of its own would have it."""
    spec = importlib.util.spec_from_file_location("model_app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_workers_follow_the_weights_and_know_of_each_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        monkeypatch.setenv("AIODIST_ADDRESS", coordinator.address)
        one, two = worker(), worker()

        async def get(module: Any, what: str) -> Any:
            response = await getattr(module, what)(None)
            return json.loads(bytes(response.body))

        async with one.life(one.app), two.life(two.app):
            assert (await get(one, "answer")) == {"version": -1, "answer": 0.0}
            async with aiodist.publisher("policy") as out:
                await out.publish({"w": np.array([1.0, 2.0, 3.0])}, version=7)
                async with asyncio.timeout(60):
                    while await get(one, "versions") != [7, 7]:
                        pass  # the weights are on their way
                assert await get(two, "answer") == {"version": 7, "answer": 6.0}
    assert capfd.readouterr().out.count("version 7 is here") == 2
