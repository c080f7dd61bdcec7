"""Elastic training: ranks are killed and added, and the result is the right one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ELASTIC = Path(__file__).parents[2] / "examples" / "elastic"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ranks_are_killed_and_added_while_it_trains(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ELASTIC / "demo.py")],
        env=environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("kill -9" in line for line in lines) == 2
    assert sum(line.endswith("starts") for line in lines) == 7
    assert any(line.endswith("of 5") for line in lines)
    found = json.loads(lines[-1])
    assert (found["ranks"], found["agreed"]) == (5, True)
    # What a single process gets, in as many steps.
    assert found["step"] >= 1500
    assert found["accuracy"] == pytest.approx(alone(found["step"]), abs=0.01)
    assert found["accuracy"] > 0.95


def alone(steps: int) -> float:
    spec = importlib.util.spec_from_file_location("elastic_train", ELASTIC / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["elastic_train"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    digits = module.Digits()
    state = module.State(0, np.zeros((65, 10)))
    for step in range(steps):
        state.step = step
        state.weights = state.weights - module.RATE * digits.gradient(state, 0, 1)
    return digits.accuracy(state.weights)
