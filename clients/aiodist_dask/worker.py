"""What is done on a worker: joining groups, running coroutines with them, leaving."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

import aiodist
from aiodist_dask.security import contexts


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to join: `name`, what users call the group; `group`, which of those that
    have had this name. `options` are for `aiodist.connect`."""

    address: str
    token: str = field(repr=False)  # Dask logs the arguments of what fails
    name: str
    group: str
    size: int
    options: Mapping[str, Any]


class GroupsPlugin(WorkerPlugin):
    """Keeps the groups of one worker, by name, and leaves them in order when it is closed."""

    name = "aiodist-groups"
    idempotent = True

    def __init__(self) -> None:
        self.groups: dict[str, aiodist.Group] = {}

    async def teardown(self, worker: Worker) -> None:
        # Without waiting for others: this worker is going, whatever they do.
        for group in self.groups.values():
            group.abort("the Dask worker is closed")
        self.groups.clear()


def _groups_of(worker: Worker) -> dict[str, aiodist.Group]:
    plugin: GroupsPlugin = worker.plugins[GroupsPlugin.name]
    return plugin.groups


def get_group(name: str = "world", *, worker: Worker | None = None) -> aiodist.Group:
    """The group of that name of `worker`: of the one that runs this task where it is None.

    A task runs in a thread, where ``get_group().blocking()`` has the operations as calls. A
    coroutine that `Client.run` runs gets its worker as the argument `dask_worker`, and awaits them.

    Raises KeyError where the worker is in no such group.
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
    """Join a group, as the rank that `ranks` gives this worker, in the place of the one that had
    its name."""
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
    """Leave a group, if this worker is in it, and wait for nobody."""
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
    """``await function(group, *args, **options)``, with a group for this call alone: one that fails
    ends it for all, so that nobody waits in vain, and what it left behind is no other call's.

    The result is in a tuple: one that is an exception would be taken for a failure.
    """
    group = await _groups_of(dask_worker)[name].dup()
    async with group:
        try:
            return (await function(group, *args, **options),)
        except BaseException:
            group.revoke()
            raise
