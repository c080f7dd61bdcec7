"""A group belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aiodist
from aiodist import Group

CALLS: dict[str, Callable[[Group], Any]] = {
    "abort": lambda group: group.abort(),
    "agree": lambda group: group.agree().send(None),
    "close": lambda group: group.close().send(None),
    "dup": lambda group: group.dup().send(None),
    "rendezvous": lambda group: group.rendezvous().send(None),
    "revoke": lambda group: group.revoke(),
    "shrink": lambda group: group.shrink().send(None),
    "subgroup": lambda group: group.subgroup([0]).send(None),
}


@pytest.mark.parametrize("call", CALLS)
async def test_other_threads_are_told_what_they_may_use(call: str) -> None:
    async with aiodist.local(1) as (group,):
        with pytest.raises(RuntimeError, match=r"belongs to the event loop that made it; .*block"):
            await asyncio.to_thread(CALLS[call], group)
        assert await group.agree()


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "send"])
async def test_what_has_ended_says_so_wherever_it_is_called(op: str) -> None:
    """As in a forked child, which has another loop, or none: no other thread is what is amiss."""
    async with aiodist.local(1) as (group,):
        arguments = (1, 0) if op == "send" else (1,)
        with pytest.raises(RuntimeError, match="belongs to the event loop that made it"):
            await asyncio.to_thread(getattr(group, op), *arguments)
        await group.close()
        with pytest.raises(aiodist.GroupClosedError):
            await asyncio.to_thread(getattr(group, op), *arguments)
