"""Groups whose ranks go on after losses, in one loop, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist import Group

TRANSPORTS = ("inproc", "shm", "unix", "tcp")


class Cast:
    """Ranks that come and go; what is left of them at the end is closed."""

    def __init__(self, machine: Any, **options: Any) -> None:
        self.machine = machine
        self.address = machine.address
        self.options = options
        self.actors: list[Any] = []

    async def join(self, **options: Any) -> Group:
        group = await aiodist.connect(self.address, **{**self.options, **options})
        self.actors.append(group._actor)
        return group

    async def start(self, size: int, **options: Any) -> list[Group]:
        """A fixed group of `size`."""
        return list(
            await asyncio.gather(*[self.join(rank=r, size=size, **options) for r in range(size)])
        )

    async def kill(self, group: Group) -> None:
        """The process of `group` is gone: its sockets break, nothing more comes from it."""
        actor = group._actor
        self.actors.remove(actor)
        actor.control.abort()
        actor.endpoint.closing = True
        for context in list(actor.endpoint.inboxes.open.values()):
            if context._setup is not None:
                context._setup.cancel()
            context.ended = aiodist.GroupClosedError("killed")
            context.heap.close()
            if context.lane is not None:
                context.lane.close()
        for peer in actor.endpoint._peers.values():
            if peer.link is not None:
                peer.link.close(ConnectionAbortedError("killed"))
        await actor.endpoint.finish(1)
        for listener in actor._listeners:
            listener.close()

    @property
    def coordinator(self) -> aiodist.Coordinator:
        coordinator: aiodist.Coordinator = self.machine.coordinator
        return coordinator

    async def stop_coordinator(self) -> None:
        """End it as a SIGKILL does."""
        await self.machine.kill()

    async def start_coordinator(self) -> None:
        """Another one comes to the address of the one before, with its state file."""
        await self.machine.start()

    async def waiting(self, count: int) -> None:
        """Turn by turn of the loop, until so many wait to join."""
        for _ in iter(lambda: self._waiting() == count, True):
            await asyncio.sleep(0)

    def _waiting(self) -> int:
        return sum(len(one["waiting"]) for one in self.coordinator.status()["groups"])

    async def end(self) -> None:
        await asyncio.gather(*[actor.leave() for actor in self.actors])


Stage = Callable[..., AbstractAsyncContextManager[Cast]]


@pytest.fixture(params=TRANSPORTS)
def stage(request: pytest.FixtureRequest, machine_with: Callable[[Path | None], Any]) -> Stage:
    """``async with stage() as cast:`` with every transport."""

    @asynccontextmanager
    async def make(
        *, returns: bool = True, state: Path | None = None, **options: Any
    ) -> AsyncIterator[Cast]:
        settings = {"transports": (request.param,), "op_timeout": 20.0, **options}
        machine = machine_with(state)
        await machine.start(returns=returns)
        cast = Cast(machine, **settings)
        yield cast
        await cast.end()
        await cast.coordinator.stop()

    return make


@pytest.fixture
def everyone() -> Callable[..., Any]:
    """``await everyone(groups, lambda group: group.shrink())``: the outcomes, errors included."""

    async def call(groups: list[Group], start: Callable[[Group], Any]) -> list[Any]:
        return list(
            await asyncio.gather(*[_awaited(start, one) for one in groups], return_exceptions=True)
        )

    return call


async def _awaited(start: Callable[[Group], Any], group: Group) -> Any:
    return await start(group)
