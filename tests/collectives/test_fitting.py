"""Places that do not fit what comes: all ranks hear of it, and none has a result."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.collectives import fitting

pytestmark = pytest.mark.strength(2)

SIZE = 3
LARGE = 50_001
FROZEN = np.ones(4)
FROZEN.flags.writeable = False


def ones(length: int, dtype: str = "f8") -> Any:
    return np.ones(length, dtype)


def only(rank: int, wrong: Any, right: Any) -> list[Any]:
    return [wrong if other == rank else right for other in range(SIZE)]


# By name: the call of a rank, with arrays of some length; rank 1 has the wrong place.
WRONG: dict[str, Any] = {
    "broadcast shape": lambda g, n: g.broadcast(ones(n if g.rank != 1 else n + 1)),
    "broadcast one place": lambda g, n: g.broadcast([ones(n), ones(n + 1), None][g.rank]),
    "broadcast dtype": lambda g, n: g.broadcast(ones(n, "f4" if g.rank == 1 else "f8")),
    "broadcast tree": lambda g, n: g.broadcast([ones(n)] * (2 if g.rank == 1 else 3)),
    "broadcast leaf": lambda g, n: g.broadcast({"a": 1, "b": ones(n + (g.rank == 1))}),
    "broadcast array for a number": lambda g, n: g.broadcast(ones(n) if g.rank == 1 else 7),
    "broadcast frozen": lambda g, n: g.broadcast(FROZEN if g.rank == 1 else ones(4)),
    "all_gather list": lambda g, n: g.all_gather(
        ones(n), out=[ones(n), ones(n), ones(n + (g.rank == 1))]
    ),
    "all_gather own": lambda g, n: g.all_gather(
        ones(n), out=[ones(n), ones(n + (g.rank == 1)), ones(n)]
    ),
    "all_gather one": lambda g, n: g.all_gather(
        ones(n), out=np.ones((SIZE, n + 1) if g.rank == 1 else (SIZE, n))
    ),
    "all_gather dtype": lambda g, n: g.all_gather(
        ones(n), out=ones(SIZE * n, "f4" if g.rank == 1 else "f8")
    ),
    "all_gather sizes": lambda g, n: g.all_gather(
        ones(n + g.rank), out=ones(SIZE * n + (3 if g.rank != 1 else 4))
    ),
    "gather": lambda g, n: g.gather(
        ones(n), 1, out=[ones(n), ones(n), ones(n, "i8")] if g.rank == 1 else None
    ),
    "scatter": lambda g, n: g.scatter(
        [ones(n)] * SIZE if g.rank == 0 else None, out=ones(n + (g.rank == 1))
    ),
    "scatter at its source": lambda g, n: g.scatter(
        [ones(n)] * SIZE if g.rank == 1 else None, 1, out=ones(n + 1) if g.rank == 1 else None
    ),
    "all_to_all": lambda g, n: g.all_to_all(
        [ones(n)] * SIZE, out=only(0, ones(n, "f4" if g.rank == 1 else "f8"), None)
    ),
    "all_to_all one": lambda g, n: g.all_to_all(
        [ones(n)] * SIZE, out=ones(SIZE * n + (3 if g.rank == 1 else 0))
    ),
}


@pytest.mark.parametrize("name", sorted(WRONG))
@pytest.mark.parametrize("length", [4, LARGE])
@pytest.mark.parametrize("tag", [None, "t"])
@pytest.mark.sample(43)
def test_all_ranks_hear_of_it(run, groups, name, length, tag):
    async def main():
        async with groups(SIZE) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            for _ in range(2):
                works = [WRONG[name](group, length) for group in ranks]
                await asyncio.wait(works)
                errors = [work.exception() for work in works]
                for error in errors:
                    assert isinstance(error, aiodist.MismatchError)
                    assert 1 in error.calls
                assert any("rank 1" in str(error) for error in errors)
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [SIZE] * SIZE

    run(main())


# Calls that fit, and whether that is plain from what is said anyway.
RIGHT: dict[str, tuple[bool, Any]] = {
    "broadcast": (True, lambda g, n: g.broadcast(ones(n))),
    "broadcast into some": (True, lambda g, n: g.broadcast([ones(n), ones(n), None][g.rank])),
    "broadcast tree": (True, lambda g, n: g.broadcast({"a": ones(n), "b": 7})),
    "broadcast number": (True, lambda g, n: g.broadcast(7)),
    "all_gather joined": (True, lambda g, n: g.all_gather(ones(n), out=ones(SIZE * n))),
    "all_gather rows": (True, lambda g, n: g.all_gather(ones(n), out=np.ones((SIZE, n)))),
    "all_gather list": (
        True,
        lambda g, n: g.all_gather(ones(n), out=[ones(n) for _ in range(SIZE)]),
    ),
    "all_gather into some": (
        True,
        lambda g, n: g.all_gather(ones(n), out=ones(SIZE * n) if g.rank else None),
    ),
    "all_gather sizes": (
        False,
        lambda g, n: g.all_gather(ones(n + g.rank), out=ones(SIZE * n + SIZE)),
    ),
    "gather": (True, lambda g, n: g.gather(ones(n), out=None if g.rank else ones(SIZE * n))),
    "scatter": (True, lambda g, n: g.scatter(None if g.rank else [ones(n)] * SIZE, out=ones(n))),
    "scatter sizes": (
        True,
        lambda g, n: g.scatter(
            None if g.rank else [ones(n + rank) for rank in range(SIZE)], out=ones(n + g.rank)
        ),
    ),
    "all_to_all": (True, lambda g, n: g.all_to_all([ones(n)] * SIZE, out=ones(SIZE * n))),
    "all_to_all sizes": (
        False,
        lambda g, n: g.all_to_all(
            [ones(n + rank) for rank in range(SIZE)], out=ones(SIZE * (n + g.rank))
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(RIGHT))
@pytest.mark.parametrize("length", [4, LARGE])
def test_it_takes_a_round_more_only_where_it_is_not_plain(run, groups, monkeypatch, name, length):
    plain, start = RIGHT[name]
    seen: list[bool] = []
    settle = fitting.settle

    def noted(place: Any, problem: Any, fits: bool, on_lane: bool) -> Any:
        seen.append(fits)
        return settle(place, problem, fits, on_lane)

    monkeypatch.setattr(fitting, "settle", noted)

    async def main():
        async with groups(SIZE) as ranks:
            for _ in range(2):
                await asyncio.gather(*[start(group, length) for group in ranks])
            # The second time it may be prepared: then nobody has to ask.
            assert len(seen) >= SIZE
            assert set(seen) == {plain}

    run(main())
