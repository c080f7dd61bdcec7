"""Ranks of one loop that share memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiodist
from aiodist import Group


async def everyone(ranks: list[Group], start: Callable[[Group], Awaitable[Any]]) -> list[Any]:
    """What comes of ``start(group)`` on all ranks, by rank."""
    return list(await asyncio.gather(*[start(group) for group in ranks]))


@asynccontextmanager
async def sharing(size: int, **options: Any) -> AsyncIterator[list[Group]]:
    """Ranks that have agreed to share memory."""
    async with aiodist.local(size, transports=("shm",), op_timeout=30.0, **options) as ranks:
        while any(group._context.express is None for group in ranks):
            await everyone(ranks, lambda group: group.barrier())
        yield ranks


@contextmanager
def unmapping_all() -> Iterator[None]:
    """Fail if memory that was mapped in this context still is, without the collector's help."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:aiodist")

    gc.collect()
    before = mapped()
    gc.disable()
    try:
        yield
        assert mapped() == before
    finally:
        gc.enable()
