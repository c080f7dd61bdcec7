"""What runs on a worker: joining groups, running coroutines with them, leaving."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

import aiodist
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

    async def teardown(self, worker: Worker) -> None:
        # Without waiting for others, because this worker goes in any case.
        for group in self.groups.values():
            group.abort("the Dask worker is closed")
        self.groups.clear()


def _groups_of(worker: Worker) -> dict[str, aiodist.Group]:
    plugin: GroupsPlugin = worker.plugins[GroupsPlugin.name]
    return plugin.groups


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
    await leave(ticket.name, dask_worker)
    _groups_of(dask_worker)[ticket.name] = await aiodist.connect(
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


async def leave(name: str, dask_worker: Worker) -> None:
    """Leave a group if this worker is in it, without waiting for others."""
    group = _groups_of(dask_worker).pop(name, None)
    if group is not None:
        group.abort("the group is left by all")


async def call(
    name: str,
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
    group = await _groups_of(dask_worker)[name].dup()
    async with group:
        try:
            return (await function(group, *args, **options),)
        except BaseException:
            group.revoke()
            raise
