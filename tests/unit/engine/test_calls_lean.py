"""How many Python functions of aiodist a call runs if it takes the ordinary way.

Times differ between machines. These numbers do not, so they show at once if a call does more than
before. The limits are a little above what was reached: lower them if you make calls leaner.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharing import everyone, sharing

import aiodist
from aiodist import Group
from aiodist.blocking.group import BlockingGroup
from aiodist.compiled import core

LIBRARY = f"{Path(aiodist.__file__).parent}/"
GENERATED = "<string>"
"""The file of the methods that dataclasses and named tuples have."""

LENGTHS = count(1_001)
"""Lengths of arrays that no test has used before: a plan is made once in a process."""

Call = Callable[[Group], Any]


def functions_of(call: Call, group: Group) -> tuple[Any, Counter[str]]:
    """What ``call(group)`` returns, and how often it runs each function of aiodist."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((LIBRARY, GENERATED)):
            found[f"{code.co_filename.removeprefix(LIBRARY)}: {code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work = call(group)
    finally:
        sys.setprofile(before)
    return work, found


async def functions_of_rank_0(ranks: list[Group], call: Call, *, first: bool = True) -> int:
    """How many functions rank 0 runs in a `call` that all ranks make. `first`: it calls before the
    others, and has to wait."""
    others = [] if first else [call(group) for group in ranks[1:]]
    work, found = functions_of(call, ranks[0])
    assert work.done() is not first
    others = others or [call(group) for group in ranks[1:]]
    for each in (work, *others):
        await each
    print(*(f"{times} {name}" for name, times in found.most_common()), sep="\n")
    return found.total()


def all_reduce(length: int) -> Call:
    return lambda group: group.all_reduce(np.ones(length))


def exscan(length: int, **options: Any) -> Call:
    return lambda group: group.exscan(np.ones(length), **options)


@pytest.mark.parametrize(("first", "limit"), [(False, 122), (True, 148)])
async def test_the_first_call_of_a_kind(first: bool, limit: int) -> None:
    async with sharing(2) as ranks:
        for _ in range(2):  # what is made once for each area of shared memory
            await everyone(ranks, all_reduce(next(LENGTHS)))
        call = all_reduce(next(LENGTHS))
        assert await functions_of_rank_0(ranks, call, first=first) <= limit


async def test_a_later_call_that_waits() -> None:
    async with sharing(2) as ranks:
        call = all_reduce(next(LENGTHS))
        for _ in range(2):
            await everyone(ranks, call)
        assert await functions_of_rank_0(ranks, call) <= 73


@pytest.mark.parametrize(("tag", "limit"), [(None, 122), ("a", 110)])
async def test_a_later_call_without_a_recipe(tag: str | None, limit: int) -> None:
    async with sharing(2) as ranks:
        call = exscan(next(LENGTHS), tag=tag)
        for _ in range(2):
            await everyone(ranks, call)
        assert await functions_of_rank_0(ranks, call) <= limit


async def test_a_call_that_waits_for_its_turn() -> None:
    async with sharing(2) as ranks:
        call = exscan(next(LENGTHS))
        for _ in range(2):
            await everyone(ranks, call)
        before = call(ranks[0])
        work, found = functions_of(call, ranks[0])
        for each in (call(ranks[1]), call(ranks[1]), before, work):
            await each
        assert found.total() <= 67


async def test_a_later_call_over_links() -> None:
    async with aiodist.local(2, transports=("inproc",), op_timeout=30.0) as ranks:
        call = all_reduce(100_000)
        for _ in range(2):
            await everyone(ranks, call)
        assert await functions_of_rank_0(ranks, call) <= 111


VALUES: dict[str, Call] = {
    "number": lambda g: g.all_gather(g.rank, tag="a"),
    "array": lambda g: g.all_gather(np.arange(8.0) + g.rank, tag="a"),
    "place": lambda g: g.broadcast(np.full(8, float(g.rank)), src=1, tag="a"),
    "tree": lambda g: g.broadcast({"a": 7, "b": [np.ones(4)]} if g.rank else None, src=1, tag="a"),
    "slots": lambda g: g.all_to_all([np.ones(3), np.ones(3)], tag="a"),
    "sum": lambda g: g.all_reduce(g.rank, tag="a"),
    "nothing": lambda g: g.barrier(tag="a"),
}


async def functions_of_the_last(call: Call) -> Counter[str]:
    """How often the last of two ranks runs each function in a `call` that has been made before."""
    async with sharing(2) as ranks:
        for _ in range(20):
            await everyone(ranks, call)
        first = call(ranks[0])
        work, found = functions_of(call, ranks[1])
        assert work.done()
        await asyncio.gather(first, work)
    return found


@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
async def test_values_with_a_tag_are_posted_by_the_compiled_part(call: Call) -> None:
    found = await functions_of_the_last(call)
    if core is not None:
        assert not {name for name in found if "Express.start" in name or "in_one_go" in name}


async def test_a_reduce_scatter_with_a_tag_is_done_by_the_compiled_part() -> None:
    found = await functions_of_the_last(lambda group: group.reduce_scatter(np.ones(6), tag="a"))
    if core is not None:  # Python only finds the recipe, and makes the array for the result
        assert [name for name in found if "posted_slots" in name] == [
            "prepared/posted_slots.py: PostedSlots.form.<locals>.lay"
        ]
    outs = [np.empty(3), np.empty(3)]
    found = await functions_of_the_last(
        lambda group: group.reduce_scatter(np.ones(6), tag="a", out=outs[group.rank])
    )
    if core is not None:  # the compiled part finds it, too
        assert not [name for name in found if "posted_slots" in name or "Express.start" in name]


@pytest.mark.parametrize("all_show", [True, False])
async def test_plain_values_with_a_tag_need_no_waiting_call(all_show: bool) -> None:
    def call(group: Group) -> Any:
        value = {"prompt": "x" * next(lengths)}
        if all_show:
            return group.all_gather(value, tag="a")
        return group.broadcast(None if group.rank else value, tag="a")

    lengths = count()
    async with sharing(2) as ranks:
        for _ in range(60):
            await everyone(ranks, call)
        first = call(ranks[0])
        work, found = functions_of(call, ranks[1])
        assert work.done()
        await asyncio.gather(first, work)
        assert not {name for name in found if "_called" in name}


@pytest.mark.parametrize("kind", [Group, aiodist.Work, BlockingGroup])
def test_attributes_are_found_in_the_plain_way(kind: type) -> None:
    """With `__getattr__`, Python looks up all attributes of a class in a slower way, which took a
    tenth of the time of a small message."""
    assert not hasattr(kind, "__getattr__")
    assert kind.__getattribute__ in (object.__getattribute__, asyncio.Future.__getattribute__)
