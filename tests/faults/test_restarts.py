"""A short run of `make restarts`: the coordinator is killed and started again under load."""

from __future__ import annotations

import pytest
from fault_programs import ran


@pytest.mark.timeout(120)
@pytest.mark.long
def test_nothing_is_lost_when_the_coordinator_is_killed() -> None:
    said = ran("restarts.py", "-n", 3, "--ranks", 2, "--seed", 5)
    assert "'restarts': 3" in said
