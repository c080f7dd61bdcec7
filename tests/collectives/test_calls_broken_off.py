"""A signal handler raises an ordinary exception at any place of a collective or a receive.

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

import aiodist
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


RECEIVES = (
    *("p2p/express.py", "p2p/receiver.py", "p2p/flow.py", "p2p/credit.py", "p2p/delivery.py"),
    *("transports/shm_link.py", "transports/shm_rings.py"),
)


@pytest.mark.parametrize("kind", ["array", "dict"])
async def test_no_message_is_lost(kind: str) -> None:
    broken_off = 0
    for number in itertools.count(0, 3):
        alarm, length = Alarm(RECEIVES, number), next(LENGTHS) % 1000 + 10
        async with sharing(2) as (one, two):

            def message(at: int, length: int = length) -> Any:
                x = np.full(length, at)
                return x if kind == "array" else {"x": x, "at": at}

            def number_of(value: Any) -> int:
                return int(value[0]) if kind == "array" else value["at"]

            await two.send(message(0), 0)
            assert number_of(await one.recv(src=1)) == 0  # it expects such messages now
            works = [two.send(message(at), 0) for at in (1, 2, 3)]
            found = []
            try:
                found.append(number_of(await alarm.of(partial(one.recv, src=1))))
            except TimeoutError:
                broken_off += 1
            try:
                while len(found) < 3:
                    found.append(number_of(await one.recv(src=1)))
            except aiodist.AiodistError:
                assert one.closed
            assert found == [1, 2, 3][: len(found)]
            await asyncio.gather(*works, return_exceptions=True)
        if not alarm.came:
            break
    assert broken_off > 5
