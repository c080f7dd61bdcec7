"""What tests of collectives within the call share, of ranks that are joined by sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
