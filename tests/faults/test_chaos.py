"""A short run of `make chaos`."""

from __future__ import annotations

import pytest
from fault_programs import ran


@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", [6, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.long
def test_everybody_gets_on_after_every_fault(faults: int) -> None:
    said = ran("chaos.py", "-n", faults, "--seed", 2)
    assert "'transports': 'tcp'" in said
