"""A short run of `make long-life`: nothing grows."""

from __future__ import annotations

import pytest
from long_life import Life

from aiodist import recorder


@pytest.mark.timeout(300)
def test_nothing_grows_while_groups_and_members_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "KEPT", 20)  # of the last operations, so that it is full soon
    counts = Life(seconds=2400.0, every=300.0).run()
    assert len(counts) == 8
    early, late = counts[3], counts[-1]
    assert late.requests == 2 * early.requests
    assert late.tasks == early.tasks
    assert late.sockets == early.sockets
    assert late.objects < early.objects + 120  # less than one for each request
