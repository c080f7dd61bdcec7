"""A call for which this rank has no memory: the other ranks hear of it, and the next calls match.

Memory is missing at each place in turn where a call makes or views an array.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
from sharing import everyone, sharing

import aiodist
from aiodist import Group

LIBRARY = f"{Path(aiodist.__file__).parent}/"
MAKES = ("array", "asarray", "ascontiguousarray", "concatenate", "empty", "empty_like", "zeros")
"""The functions of numpy with which the library makes and views arrays."""


def ones(count):
    return np.ones(count, np.float32)


async def failed(error):
    raise error


def ours(group, value, root=0):
    return value if group.rank == root else None


CALLS = {
    "all_reduce": lambda group, **more: group.all_reduce(ones(250), **more),
    "all_reduce of many": lambda group, **more: group.all_reduce(ones(1 << 16), **more),
    "all_reduce out": lambda group, **more: group.all_reduce(ones(9), out=ones(9), **more),
    "all_reduce of a list": lambda group, **more: group.all_reduce([ones(3), ones(5)], **more),
    "all_reduce of a number": lambda group, **more: group.all_reduce(0.5, **more),
    "reduce": lambda group, **more: group.reduce(ones(9), 0, **more),
    "reduce_scatter": lambda group, **more: group.reduce_scatter(ones(10), **more),
    "scan": lambda group, **more: group.scan(ones(9), **more),
    "all_gather": lambda group, **more: group.all_gather(ones(9), **more),
    "all_gather of a tree": lambda group, **more: group.all_gather({"a": ones(4)}, **more),
    "all_to_all": lambda group, **more: group.all_to_all([ones(3), ones(3)], **more),
    "broadcast": lambda group, **more: group.broadcast(ours(group, ones(9)), 0, **more),
    "scatter": lambda group, **more: group.scatter(ours(group, [ones(2), ones(2)]), 0, **more),
    "gather": lambda group, **more: group.gather(ones(9), 0, **more),
}


class Shortage:
    """Lets memory be missing at one place at which the library makes or views an array."""

    def __init__(self, monkeypatch):
        self.left = inf  # so many such places have memory yet
        self.was_there = False
        for name in MAKES:
            monkeypatch.setattr(np, name, self.instead_of(getattr(np, name)))

    def instead_of(self, make):
        def made(*args, **more):
            if sys._getframe(1).f_code.co_filename.startswith(LIBRARY):
                self.left -= 1
                if self.left < 0:
                    self.left, self.was_there = inf, True
                    raise MemoryError("none is left")
            return make(*args, **more)

        return made

    @contextmanager
    def at(self, place):
        self.left, self.was_there = place, False
        try:
            yield
        finally:
            self.left = inf


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("tag", [None, "t"])
async def test_one_rank_has_no_memory_for_a_call(tag, transport, monkeypatch):
    shortage = Shortage(monkeypatch)

    async def fail(ranks, call, place):
        """Call on all ranks; memory is missing on rank 0. Return whether there was such a place."""
        try:
            with shortage.at(place):
                mine = call(ranks[0], tag=tag)
        except MemoryError as error:
            mine = failed(error)
        ended = await asyncio.gather(mine, call(ranks[1], tag=tag), return_exceptions=True)
        if isinstance(ended[0], MemoryError):
            assert isinstance(ended[1], aiodist.CollectiveAbortedError)
            assert ended[1].rank == 0
            assert "none is left" in str(ended[1])
        else:  # it did without
            assert not any(isinstance(each, BaseException) for each in ended)
        for each in (None, tag):
            call = partial(Group.all_reduce, x=1, tag=each)
            assert await everyone(ranks, call) == [2, 2]
        return shortage.was_there

    async with sharing(2) if transport == "shm" else aiodist.local(2, transports="tcp") as ranks:
        places = 0
        for call in CALLS.values():
            for before in (0, 1, 10):  # calls of this kind are prepared by and by
                for _ in range(before):
                    await everyone(ranks, partial(call, tag=tag))
                place = 0
                while await fail(ranks, call, place):
                    place += 1
                places += place
        assert places > 3 * len(CALLS)
