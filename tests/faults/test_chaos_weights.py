"""A short run of `make chaos-weights`."""

from __future__ import annotations

import pytest
from fault_programs import ran


@pytest.mark.long
@pytest.mark.timeout(420)
def test_all_get_new_versions_after_every_fault() -> None:
    said = ran("chaos_weights.py", "-n", 12, "--seed", 4, "--channels", 2)
    assert '"versions"' in said
