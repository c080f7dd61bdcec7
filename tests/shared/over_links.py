"""What tests of collectives within the call share, of ranks that are joined by sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

OVER_SOCKETS = [
    pytest.mark.strength(2),
    pytest.mark.usefixtures("no_turn_is_due"),
    pytest.mark.parametrize("transport", ["unix", "tcp"]),
    pytest.mark.usefixtures("every_tag"),
    pytest.mark.parametrize("every_tag", [None, "a tag"], indirect=True),
]
"""The marks of a module of such tests."""


@contextmanager
def ordinary(group: Any) -> Iterator[None]:
    """No call of `group` is prepared."""
    context = group._context
    kept = context.express, context.tagged_express
    context.express = context.tagged_express = None
    try:
        yield
    finally:
        context.express, context.tagged_express = kept


def nothing_is_left(ranks: Sequence[Any]) -> None:
    """No group has anything pending, or anything of what has ended."""
    for group in ranks:
        calls = group._context.calls
        assert not calls.ops
        assert not calls.arrivals.early
        assert not any(calls._unsolicited)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until it is so; the test has a timeout."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


async def exchanging_lengths(ranks: Sequence[Any], waits: bool) -> None:
    """Gather values of which two exchange their lengths in each call. `waits`: the last rank calls
    when frames of others are there."""
    size = len(ranks)
    for turn in range(2 * size + 3):
        lengths = [3 + rank for rank in range(size)]
        if turn > 2:
            one, other = turn % size, (turn + 1) % size
            lengths[one], lengths[other] = lengths[other], lengths[one]
        given = [np.full(length, float(rank)) for rank, length in enumerate(lengths)]
        last = ranks[(turn + 3) % size]
        works = [group.all_gather(given[group.rank]) for group in ranks if group is not last]
        for _ in range(30 * waits):
            await asyncio.sleep(0)
        works.append(last.all_gather(given[last.rank]))
        for taken in await asyncio.gather(*works):
            assert [each.tolist() for each in taken] == [each.tolist() for each in given]
