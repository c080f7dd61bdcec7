"""A short run of `make restarts`: the coordinator is killed and started again under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import restarts


@pytest.mark.timeout(120)
def test_nothing_is_lost_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    counted = asyncio.run(restarts.run(3, 2, seed=5, folder=tmp_path))
    assert counted["all_reduces"] > 0
    assert counted["store writes"] > 0
