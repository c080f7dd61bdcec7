"""A small run of `make bench-fleet`, and what it would find."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fleet import ANSWER, DEADLINE, LATE, Fleet, plot


@pytest.mark.long
def test_servers_answer_while_the_trainer_dies_and_servers_come_and_lag(tmp_path):
    fleet = Fleet(servers=4, mib=1, versions=9, seed=1).run()
    assert fleet.answered > 3000
    assert (fleet.failed, fleet.mixed) == (0, 0)
    assert fleet.pause < 1.1 * ANSWER
    taken = {
        at: [one.version for one in fleet.spans if one.server == at] for at in range(fleet.servers)
    }
    assert all(versions[-1] == 8 for versions in taken.values())
    assert taken[LATE][0] > 0
    plot(fleet, tmp_path / "fleet.svg")
    assert "<svg" in (tmp_path / "fleet.svg").read_text()


def test_a_mixed_version_is_found():
    fleet = Fleet(servers=2, mib=1, versions=9, seed=1)
    w = np.arange(8)
    fleet.publishes(3, w)
    fleet.check(3, {"w": w, "version": 3})
    assert fleet.mixed == 0
    fleet.check(3, {"w": w + (w > 4), "version": 3})
    fleet.check(3, {"w": w, "version": 2})
    assert fleet.mixed == 2


def test_an_answer_that_is_late_or_wrong_has_failed():
    fleet = Fleet(servers=2, mib=1, versions=9, seed=1)
    w = np.arange(8)
    fleet.publishes(3, w)
    fleet.answers(3, {"w": w}, 0.2)
    assert (fleet.failed, fleet.pause) == (0, 0.2)
    fleet.answers(3, {"w": w + 1}, 0.2)
    fleet.answers(3, {"w": w}, DEADLINE + 0.1)
    assert (fleet.failed, fleet.answered) == (2, 3)
