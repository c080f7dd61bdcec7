"""How far a participant is behind its channel."""

from __future__ import annotations

from aiodist.channels.directory import MOST_RELEASES
from aiodist.channels.lag import Lag


def test_since_when_there_is_a_newer_version() -> None:
    lag = Lag()
    assert lag.seconds(None, 5.0) == 0.0
    lag.hear([3], 10.0)
    assert lag.seconds(None, 12.0) == 2.0
    assert lag.seconds(3, 12.0) == 0.0
    lag.hear([3, 4], 13.0)
    lag.hear([4, 9], 15.0)  # 3 is kept no more
    assert lag.seconds(3, 20.0) == 7.0
    assert lag.seconds(4, 20.0) == 5.0
    assert lag.seconds(9, 20.0) == 0.0


def test_many_versions_are_not_all_remembered() -> None:
    lag = Lag()
    for version in range(10 * MOST_RELEASES):
        lag.hear([version], float(version))
    assert len(lag._heard) == MOST_RELEASES
    assert lag.seconds(None, 1000.0) == 1000.0
    assert lag.seconds(0, 1000.0) == 1000.0 - lag._heard[0][1]
