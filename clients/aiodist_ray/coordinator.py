"""The coordinator as a Ray actor: one for each namespace, made by who comes first."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import ray

from aiodist import Coordinator

NAMESPACE = "aiodist"
"""Where the coordinators of all namespaces are, each under the name of its own. Not in that itself:
where a job has not chosen one, Ray warns that who made a detached actor will not find it again."""

LINGER = 60.0
"""Seconds for which a coordinator that has no group waits for the next one."""


class CoordinatorActor:
    """Serves groups until it is of no use any more: without a group, and asked for by nobody, for
    `linger` seconds.

    It is detached: it must not end with the actor that happened to make it. Nobody else would end
    it when the job is over, so it does so itself.
    """

    def __init__(self, linger: float = LINGER) -> None:
        self._linger = linger
        self._token = secrets.token_hex(32)
        # At the address by which the nodes of the cluster reach each other. A restarted actor would
        # have another one, so nobody need look for this coordinator again.
        host = ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        self._coordinator = Coordinator(f"tcp://{host}:0", token=self._token, returns=False)
        self._started: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._calls = 0  # of `meet`: somebody who has the address may be about to come
        self._is_ending = False

    async def meet(self) -> tuple[str, str]:
        """The address and the token, for a process that is going to join a group."""
        self._calls += 1
        if self._is_ending:
            await self.gone()  # then who asks knows that it has to ask another one
        await self._serve()
        return self._coordinator.address, self._token

    async def survey(self) -> dict[str, Any]:
        """What `aiodist status --json` tells: see `aiodist.Coordinator.survey`."""
        await self._serve()
        return await self._coordinator.survey()

    async def gone(self) -> None:
        """Never returns: fails when this actor ends. For who waits for that."""
        await asyncio.get_running_loop().create_future()

    async def _serve(self) -> None:
        if self._started is None:  # not in __init__, where no event loop runs
            self._started = asyncio.create_task(self._coordinator.start())
            self._watching = asyncio.create_task(self._end_when_unused())
        await asyncio.shield(self._started)

    async def _end_when_unused(self) -> None:
        while True:
            await self._coordinator.emptied()
            calls = self._calls
            await asyncio.sleep(self._linger)
            # One who had asked before may have come meanwhile, so that is looked at as well.
            if calls == self._calls and not self._coordinator.status()["groups"]:
                break
        self._is_ending = True
        ray.kill(ray.get_runtime_context().current_actor)


_ACTOR: Any = ray.remote(CoordinatorActor)


def coordinator(*, namespace: str | None = None, linger: float = LINGER, **options: Any) -> Any:
    """The handle of the actor with the coordinator of `namespace` (None: that of this job), made if
    need be: then `linger` and `options`, those of a Ray actor, are for it.

    `linger`: after how many seconds without a group it ends, if nobody has asked for it meanwhile.
    """
    made = _ACTOR.options(
        **{
            "num_cpus": 0,
            "max_concurrency": 10_000,  # a call may wait for as long as it likes
            "lifetime": "detached",
            **options,
            "name": ray.get_runtime_context().namespace if namespace is None else namespace,
            "namespace": NAMESPACE,
            "get_if_exists": True,
        }
    )
    return made.remote(linger)
