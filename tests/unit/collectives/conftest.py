"""What the tests of prepared collectives have in common."""

from __future__ import annotations

import pytest

from aiodist.transports import polling


@pytest.fixture
def no_turn_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(polling, "LOOP_DUE", 3600.0)
