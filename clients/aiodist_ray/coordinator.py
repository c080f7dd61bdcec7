"""The coordinator as a Ray actor: one for each namespace, made by the first caller."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import ray

from aiodist import Coordinator

NAMESPACE = "aiodist"
"""The namespace of all coordinators, each under the name of its job's namespace.

The job's own namespace would not do: if the job has not chosen one, Ray warns that a detached actor
cannot be found again.
"""

LINGER = 60.0
"""How many seconds a coordinator without a group waits for the next one."""


class CoordinatorActor:
    """Serves groups until there was no group and no request for `linger` seconds.

    The actor is detached, because it must not end with the actor that happened to make it. Nothing
    else would end it after the job, so it ends itself.
    """

    def __init__(self, linger: float = LINGER) -> None:
        self._linger = linger
        self._token = secrets.token_hex(32)
        # The address by which the nodes of the cluster reach each other. A restarted actor would
        # have another one, so no member looks for this coordinator again.
        host = ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        self._coordinator = Coordinator(f"tcp://{host}:0", token=self._token, returns=False)
        self._started: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._calls = 0  # of `meet`, because a process that has the address may be about to come
        self._is_ending = False

    async def meet(self) -> tuple[str, str]:
        """Return the address and the token, for a process that is going to join a group."""
        self._calls += 1
        if self._is_ending:
            await self.gone()  # this fails, and the caller asks for another coordinator
        await self._serve()
        return self._coordinator.address, self._token

    async def survey(self) -> dict[str, Any]:
        """Return what `aiodist status --json` tells: see `aiodist.Coordinator.survey`."""
        await self._serve()
        return await self._coordinator.survey()

    async def gone(self) -> None:
        """Never return, and fail when this actor ends, so that a caller can wait for that."""
        await asyncio.get_running_loop().create_future()

    async def _serve(self) -> None:
        if self._started is None:  # not in __init__, because no event loop runs then
            self._started = asyncio.create_task(self._coordinator.start())
            self._watching = asyncio.create_task(self._end_when_unused())
        await asyncio.shield(self._started)

    async def _end_when_unused(self) -> None:
        while True:
            await self._coordinator.emptied()
            calls = self._calls
            await asyncio.sleep(self._linger)
            # A process that asked before may have come meanwhile, so the groups are checked as
            # well.
            if calls == self._calls and not self._coordinator.status()["groups"]:
                break
        self._is_ending = True
        ray.kill(ray.get_runtime_context().current_actor)


_ACTOR: Any = ray.remote(CoordinatorActor)


def coordinator(*, namespace: str | None = None, linger: float = LINGER, **options: Any) -> Any:
    """Return the handle of the coordinator's actor of `namespace` (None: that of this job).

    If there is none, it is made with `linger` and `options`, which are options of a Ray actor. It
    ends after `linger` seconds without a group or a request.
    """
    made = _ACTOR.options(
        **{
            "num_cpus": 0,
            "max_concurrency": 10_000,  # because a call may wait for long
            "lifetime": "detached",
            **options,
            "name": ray.get_runtime_context().namespace if namespace is None else namespace,
            "namespace": NAMESPACE,
            "get_if_exists": True,
        }
    )
    return made.remote(linger)
