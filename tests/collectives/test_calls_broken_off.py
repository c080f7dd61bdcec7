"""A signal handler raises an ordinary exception at any place of a collective.

No later call gets a wrong value: either all calls match as before, or the group has been aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from functools import partial
from typing import Any, Never

import numpy as np
import pytest
from interrupts import Interrupt
from sharing import sharing

from aiodist import Group

ROOMS = (
    *("prepared/express.py", "prepared/lane_express.py", "prepared/post_express.py"),
    *("prepared/lane_reductions.py", "engine/calls.py", "engine/tags.py", "shared_memory/lane.py"),
)
"""Not those of the first lines of a call. A signal there is one that came before the call."""
LENGTHS = itertools.count(2_001)
"""The first call of a length runs Python code also if there is a compiled part."""


class Alarm(Interrupt):
    def _raise(self, *_: object) -> Never:
        sys.settrace(None)
        self.came = True
        raise TimeoutError("the alarm of the program")


async def result(group: Group, x: Any, tag: str | None) -> Any:
    try:
        return (await group.all_reduce(x, tag=tag)).tolist()
    except Exception as error:
        return error


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tag", [None, "a"])
async def test_no_later_call_gets_a_wrong_value(tag: str | None, first: int) -> None:
    """Rank `first` calls first, so that one of them has to wait and the other does not."""
    broken_off = 0
    for number in itertools.count(0, 3):
        alarm, length = Alarm(ROOMS, number), next(LENGTHS)
        async with sharing(2) as ranks:
            start = partial(ranks[1].all_reduce, np.ones(length), tag=tag)
            works = [] if first == 0 else [start()]
            try:
                works.append(alarm.of(partial(ranks[0].all_reduce, np.ones(length), tag=tag)))
            except TimeoutError:
                broken_off += 1
            works += [] if first == 1 else [start()]
            found = await asyncio.gather(*works, return_exceptions=True)
            assert all(isinstance(x, Exception) or (x == 2).all() for x in found), found
            for step in (10.0, 100.0):
                calls = [result(group, np.full(length, step), tag) for group in ranks]
                for value in await asyncio.gather(*calls):
                    assert isinstance(value, Exception) or value == [2 * step] * length
        if not alarm.came:
            break
    assert broken_off > 5
