"""The suite of devices on the stand-in, between processes."""

from __future__ import annotations

import sys
from typing import Any

import device_suite
import pytest

import aiodist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory")


@pytest.mark.parametrize("program", device_suite.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.sample(2)
def test_standin(program: Any) -> None:
    assert aiodist.run(program, 3, ("standin",)) == [None] * 3


def test_some_ranks_without_a_device_over_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_TRANSPORTS", "tcp,cuda_ipc")
    assert aiodist.run(device_suite.mixed, 4, ("standin",)) == [None] * 4
