"""What is said to the judge of a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.testing.history import History
from aiodist.testing.judge import SLACK, Judge
from aiodist.trace import Scope


class Work:
    """A barrier."""

    op, tag, seq = "barrier", None, 0


@pytest.mark.parametrize(("timeout", "late"), [(1.0, True), (3.0, False), (math.inf, False)])
def test_what_ends_long_after_its_deadline_is_a_problem(timeout: float, late: bool) -> None:
    times = [0.0]
    history = History(lambda: times[-1])
    judge: Any = SimpleNamespace(simulation=SimpleNamespace(history=history))
    scope, work = Scope("g", 1, 0, 1, b"id"), Work()
    history(scope, "start", work, None)
    Judge.expect(judge, cast(Any, work), timeout)
    times.append(2.0 + SLACK)
    history(scope, "cancelled", work, None)
    assert bool(history.problems()) == late
