"""Short runs of `make long-life` and `make long-life-real`: nothing grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import long_life_real
import pytest
from long_life import Life

from aiodist import recorder
from aiodist.links import inboxes


@pytest.mark.timeout(300)
def test_nothing_grows_while_groups_and_members_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is remembered of the last operations and closed groups, so that it is full soon.
    monkeypatch.setattr(recorder, "KEPT", 20)
    monkeypatch.setattr(inboxes, "MAX_CLOSED", 5)
    counts = Life(seconds=2400.0, every=300.0).run()
    assert len(counts) == 8
    early, late = counts[3], counts[-1]
    assert late.requests == 2 * early.requests
    assert late.tasks == early.tasks
    assert late.sockets == early.sockets
    assert late.objects < early.objects + 120  # less than one for each request


@pytest.mark.timeout(300)
@pytest.mark.long
def test_nothing_grows_in_real_processes(tmp_path: Path) -> None:
    life = long_life_real.Life(every=1.0, times=10, restart=0.0)
    asyncio.run(life.run(tmp_path))
    assert len(life.counts) == 10
    early, late = life.counts[3], life.counts[-1]
    assert late.requests > early.requests
    # Meanwhile three servers made some 20 groups, and guests, versions and averages came and went.
    assert late.files < early.files + 20
    assert late.threads < early.threads + 10
    assert late.maps < early.maps + 10
    assert late.tasks < early.tasks + 30
