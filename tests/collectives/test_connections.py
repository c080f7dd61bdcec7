"""Connections are made when a plan first needs them: many ranks do not make a full mesh, and all
get the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist import ReduceOp
from aiodist.collectives import exchange
from aiodist.prepared import exchanged
from aiodist.schedules import halving_doubling
from aiodist.schedules.choose_reductions import Shape, choose_all_reduce

SIZE = 16
ROUNDS = 4


@pytest.fixture
def transport() -> str:
    return "inproc"


def connections(group: Any) -> int:
    peers = set(range(group.size)) - {group.rank}
    return sum(group._context.link(peer) is not None for peer in peers)


def test_a_large_all_reduce_needs_log_p_connections(run, groups, everyone):
    length = 40_000  # more than goes whole in one frame

    async def main():
        async with groups(SIZE) as ranks:
            rng = np.random.default_rng(1)
            inputs = [rng.standard_normal(length).astype(np.float32) for _ in ranks]
            outs = await everyone(ranks, lambda g: g.all_reduce(inputs[g.rank].copy()))
            assert {out.tobytes() for out in outs} == {outs[0].tobytes()}
            np.testing.assert_allclose(outs[0], np.sum(inputs, axis=0), rtol=1e-4, atol=1e-4)
            assert max(map(connections, ranks)) == ROUNDS

    run(main())


def test_small_parts_are_gathered_over_log_p_connections(run, groups, everyone):
    async def main():
        async with groups(SIZE) as ranks:
            outs = await everyone(ranks, lambda g: g.all_gather(np.full(1024, g.rank, np.int32)))
            for out in outs:
                assert [set(part) for part in out] == [{rank} for rank in range(SIZE)]
            # To the ranks that are 1, 2, 4 and 8 before, and from those behind: 8 is both.
            assert max(map(connections, ranks)) == 2 * ROUNDS - 1

    run(main())


@pytest.mark.parametrize("apart", [False, True], ids=["few", "many"])
def test_messages_of_one_kind_are_exchanged_over_log_p_connections(
    run, groups, everyone, monkeypatch, apart
):
    """Also where those of some ranks would have had room in the offers, and where there are so many
    ranks that nobody knows what the others offer each other."""
    size = 32
    if apart:
        monkeypatch.setattr(exchange, "MAX_RANKS_IN_SMALL_AREA", 0)
        monkeypatch.setattr(exchanged, "MANY", 0)  # these are prepared for fewer ranks only

    async def main():
        async with groups(size) as ranks:
            results = await everyone(
                ranks, lambda g: g.all_to_all([np.full(12, 100 * g.rank + i) for i in range(size)])
            )
            for rank, result in enumerate(results):
                assert [set(part) for part in result] == [{100 * src + rank} for src in range(size)]
            # To the ranks that are 1, 2, 4, 8 and 16 before, and from those behind: 16 is both.
            assert max(map(connections, ranks)) == 2 * 5 - 1

    run(main())


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG], ids=str)
@pytest.mark.parametrize("size", [8, 12])
def test_narrow_numbers_are_rounded_once_by_halves(run, groups, everyone, op, size):
    assert choose_all_reduce(Shape(50_000, 2, 4), size).algorithm is halving_doubling.all_reduce

    async def main():
        async with groups(size) as ranks:
            rng = np.random.default_rng(2)
            inputs = [rng.standard_normal(50_000).astype(np.float16) for _ in ranks]
            outs = await everyone(ranks, lambda g: g.all_reduce(inputs[g.rank].copy(), op))
            assert {out.tobytes() for out in outs} == {outs[0].tobytes()}
            wide = np.array(inputs, np.float32)
            exact = wide.max(axis=0) if op is ReduceOp.MAX else wide.sum(axis=0)
            due = (exact / size if op is ReduceOp.AVG else exact).astype(np.float16)
            np.testing.assert_allclose(outs[0], due, rtol=2e-3, atol=2e-3)

    run(main())
