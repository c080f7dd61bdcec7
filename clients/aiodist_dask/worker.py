"""What runs on a worker: joining groups, running coroutines with them, leaving."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

import aiodist
from aiodist.launching import spawn
from aiodist_dask.security import contexts


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to join a group.

    `name` is what users call the group. `group` is unique among all groups that had this name.
    `options` are for `aiodist.connect`.
    """

    address: str
    token: str = field(repr=False)  # hidden, because Dask logs the arguments of calls that fail
    name: str
    group: str
    size: int
    options: Mapping[str, Any]


class GroupsPlugin(WorkerPlugin):
    """Keeps the groups of one worker, by name, and leaves them when the worker is closed."""

    name = "aiodist-groups"
    idempotent = True

    def __init__(self) -> None:
        self.groups: dict[str, aiodist.Group] = {}
        # `Ticket.group` of the last ones.
        self.replaced: deque[str] = deque(maxlen=1024)

    async def teardown(self, worker: Worker) -> None:
        # Without waiting for others, because this worker goes in any case.
        for group in self.groups.values():
            group.abort("the Dask worker is closed")
        self.groups.clear()

    def replace(self, name: str) -> None:
        """Leave the group of that name, if there is one, because another takes its place."""
        group = self.groups.pop(name, None)
        if group is not None:
            self.replaced.append(group.name)
            group.abort("another group of the same name replaces it")

    def has(self, ticket: Ticket) -> bool:
        """Tell whether this worker is in that very group, and not in another of its name."""
        return ticket.name in self.groups and self.groups[ticket.name].name == ticket.group


class NeverJoined(Exception):
    """This worker has not joined the group. It was restarted at the address of a worker that had,
    or its join failed."""


def _plugin_of(worker: Worker) -> GroupsPlugin:
    plugin: GroupsPlugin = worker.plugins[GroupsPlugin.name]
    return plugin


def get_group(name: str = "world", *, worker: Worker | None = None) -> aiodist.Group:
    """Return the group `name` of `worker` (None: the worker that runs this task).

    A task runs in a thread. Use ``get_group().blocking()`` there, which has the operations as
    ordinary calls. A coroutine that `Client.run` runs gets its worker as the argument
    `dask_worker`, and awaits the operations.

    Raises KeyError if the worker is in no such group.
    """
    worker = get_worker() if worker is None else worker
    plugin = worker.plugins.get(GroupsPlugin.name)
    if plugin is None or name not in plugin.groups:
        raise KeyError(
            f"the Dask worker at {worker.address} is in no group {name!r}: make it with "
            "aiodist_dask.groups(client), and run this on its workers"
        )
    group: aiodist.Group = plugin.groups[name]
    return group


async def join(ticket: Ticket, ranks: dict[str, int], dask_worker: Worker) -> None:
    """Join a group as the rank that `ranks` gives this worker, in place of an earlier one of its
    name."""
    plugin = _plugin_of(dask_worker)
    plugin.replace(ticket.name)
    group = await aiodist.connect(
        ticket.address,
        group=ticket.group,
        rank=ranks[dask_worker.address],
        size=ticket.size,
        **{
            "token": ticket.token,
            "ssl": contexts(dask_worker.security, "worker"),
            "name": str(dask_worker.name),
            **ticket.options,
        },
    )
    plugin.replace(ticket.name)  # again, because another client may have been faster
    plugin.groups[ticket.name] = group


async def leave(ticket: Ticket, dask_worker: Worker) -> None:
    """Leave a group if this worker is still in it, without waiting for others."""
    plugin = _plugin_of(dask_worker)
    if plugin.has(ticket):
        plugin.groups.pop(ticket.name).abort("the group is left by all")


async def call(
    ticket: Ticket,
    function: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
    options: dict[str, Any],
    dask_worker: Worker,
) -> tuple[Any]:
    """Await ``function(group, *args, **options)``, with a group for this call alone.

    A call that fails ends that group for all workers, so that no worker waits in vain, and so that
    its messages cannot reach another call. The result is in a tuple, because Dask would take a
    result that is an exception for a failure.
    """
    plugin = _plugin_of(dask_worker)
    if ticket.group in plugin.replaced:
        raise RuntimeError(
            f"another groups(…) of the name {ticket.name!r} has replaced this one: give each a "
            "name= of its own, or call renew() to replace the other"
        )
    if not plugin.has(ticket):
        raise NeverJoined(ticket.group)
    group = await plugin.groups[ticket.name].dup()
    async with group:
        try:
            return (await function(group, *args, **options),)
        except BaseException as error:
            group.revoke()
            spawn.mark(error)
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and not (task and task.cancelling()):
                # Dask closes the connection on this error, as if the worker had died.
                text = f"the function was cancelled on rank {group.rank}"
                raise RuntimeError(text) from error
            raise
