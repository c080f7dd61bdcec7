"""Ray Train over the torch backend."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: make integrations", allow_module_level=True)


@pytest.mark.timeout(240)
def test_the_example(ray_cluster: str, play: Any) -> None:
    expected = "{'backend': 'aiodist', 'line': [3.0, 1.0], 'alike': True}"
    assert expected in play("ray/train.py", RAY_ADDRESS=ray_cluster)
