"""Who hears of operations: whoever made the group while a hook was installed."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from aiodist import trace
from aiodist.trace import Scope

SCOPE = Scope("g", 1, 0, 2, b"id")


def alone(function: Any) -> Any:
    """Run it, and leave no hook behind."""
    return contextvars.copy_context().run(function)


def test_there_is_none_at_first() -> None:
    assert alone(lambda: trace.bound(SCOPE)) is None


def test_a_hook_hears_the_scope_first() -> None:
    heard: list[Any] = []

    def main() -> None:
        trace.install(lambda *what: heard.append(what))
        bound = trace.bound(SCOPE)
        assert bound is not None
        trace.install(None)
        assert trace.bound(SCOPE) is None
        bound("start", "work", None)  # it stays with what was made before

    alone(main)
    assert heard == [(SCOPE, "start", "work", None)]


async def test_a_hook_is_that_of_a_task_and_of_those_that_it_starts() -> None:
    async def installing() -> bool:
        trace.install(lambda *what: None)

        async def inner() -> bool:
            return trace.bound(SCOPE) is not None

        return await asyncio.create_task(inner())

    assert await asyncio.create_task(installing())
    assert trace.bound(SCOPE) is None
