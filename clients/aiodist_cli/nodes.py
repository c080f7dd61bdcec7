"""A run over several nodes, whose launchers form a group on the same coordinator.

The launchers agree on the run by a collective. A node sends its failure to the others as a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiodist
from aiodist.launching import spawn
from aiodist_cli.errors import CommandError

_FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why ranks have to stop, and the exit status for that."""

    status: int
    reason: str


class Meeting:
    """What the launchers of one run agreed on, and their connection.

    `news` is done when another node failed or its launcher was lost.
    """

    def __init__(self, launchers: aiodist.Group, run_id: str, master_port: int) -> None:
        self.run_id = run_id
        self.master_addr = launchers.members[0].host  # the host of node 0, for torch's own use
        self.master_port = master_port
        self.news = asyncio.ensure_future(_hear(launchers))
        self._launchers = launchers
        self._told: list[asyncio.Future[None]] = []
        self._pending: list[asyncio.Future[Any]] = [self.news]  # to be cancelled at the end

    def tell(self, stop: Stop) -> None:
        """Tell the other nodes why this one stops, unless one of them stopped first."""
        if self.news.done():
            return
        self._told = [
            self._launchers.send({"status": stop.status, "reason": stop.reason}, peer, tag=_FAILURE)
            for peer in range(self._launchers.size)
            if peer != self._launchers.rank
        ]

    async def all_done(self, interruption: asyncio.Future[Any]) -> bool:
        """Wait until the ranks of all nodes have ended well. False: `interruption` came first."""
        done = self._launchers.barrier(timeout=math.inf)
        self._pending.append(done)
        await asyncio.wait([done, interruption], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return False
        await done
        return True

    async def end(self) -> None:
        """Cancel what is still awaited. Call `tell` before, because the others notice this."""
        # A launcher that is gone need not be told.
        await asyncio.gather(*self._told, return_exceptions=True)
        for future in self._pending:
            future.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)


@contextlib.asynccontextmanager
async def meet(
    coordinator: str,
    token: str | None,
    group: str,
    *,
    node: int,
    nodes: int,
    nprocs: int,
    timeout: float,
) -> AsyncIterator[Meeting]:
    """Meet the launchers of the other nodes within `timeout` seconds, until the context ends.

    Raises what `aiodist.connect` does, and CommandError if the nodes have different numbers of
    ranks.
    """
    async with aiodist.connect(
        coordinator,
        group=f"{group}/launchers",
        rank=node,
        size=nodes,
        timeout=timeout,
        token=token,
    ) as launchers:
        own: dict[str, Any] = {
            "nprocs": nprocs, "run_id": uuid.uuid4().hex, "port": spawn.free_port("")
        }  # fmt: skip
        offers = await launchers.all_gather(own)
        if any(offer["nprocs"] != nprocs for offer in offers):
            told = ", ".join(f"node {i}: {offer['nprocs']}" for i, offer in enumerate(offers))
            raise CommandError(
                "aiodist run: -n is the number of ranks on each node and must be the same on all, "
                f"but it is {told}"
            )
        meeting = Meeting(launchers, offers[0]["run_id"], offers[0]["port"])
        try:
            yield meeting
        finally:
            await meeting.end()


async def _hear(launchers: aiodist.Group) -> Stop:
    """Wait for a message that another node stops."""
    try:
        told = await launchers.recv(tag=_FAILURE)
    except aiodist.AiodistError as error:
        return Stop(1, f"the launchers of the other nodes are lost: {error}")
    return Stop(told["status"], told["reason"])
