"""The engine of the test process, which goes on after the tests that use it."""

from __future__ import annotations

import pytest

from aiodist.threads.engine import engine


@pytest.fixture(scope="session", autouse=True)
def the_engine() -> None:
    """Before any test counts threads."""
    engine()
