"""The coordinator, in the scheduler's process and on its event loop."""

from __future__ import annotations

import secrets
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.comm import get_address_host

from aiodist import Coordinator
from aiodist_dask.security import server_context


class CoordinatorPlugin(SchedulerPlugin):
    """Serves the groups of a cluster for as long as its scheduler lives."""

    name = "aiodist-coordinator"
    idempotent = True

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None
        self._token = ""

    async def start(self, scheduler: Scheduler) -> None:
        self._token = secrets.token_hex(32)
        host = get_address_host(scheduler.address)
        host = f"[{host}]" if ":" in host else host
        ssl = server_context(scheduler.security, "scheduler")
        address = f"{'tcp' if ssl is None else 'tls'}://{host}:0"
        coordinator = Coordinator(address, token=self._token, ssl=ssl, returns=False)
        await coordinator.start()
        self._coordinator = coordinator

    async def close(self) -> None:
        if self._coordinator is not None:
            await self._coordinator.stop()

    def whereabouts(self) -> tuple[str, str]:
        """Return the address and the token."""
        if self._coordinator is None:
            raise RuntimeError("the coordinator has not started on this scheduler")
        return self._coordinator.address, self._token


def whereabouts(dask_scheduler: Any) -> tuple[str, str]:
    """Return the coordinator's address and token. For `Client.run_on_scheduler`."""
    plugin: CoordinatorPlugin = dask_scheduler.plugins[CoordinatorPlugin.name]
    return plugin.whereabouts()
