"""Plans of 64 to 1,024 ranks; and what a survey finds wrong with plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from survey import Survey, survey

from aiodist.schedules import (
    bruck,
    direct_exchange,
    halving_doubling,
    prefixes,
    recursive_doubling,
    reduce_scatter_all_gather,
    ring,
    spread,
    tree,
)
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.plan import OUT, Await, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.testing.plan_checks import PlanError

pytestmark = pytest.mark.timeout(240)  # seconds on a quiet machine

LENGTH = 512
# Of plans in which each rank has to do with all others, and of those in which it has not.
FEW = (64, pytest.param(256, marks=pytest.mark.long))
MANY = (64, 256, pytest.param(1024, marks=pytest.mark.long))


def surveyed(plan: Callable[[int], Plan], size: int, taken: int, given: int) -> Survey:
    return survey(plan, [taken] * size, [given] * size)


def log2(size: int) -> int:
    return size.bit_length() - 1


@pytest.mark.parametrize("size", MANY)
def test_all_reduce(size: int) -> None:
    for plan in (
        lambda rank: halving_doubling.all_reduce(rank, size, LENGTH, LENGTH, LENGTH),
        lambda rank: recursive_doubling.all_reduce_whole(rank, size, LENGTH, LENGTH),
    ):
        found = surveyed(plan, size, LENGTH, LENGTH)
        total = np.sum(found.x, axis=0, dtype=np.uint32)
        assert all(np.array_equal(out, total) for out in found.out)
        assert found.rounds == found.frames == 2 * log2(size)
        assert found.connections == log2(size)
        assert found.grants == log2(size)


@pytest.mark.parametrize("size", FEW)
def test_all_reduce_of_more_frames(size: int) -> None:
    for connections, plan in (
        (2, lambda rank: ring.all_reduce(rank, size, LENGTH, LENGTH)),
        (size - 1, lambda rank: reduce_scatter_all_gather.all_reduce(rank, size, LENGTH, LENGTH)),
    ):
        found = surveyed(plan, size, LENGTH, LENGTH)
        total = np.sum(found.x, axis=0, dtype=np.uint32)
        assert all(np.array_equal(out, total) for out in found.out)
        assert found.frames == 2 * (size - 1)
        assert found.connections == connections


@pytest.mark.parametrize("size", MANY)
def test_reductions_elsewhere(size: int) -> None:
    found = surveyed(
        lambda rank: halving_doubling.reduce(rank, size, 5, LENGTH, LENGTH, LENGTH),
        size, LENGTH, LENGTH,
    )  # fmt: skip
    total = np.sum(found.x, axis=0, dtype=np.uint32)
    assert np.array_equal(found.out[5], total)
    assert found.connections == log2(size)
    bounds = even_bounds(LENGTH, size)
    found = surveyed(
        lambda rank: halving_doubling.reduce_scatter(rank, size, bounds, LENGTH),
        size, LENGTH, LENGTH,
    )  # fmt: skip
    total = np.sum(found.x, axis=0, dtype=np.uint32)
    for rank, out in enumerate(found.out):
        part = total[bounds[rank] : bounds[rank + 1]]
        assert np.array_equal(out[: len(part)], part)
    assert found.connections <= log2(size) + 2


@pytest.mark.parametrize("size", MANY)
def test_scan(size: int) -> None:
    found = surveyed(lambda rank: prefixes.scan(rank, size, 8, 8, False), size, 8, 8)
    prefix = np.cumsum(found.x, axis=0, dtype=np.uint32)
    assert all(np.array_equal(out, due) for out, due in zip(found.out, prefix, strict=True))
    assert found.rounds == found.frames == log2(size)


@pytest.mark.parametrize("size", MANY)
def test_broadcast(size: int) -> None:
    for algorithm, rounds in ((tree.broadcast, log2(size)), (spread.tree, 2 * log2(size))):
        found = surveyed(
            lambda rank, a=algorithm: a(rank, size, 3, LENGTH, LENGTH), size, LENGTH, LENGTH
        )
        for rank, out in enumerate(found.out):
            assert rank == 3 or np.array_equal(out, found.x[3])
        assert found.rounds <= rounds
        assert found.connections <= rounds


@pytest.mark.parametrize("size", MANY)
def test_gathering(size: int) -> None:
    ones = (1,) * size
    everywhere = surveyed(lambda rank: bruck.all_gather(rank, size, ones, size), size, 1, size - 1)
    flat = np.concatenate(everywhere.x)
    for rank, out in enumerate(everywhere.out):
        assert np.array_equal(out, np.delete(flat, rank))
    assert everywhere.rounds == everywhere.frames == everywhere.grants == log2(size)
    there = survey(
        lambda rank: tree.gather(rank, size, 3, ones, size),
        [1] * size,
        [size - 1 if rank == 3 else 0 for rank in range(size)],
    )
    assert np.array_equal(there.out[3], np.delete(np.concatenate(there.x), 3))
    assert there.connections == log2(size)
    back = survey(
        lambda rank: tree.scatter(rank, size, 3, ones, size),
        [size - 1 if rank == 3 else 0 for rank in range(size)],
        [1] * size,
    )
    parts = np.delete(np.concatenate(back.out), 3)
    assert np.array_equal(parts, back.x[3])


@pytest.mark.parametrize("size", FEW)
def test_all_to_all(size: int) -> None:
    for algorithm in (bruck.all_to_all, direct_exchange.uniform):
        found = surveyed(lambda rank, a=algorithm: a(rank, size, 1, size), size, size - 1, size - 1)
        sent = np.array([np.insert(x, rank, 0) for rank, x in enumerate(found.x)])
        for rank, out in enumerate(found.out):
            assert np.array_equal(out, np.delete(sent[:, rank], rank))


# -- what is wrong ----------------------------------------------------------------------------


def broken(*plans: list[Step], eager: bool = False) -> Callable[[], Survey]:
    made = [Plan("broken", rank, len(plans), tuple(s), eager) for rank, s in enumerate(plans)]
    return lambda: survey(made.__getitem__, [4] * len(made), [4] * len(made))


TWO = (Span(X, 0, 2),)
INTO = (Span(OUT, 0, 2),)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(PlanError, match=r"deadlock of 1 ranks: rank 0 step 0 Send"):
        broken([Send(1, TWO)], [])()
    with pytest.raises(PlanError, match="1 frames from rank 0 to rank 1 are not received"):
        broken([Send(1, TWO)], [], eager=True)()
    with pytest.raises(PlanError, match="1 frames from rank 0 to rank 1, 2 granted"):
        broken([Send(1, TWO)], [Grant(0, 2), Recv(0, INTO)])()
    with pytest.raises(PlanError, match="2 units came"):
        broken([Send(1, TWO)], [Recv(0, (Span(OUT, 0, 1),))], eager=True)()
    with pytest.raises(PlanError, match="is of shared memory"):
        broken([Await((1,), 1)], [])()


def test_an_operand_that_lacks_shows() -> None:
    lacking = broken(
        [Send(1, TWO)],
        [Grant(0, 1), Copy(Span(OUT, 2, 4), Span(X, 2, 4)), Recv(0, INTO),
         Reduce(INTO[0], (*INTO, Span(OUT, 2, 4)))],
    )()  # fmt: skip
    assert np.array_equal(lacking.out[1][:2], lacking.x[0][:2] + lacking.x[1][2:])
    assert not np.array_equal(lacking.out[1][:2], lacking.x[0][:2] + lacking.x[1][:2])
    assert (lacking.frames, lacking.units, lacking.grants, lacking.rounds) == (1, 2, 1, 1)
