"""Values that ranks of one host show each other whole, with the words about them."""

from __future__ import annotations

import numpy as np
import pytest
from sharing import everyone, sharing

from aiodist.collectives.exchange import ROOM_IN_MEMORY
from aiodist.prepared import lane_values
from aiodist.prepared.post_express import MOST_SHOWN
from aiodist.shared_memory.board import AREAS


@pytest.mark.usefixtures("no_turn_is_due")
def test_values_of_three_mebibytes_go_with_their_words(run, monkeypatch):
    """Their data is not moved in pieces, in a phase of its own."""
    moved = []
    real = lane_values.ValueRecipe.moved
    monkeypatch.setattr(
        lane_values.ValueRecipe, "moved", lambda *args: moved.append(args[0].op) or real(*args)
    )
    length = 3 * 1024 * 1024 // 8

    async def main():
        async with sharing(2) as ranks:
            for number in range(1, 6):
                arrays = [np.full(length, number * (g.rank == 0)) for g in ranks]
                await everyone(ranks, lambda g, a=arrays: g.broadcast(a[g.rank], 0))
                assert all((array == number).all() for array in arrays)
                parts = [np.full(length // 2, number + g.rank) for g in ranks]
                found = [np.zeros((2, length // 2), int) for _ in ranks]
                await everyone(
                    ranks,
                    lambda g, p=parts, f=found: g.all_gather(p[g.rank], out=f[g.rank]),
                )
                assert all((rows == np.stack(parts)).all() for rows in found)

    run(main())
    assert moved == []


def test_what_is_shown_fits_where_it_goes():
    assert all(size >= MOST_SHOWN > ROOM_IN_MEMORY for _, size in AREAS[:2])
