"""What communication is found to cost in steps of DistributedDataParallel."""

from __future__ import annotations

from benchmarks.ddp import cost


def test_steps_are_compared_with_their_neighbours():
    """So the machine may be slower for a while: in half of the steps here, ten times as slow."""
    slow = [1, 10, 1, 10, 10]
    steps = {
        "silent": {"time": [100.0 * each for each in slow]},
        "together": {"time": [100.0 * each + 7 for each in slow]},
    }
    later = {
        "silent": {"time": [1000.0, 100.0]},
        "together": {"time": [1007.0, 9999.0]},  # one that was held up
    }
    assert cost([{"steps": steps}, {"steps": later}], "together", "silent", "time") == 7
