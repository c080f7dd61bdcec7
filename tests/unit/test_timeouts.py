"""What is a timeout, and what is none."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

import aiodist
from aiodist import timeouts


@pytest.mark.parametrize("seconds", [1, 0.5, 5e-324, sys.float_info.max, 10**308, math.inf])
def test_numbers_of_seconds(seconds: float) -> None:
    assert timeouts.is_timeout(seconds)
    timeouts.check_timeout(seconds)


@pytest.mark.parametrize("wrong", [0, -1, -math.inf, math.nan, 10**400, -(10**400), True, "1", 1j])
def test_what_is_none(wrong: Any) -> None:
    assert not timeouts.is_timeout(wrong)
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        timeouts.check_timeout(wrong)


@pytest.mark.parametrize("name", ["timeout", "op_timeout", "lease"])
def test_options_of_connect_that_no_timer_can_wait_for(name: str) -> None:
    wrong: Any = {name: 10**400}
    with pytest.raises(ValueError, match=f"{name} is at most 1.79769e.308 seconds, or math.inf"):
        aiodist.connect("inproc://nowhere", rank=0, size=1, **wrong)
