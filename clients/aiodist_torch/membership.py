"""The membership of a process group: join, derive from another one, succeed it, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import aiodist
from aiodist.threads.engine import Engine
from aiodist.wire.address import Address, parse_address
from aiodist_torch import rendezvous
from aiodist_torch.errors import as_torch
from aiodist_torch.parting import Parting, hold_file

log = logging.getLogger("aiodist.torch")

PATIENCE = 5.0
"""Seconds for pending operations when a group is destroyed. After that it is aborted."""
DRAIN = 300.0
"""How many seconds rank 0's process keeps the coordinator, at most, for ranks that have not
left."""


class Membership:
    """An aiodist group, and what has to end with it.

    Made and left in any thread but the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        group: aiodist.Group,
        coordinator: aiodist.Coordinator | None = None,
        parting: Parting | None = None,
    ) -> None:
        self.engine = engine
        self.group = group
        self._coordinator = coordinator
        self._parting = parting
        self._draining: asyncio.Task[None] | None = None
        self._predecessor: Membership | None = None  # left together with this one
        self._succeeded = False  # another one goes on in its place
        engine.adopt(group)
        engine.at_exit(self._exit)

    @classmethod
    def join(
        cls,
        engine: Engine,
        store: Any,
        *,
        rank: int,
        size: int,
        name: str,
        seconds: float,
        is_default: bool = False,
    ) -> Membership:
        """Meet the other ranks through torch's `store`, which ends with the default group.

        Raises what `aiodist.connect` raises, and what the store raises if rank 0 publishes nothing.
        """
        coordinator: aiodist.Coordinator | None = None
        try:
            if rank == 0:
                meeting = rendezvous.at_launcher(os.environ, "world" if is_default else name)
                if meeting is None:
                    listen, host = rendezvous.own_host(store)
                    token = rendezvous.new_token()
                    coordinator, port = engine.wait_for(_serve(listen, token))
                    meeting = rendezvous.Meeting(str(Address("tcp", host, port)), token, name)
                rendezvous.publish(store, rank, meeting)
            else:
                meeting = rendezvous.look_up(store, rank)

            async def join() -> aiodist.Group:
                return await aiodist.connect(
                    meeting.address,
                    group=meeting.group,
                    rank=rank,
                    size=size,
                    timeout=seconds,
                    op_timeout=seconds,
                    token=meeting.token,
                )

            group = engine.wait_for(join())
        except BaseException:
            if coordinator is not None:
                engine.wait_for(coordinator.stop())
            raise
        if is_default and rank == 0:
            hold_file(store)
        parting = Parting.of(group, store) if is_default else None
        return cls(engine, group, coordinator, parting)

    def derive(self, ranks: Sequence[int], seconds: float) -> Membership:
        """Make the group of some of its `ranks`. Only these call it.

        Other ranks take no part, so they may be lost. Raises what `Group.subgroup` raises, also as
        `dist.DistBackendError`.
        """

        async def derive() -> aiodist.Group:
            return await self.group.subgroup(ranks, timeout=seconds)

        try:
            group = self.engine.wait_for(derive())
        except aiodist.AiodistError as error:
            raise as_torch(error) from None
        return Membership(self.engine, group)

    def succeed(self, ranks: Sequence[int], seconds: float) -> Membership:
        """Make a group as `derive` does, and let it go on in the place of this one.

        Leaving or aborting this one does nothing any more. It ends when the new one is left,
        because a rank that closes its first group closes all groups made of it. The coordinator
        stays until then, and so does torch's store if it ends with this group.
        """
        successor = self.derive(ranks, seconds)
        successor._predecessor, self._succeeded = self, True
        successor._parting, self._parting = self._parting, None
        return successor

    @property
    def hosts_store(self) -> bool:
        """Whether torch's store ends with this group: drop all references to it, and leave."""
        return self._parting is not None and self._parting.is_host

    def leave(self) -> None:
        """Wait a moment for pending operations and for rank 0, and leave. Idempotent.

        A coordinator in this process stays until the others have left, too. A forked child leaves
        nothing, because the parent is the member.
        """
        if self._succeeded or self.engine.is_inherited:
            return
        # Two steps, because the group's store ends with the group, and the ranks use it to settle
        # what happens to torch's store.
        self.engine.wait_for(self._part())
        self.engine.wait_for(self._leave())

    def abort(self, reason: str) -> None:
        """Leave at once: pending operations fail on all ranks."""
        if self._succeeded or self.engine.is_inherited:
            return
        if self.hosts_store:
            self.engine.wait_for(self._part())  # because the others would wait for that
        self.engine.submit(lambda: self.group.abort(reason))
        self.engine.wait_for(self._leave())

    async def _part(self) -> None:
        parting, self._parting = self._parting, None
        if parting is not None:
            await parting.settle()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self.group.close()
        except TimeoutError:
            self.group.abort("it was destroyed while operations were pending")
            await self.group.close()
        if self._predecessor is not None:
            await self._predecessor._leave()
        if self._coordinator is None:
            self.engine.forget(self._exit)
        elif self._draining is None:
            loop = asyncio.get_running_loop()
            self._draining = loop.create_task(self._drain(self._coordinator))

    async def _drain(self, coordinator: aiodist.Coordinator) -> None:
        await coordinator.stop(drain=DRAIN)
        self.engine.forget(self._exit)

    async def _exit(self) -> None:
        """Leave, because the process exits."""
        if self.hosts_store:
            await self._part()
        await self._leave()
        if self._draining is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._draining


async def _serve(host: str, token: str) -> tuple[aiodist.Coordinator, int]:
    coordinator = aiodist.Coordinator(str(Address("tcp", host, 0)), token=token, returns=False)
    await coordinator.start()
    return coordinator, parse_address(coordinator.address).port
