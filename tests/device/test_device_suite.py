"""The suite of devices on the stand-in, between processes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import aiodist
from aiodist.testing import device_suite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory")


@pytest.mark.parametrize("program", device_suite.PROGRAMS, ids=lambda program: program.__name__)
def test_standin(program: Any) -> None:
    assert aiodist.run(program, 3, ("standin",)) == [None] * 3
