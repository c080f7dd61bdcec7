"""How long a rank that leaves waits for its peers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aiodist.links.draining import ANSWER_TIMEOUT, PeersDraining
from aiodist.links.peer import Peer
from aiodist.testing import VirtualLoop


class BusyPeer:
    """Its system has everything. It never says so itself."""

    is_linked = True
    held = 0

    def deliver(self, done: Any) -> bool:
        return False


@pytest.mark.parametrize(("seconds", "took"), [(60.0, ANSWER_TIMEOUT), (0.25, 0.25)])
def test_answers_are_awaited_within_the_time_of_the_caller(seconds: float, took: float) -> None:
    loop = VirtualLoop()
    draining = PeersDraining(loop, {1: cast(Peer, BusyPeer())}, {})
    assert loop.run_until_complete(draining.wait(seconds)) == {}
    assert loop.time() == pytest.approx(took, abs=1e-6)
    loop.close()
