"""Warnings that strangers can cause do not fill the log."""

from __future__ import annotations

import logging

import pytest

from aiodist.transports.sparing import AT_ONCE, PERIOD, Sparing


def test_the_first_ones_of_each_kind_are_written(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    sparing = Sparing(logging.getLogger("test"), lambda: now)
    for number in range(6000):
        sparing.warning("a", "%s of %d", "a", number)
        now += 1e-4
    sparing.warning("b", "100 % of b")
    assert caplog.messages == [f"a of {number}" for number in range(AT_ONCE)] + ["100 % of b"]
    caplog.clear()
    now += PERIOD
    sparing.warning("a", "%s of %d", "a", 6000, extra={"event": "it"})
    sparing.warning("a", "%s of %d", "a", 6001)
    assert caplog.messages == [
        f"a of 6000 ({6000 - AT_ONCE} more like it were left out)", "a of 6001",
    ]  # fmt: skip
    assert caplog.records[0].__dict__["event"] == "it"
    assert caplog.records[0].__dict__["left_out"] == 6000 - AT_ONCE
    assert caplog.records[0].filename == "test_sparing.py"
