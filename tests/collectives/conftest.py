"""Groups of ranks in one loop, over every transport, and on several hosts that are names alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

import aiodist
from aiodist import Group
from aiodist.transports import registry

Groups = Callable[..., AbstractAsyncContextManager[list[Group]]]

HOST: ContextVar[str] = ContextVar("HOST")
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"]
LAYOUT = "abbaccab"
"""The hosts of ranks 0, 1, …, where nothing else is said."""


@pytest.fixture
def on_hosts(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """``async with on_hosts("aab") as ranks:`` one rank on each of the hosts that are named, once
    they share memory (unless told not to `wait`)."""
    monkeypatch.setattr(registry, "host_id", HOST.get)

    @asynccontextmanager
    async def make(layout: str, *, wait: bool = True, **options: Any) -> AsyncIterator[list[Group]]:
        settings = {"op_timeout": 30.0, "transports": ("shm", "tcp"), **options}
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:

            async def join(rank: int, host: str) -> Group:
                HOST.set(host)
                return await aiodist.connect(
                    coordinator.address, rank=rank, size=len(layout), **settings
                )

            ranks = await asyncio.gather(*[join(*member) for member in enumerate(layout)])
            for group in ranks:
                await stack.enter_async_context(group)
            if wait and len(set(layout)) < len(layout):
                setups = [group._context._setup for group in ranks]
                for setup in setups:
                    setup.begin()
                await asyncio.gather(*[setup._task for setup in setups])
                assert all(group._context.lane for group in ranks)
            yield ranks

    return make


@pytest.fixture(params=["inproc", "shm", "unix", "tcp", "hosts"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def groups(transport: str, request: pytest.FixtureRequest) -> Groups:
    """``async with groups(3) as ranks:`` the ranks of a group over the transport."""
    on_hosts = request.getfixturevalue("on_hosts") if transport == "hosts" else None

    @asynccontextmanager
    async def make(size: int, **options: Any) -> AsyncIterator[list[Group]]:
        if on_hosts is not None:
            async with on_hosts(LAYOUT[:size], **options) as ranks:
                yield ranks
            return
        settings = {"op_timeout": 30.0, "transports": (transport,), **options}
        async with aiodist.local(size, **settings) as ranks:
            yield ranks

    return make


@pytest.fixture
def every_tag(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tag of all collectives that say nothing else."""
    tag = request.param
    for name in OPERATIONS if tag is not None else ():
        real = getattr(Group, name)

        def call(group: Group, *args: Any, real: Any = real, **options: Any) -> Any:
            return real(group, *args, **{"tag": tag, **options})

        monkeypatch.setattr(Group, name, call)
    return tag


@pytest.fixture
def everyone() -> Callable[..., Awaitable[list[Any]]]:
    """``await everyone(ranks, lambda group: group.barrier())``: the results by rank."""

    async def call(ranks: list[Group], start: Callable[[Group], Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*[start(group) for group in ranks]))

    return call
