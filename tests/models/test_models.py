"""A small size of each of `make models`, and a fault that it finds."""

from __future__ import annotations

import re
from pathlib import Path

import channel_model
import membership_model
import pytest
from channel_model import CHANNEL
from checking import IS_HERE, Model, Size, check
from membership_model import MEMBERSHIP

pytestmark = [
    pytest.mark.skipif(not IS_HERE, reason="Spin is not installed"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize(
    ("model", "small", "fault"),
    [
        (
            MEMBERSHIP,
            membership_model.Size(2, 0, kills=1, cuts=0, restarts=1),
            "OUTCOME_NOT_LEARNED",
        ),
        (CHANNEL, channel_model.Size(1, 1, kills=0, restarts=1), "SEAT_NOT_KEPT"),
    ],
)
def test_the_model_holds_and_a_rule_that_is_left_out_is_found(
    tmp_path: Path, model: Model, small: Size, fault: str
) -> None:
    whole = check(model, small, tmp_path)
    assert whole.error is None
    assert whole.states > 300
    found = check(model, small, tmp_path, fault)
    assert found.error is not None
    assert found.states < whole.states


@pytest.mark.parametrize("model", [MEMBERSHIP, CHANNEL])
def test_each_fault_is_one_of_the_model(model: Model) -> None:
    named = re.findall(r"^#ifn?def FAULT_(\w+)$", model.text, re.MULTILINE)
    assert set(named) == model.faults.keys()
    assert len(model.sizes) == len(set(model.sizes))
