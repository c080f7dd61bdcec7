"""How the lines of a flight record read."""

from __future__ import annotations

import pytest

from aiodist.rank.flight_recorder import _duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "at once"), (0.00005, "0.1 ms"), (0.9, "900.0 ms"), (1.0, "1.0 s"), (90.0, "90.0 s")],
)
def test_how_long_it_took(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
