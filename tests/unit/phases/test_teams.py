"""How large the pieces are in which arrays go between hosts and leaders."""

from __future__ import annotations

import pytest

from aiodist.phases.teams import LEAST, ROUNDS, piece_for
from aiodist.shared_memory.board import BULK
from aiodist.wire.frames import MAX_PAYLOAD


@pytest.mark.parametrize("slots", [1, 3])
def test_a_piece_has_its_place_in_the_buffers_and_in_a_frame(slots: int) -> None:
    room = BULK // (2 * slots)
    assert piece_for(slots, 4, 10 * BULK) == room // 4
    assert piece_for(slots, 4, 1) == LEAST // 4
    assert piece_for(slots, 4, ROUNDS * LEAST // 2) == LEAST // 2
    assert piece_for(slots, 2 * BULK, 3) == 1
    # An element may be wider on its way than where it lies: the frame has to hold it, too.
    assert piece_for(slots, 1, 10 * BULK, MAX_PAYLOAD // 8) == 8
