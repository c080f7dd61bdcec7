"""A group belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import Group
from aiodist.control.store import Store

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


async def test_a_window_says_so_too() -> None:
    async with aiodist.local(1) as (group,), await group.expose(np.ones(2)) as window:

        async def elsewhere() -> None:
            await window.fence()

        for call in (window.close, elsewhere):
            with pytest.raises(RuntimeError, match="belongs to the event loop that made it"):
                await asyncio.to_thread(asyncio.run, call())
        assert not window._fences
        assert (await window.get(0)).tolist() == [1, 1]


STORE_CALLS: dict[str, Callable[[Store], Any]] = {
    "add": lambda store: store.add("k"),
    "compare_set": lambda store: store.compare_set("k", None, b""),
    "delete": lambda store: store.delete("k"),
    "get": lambda store: store.get("k"),
    "set": lambda store: store.set("k", b""),
    "wait": lambda store: store.wait("k"),
    "watch": lambda store: store.watch("k"),
}


@pytest.mark.parametrize("call", STORE_CALLS)
async def test_so_does_its_store(call: str) -> None:
    async with aiodist.local(1) as (group,):
        store = group.store

        async def elsewhere() -> None:
            STORE_CALLS[call](store)

        expected = r"belongs to the event loop that made the group; .*blocking\(\)\.store"
        with pytest.raises(RuntimeError, match=expected):
            await asyncio.to_thread(STORE_CALLS[call], store)
        with pytest.raises(RuntimeError, match=expected):
            await asyncio.to_thread(asyncio.run, elsewhere())
        assert await store.get("k") is None
    with pytest.raises(aiodist.GroupClosedError):
        await asyncio.to_thread(STORE_CALLS[call], store)


async def test_so_do_watches() -> None:
    async with aiodist.local(1) as (group,), group.store.watch("k") as watch:

        async def elsewhere() -> None:
            await anext(watch)

        for call in (watch.close, lambda: asyncio.run(elsewhere())):
            with pytest.raises(RuntimeError, match="belongs to the event loop that made the group"):
                await asyncio.to_thread(call)
        await group.store.set("k", b"v")
        assert await anext(watch) == ("k", b"v")


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
