"""How large the pieces are in which arrays go between hosts and leaders."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodist.phases import teams
from aiodist.phases.teams import LEAST, ROUNDS, piece_for
from aiodist.schedules import team_slices
from aiodist.schedules.costs import ONE_HOST_TCP
from aiodist.schedules.selection import SCRATCH_LIMIT
from aiodist.shared_memory.board import CROSSING
from aiodist.wire.frames import MAX_PAYLOAD


@pytest.mark.parametrize("slots", [1, 3])
def test_a_piece_has_its_place_in_the_buffers_and_in_a_frame(slots: int) -> None:
    room = CROSSING // (2 * slots)
    assert piece_for(slots, 4, 10 * CROSSING) == room // 4
    assert piece_for(slots, 4, 1) == LEAST // 4
    assert piece_for(slots, 4, ROUNDS * LEAST // 2) == LEAST // 2
    assert piece_for(slots, 2 * CROSSING, 3) == 1
    # Of many ranks and much data, as large as half a frame.
    assert piece_for(8, 4, 2 << 20) * 4 == MAX_PAYLOAD // 2
    # An element may be wider on its way than where it lies: the frame has to hold it, too.
    assert piece_for(slots, 1, 10 * CROSSING, MAX_PAYLOAD // 8) == 8


@pytest.mark.parametrize("layout", [(2, 2), (40, 3), (1,) * 20 + (2,), (2, *(1,) * 100)])
@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_scratch_is_capped_whatever_the_layout(layout: tuple[int, ...], itemsize: int) -> None:
    starts = [sum(layout[:host]) for host in range(len(layout) + 1)]
    hosts = tuple(tuple(range(a, b)) for a, b in pairwise(starts))
    size, length = starts[-1], 2**40
    wire_dtype = np.dtype(f"f{max(4, itemsize)}")  # of float8 four times as wide
    place: Any = SimpleNamespace(size=size, teams=hosts, costs=ONE_HOST_TCP)
    group: Any = SimpleNamespace(
        x=SimpleNamespace(itemsize=itemsize), kernel=SimpleNamespace(wire_dtype=wire_dtype)
    )
    piece, lag = teams._slices(place, group, length // size)
    assert lag == team_slices.LAG
    for rank in (0, size - 1):
        plan = team_slices.reduce(rank, hosts, 0, 5 * piece * len(hosts[0]), piece)
        assert plan.scratch * wire_dtype.itemsize <= SCRATCH_LIMIT
        assert plan.scratch <= team_slices.places(hosts) * piece


@pytest.mark.parametrize("length", [20_000, 1_000_000, 100_000_000])
def test_far_hosts_have_more_rounds_on_the_way(length: int) -> None:
    """As much scratch as plans over links have, and no more rounds than there are."""
    hosts = ((0, 1), (2, 3), (4,))
    group: Any = SimpleNamespace(
        kernel=SimpleNamespace(wire_dtype=np.dtype(np.float32)), x=np.empty(0, np.float32)
    )

    def cut(trip: float) -> tuple[int, int]:
        place: Any = SimpleNamespace(
            rank=1, size=5, teams=hosts, costs=ONE_HOST_TCP._replace(trip=trip)
        )
        return teams._slices(place, group, -(-length // 5))

    piece, lag = cut(0.0)
    assert lag == team_slices.LAG
    same, more = cut(0.1)
    rounds = -(-length // 5 // piece)
    room = SCRATCH_LIMIT // (16 * 4 * piece)  # of at most 6 streams, each way
    assert same == piece and max(lag, min(rounds, 5, room)) <= more <= max(lag, rounds)
    for rank in range(5):
        plan = team_slices.all_reduce(rank, hosts, length, piece, more)
        assert plan.scratch * 4 <= SCRATCH_LIMIT + (team_slices.LAG + 1) * 4 * piece * 4
