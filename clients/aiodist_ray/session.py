"""`connect`: join a group from a process of Ray, through the coordinator of its namespace."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Unpack

import ray
from ray.exceptions import RayActorError

import aiodist
from aiodist.types import MemberOptions
from aiodist_ray.coordinator import coordinator

if TYPE_CHECKING:
    from aiodist import session


class Options(MemberOptions, total=False):
    """The options of `aiodist.connect` that `connect` takes.

    The address and the token come from the coordinator.
    """

    name: str | None
    rank: int | None
    size: int | None
    min_size: int | None
    max_size: int | None
    timeout: float | None


def connect(
    group: str = "world", *, namespace: str | None = None, **options: Unpack[Options]
) -> Connecting:
    """Join a group of this namespace: ``await connect(…)``, or ``async with connect(…) as group:``.

    Call it on an event loop, usually in a coroutine of an actor. `options` are those of
    `aiodist.connect`: `size` (and `rank`), or `min_size` and `max_size`, `timeout` and so on. The
    address and the token come from the coordinator, an actor that is made if there is none.
    `metadata` gets `actor_id` and `node_id`, too. `timeout` is 300 s by default, because Ray may
    take long to start the actors.

    Raises what `aiodist.connect` raises, and TypeError for an address or a token.
    """
    if options.keys() & {"address", "token"}:
        raise TypeError(
            "aiodist_ray.connect takes no address= and no token=, because the coordinator's actor "
            "gives them: leave them out"
        )
    return Connecting(group, namespace, options)


JOIN_TIMEOUT = 300.0
"""The default of `timeout`, in seconds. The other actors may wait for their turn, or for a node."""


class Connecting:
    """What `connect` returns."""

    def __init__(self, group: str, namespace: str | None, options: Options) -> None:
        self._group = group
        self._namespace = namespace
        self._options = options
        self._inner: session.Connecting  # what `aiodist.connect` returned, once entered

    def __await__(self) -> Generator[Any, None, aiodist.Group]:
        return self._connect().__await__()

    async def __aenter__(self) -> aiodist.Group:
        self._inner = await self._met()
        return await self._inner.__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def _connect(self) -> aiodist.Group:
        return await (await self._met())

    async def _met(self) -> session.Connecting:
        address, token = await meet(self._namespace)
        where = ray.get_runtime_context()
        metadata = {"actor_id": where.get_actor_id(), "node_id": where.get_node_id()}
        metadata |= self._options.get("metadata") or {}
        own: dict[str, Any] = {"group": self._group, "token": token, "metadata": metadata}
        return aiodist.connect(address, **{"timeout": JOIN_TIMEOUT, **self._options, **own})


async def meet(namespace: str | None) -> tuple[str, str]:
    """Return the coordinator's address and token, in this namespace."""
    try:
        found: tuple[str, str] = await coordinator(namespace=namespace).meet.remote()
    except RayActorError:
        # It was about to end, because it had no groups, or has died. Its name is free now.
        found = await coordinator(namespace=namespace).meet.remote()
    return found
