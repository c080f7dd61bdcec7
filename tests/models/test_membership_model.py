"""A small size of `make models`, and a fault that it finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checking import FAULTS, IS_HERE, SIZES, Size, check

pytestmark = [
    pytest.mark.skipif(not IS_HERE, reason="Spin is not installed"),
    pytest.mark.timeout(120),
]


def test_the_model_holds_and_a_rule_that_is_left_out_is_found(tmp_path: Path) -> None:
    small = Size(2, 0, kills=1, cuts=0, restarts=1)
    whole = check(small, tmp_path)
    assert whole.error is None
    assert whole.states > 300
    found = check(small, tmp_path, "OUTCOME_NOT_LEARNED")
    assert found.error is not None
    assert found.states < whole.states


def test_each_fault_is_one_of_the_model() -> None:
    text = Path(__file__).with_name("membership.pml").read_text()
    named = re.findall(r"^#ifn?def FAULT_(\w+)$", text, re.MULTILINE)
    assert set(named) == FAULTS.keys()
    assert len(SIZES) == len(set(SIZES))
