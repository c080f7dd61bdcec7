"""Groups of ranks in one loop, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import aiodist
from aiodist import Group

Groups = Callable[..., AbstractAsyncContextManager[list[Group]]]


@pytest.fixture(params=["inproc", "shm", "unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def groups(transport: str) -> Groups:
    """``async with groups(3) as ranks:`` the ranks of a group over the transport."""

    @asynccontextmanager
    async def make(size: int, **options: Any) -> AsyncIterator[list[Group]]:
        settings = {"op_timeout": 30.0, "transports": (transport,), **options}
        async with aiodist.local(size, **settings) as ranks:
            yield ranks

    return make


@pytest.fixture
def everyone() -> Callable[..., Awaitable[list[Any]]]:
    """``await everyone(ranks, lambda group: group.barrier())``: the results by rank."""

    async def call(ranks: list[Group], start: Callable[[Group], Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*[start(group) for group in ranks]))

    return call
