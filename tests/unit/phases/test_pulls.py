"""Which plan ranks that share memory move by: all the same one, in the memory that there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.phases import pulls
from aiodist.shared_memory.board import BULK, CROSSING, CROWDED_BULK
from aiodist.types import ReduceOp

QUICK = Kernel.of(ReduceOp.SUM, "float32")
ROUNDED = Kernel.of(ReduceOp.SUM, "float16")
MIB = 1 << 20
OWN = CustomKernel(ReduceOp.custom(np.add, elementwise=True), "float32", ())


def names(kernel: Any, nbytes: int, size: int, crowded: bool) -> set[tuple[str, int]]:
    """The plan of each rank, and how often it publishes."""
    x = Vector([np.empty(nbytes // kernel.dtype.itemsize, kernel.dtype)], kernel.dtype)
    group = DtypeGroup("", kernel, x, x, [0, x.length])
    found = set()
    for rank in range(size):
        place: Any = SimpleNamespace(rank=rank, size=size, crowded=crowded)
        phase = pulls.all_reduce(place, group)
        assert phase.shared is not None
        assert phase.shared <= (CROWDED_BULK if crowded else BULK)
        found.add((phase.prepared.plan.name, phase.prepared.plan.publishes))
    return found


@pytest.mark.parametrize(
    ("kernel", "nbytes", "size", "expected"),
    [
        (QUICK, 8, 2, ("pull_whole.all_reduce", 1)),
        (QUICK, BULK, 2, ("pull_whole.all_reduce_in_pieces", 1)),
        (QUICK, 2 * BULK, 2, ("pull_whole.all_reduce_in_pieces", 6)),
        # Where to reduce takes longer than to copy, and of more ranks, each reduces its slices.
        (ROUNDED, BULK, 2, ("pull_slices.all_reduce", 2)),
        (OWN, BULK, 2, ("pull_slices.all_reduce", 2)),
        (QUICK, MIB, 4, ("pull_slices.all_reduce", 2)),
    ],
)
def test_the_plan_of_an_all_reduce(
    kernel: Any, nbytes: int, size: int, expected: tuple[str, int]
) -> None:
    assert names(kernel, nbytes, size, False) == {expected}


@pytest.mark.parametrize(
    ("nbytes", "size", "expected"),
    [
        (MIB, 4, "pull_whole.all_reduce_in_pieces"),
        (MIB + 4, 4, "pull_slices.all_reduce"),
        (MIB // 4, 10, "pull_whole.all_reduce_in_pieces"),
        (MIB, 10, "pull_slices.all_reduce"),
    ],
)
def test_of_more_ranks_than_cores_few_meetings_are_worth_some_bytes(
    nbytes: int, size: int, expected: str
) -> None:
    assert {name for name, _ in names(QUICK, nbytes, size, True)} == {expected}


@pytest.mark.parametrize(
    ("nbytes", "crowded", "publishes"),
    [(4 * MIB, False, 9), (4 * MIB, True, 2), (64 * MIB, False, 129), (64 * MIB, True, 33)],
)
def test_of_more_ranks_than_cores_pieces_are_large(
    nbytes: int, crowded: bool, publishes: int
) -> None:
    assert names(QUICK, nbytes, 4, crowded) == {("pull_slices.all_reduce", publishes)}
    assert names(ROUNDED, nbytes // 2, 4, crowded) == {
        ("pull_slices.all_reduce", publishes // 2 + 1)
    }


@pytest.mark.parametrize(
    ("nbytes", "crowded", "publishes"),
    [(MIB, False, 7), (MIB, True, 1), (16 * MIB, False, 97), (16 * MIB, True, 13)],
)
def test_of_more_ranks_than_cores_messages_go_in_large_pieces(
    nbytes: int, crowded: bool, publishes: int
) -> None:
    size = 4
    starts = tuple(range(0, (size + 1) * nbytes, nbytes))
    data = [memoryview(bytes(1))]
    found = set()
    for rank in range(size):
        place: Any = SimpleNamespace(rank=rank, size=size, crowded=crowded)
        phase = pulls.exchange(place, starts, starts, nbytes, data, data)
        assert phase.shared is not None
        assert phase.shared <= (CROSSING if crowded else BULK)
        found.add(phase.prepared.plan.publishes)
    assert found == {publishes}
