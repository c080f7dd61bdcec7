"""`groups`: a group of a cluster's workers, from the client's side."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Unpack

from distributed import Client
from distributed.comm.core import CommClosedError

import aiodist
from aiodist import PeerLostError
from aiodist.launching import spawn
from aiodist.types import MemberOptions
from aiodist_dask import scheduler, worker

P = ParamSpec("P")

_numbers = itertools.count(1)


class Options(MemberOptions, total=False):
    """The options of `aiodist.connect` that `groups` takes."""

    timeout: float | None


def groups(
    client: Client,
    name: str = "world",
    *,
    workers: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Groups:
    """Make a group of the workers of `client`: ``with groups(client) as ranks:``.

    Use ``async with`` with an asynchronous client. `workers` are the addresses of the members, by
    rank (None: all workers). `options` are those of `aiodist.connect` on each worker: `op_timeout`,
    `transports` and so on. If the cluster has TLS, the group uses it with the same certificates.
    """
    return Groups(client, name, workers, options)


class Groups:
    """A group of workers, from the client's side.

    Methods wait for their results. With an asynchronous client they return awaitables, as the
    client's own methods do.
    """

    def __init__(
        self, client: Client, name: str, workers: Sequence[str] | None, options: Options
    ) -> None:
        self._client = client
        self._name = name
        self._wanted = workers
        self._options = options
        self._workers: tuple[str, ...] = ()
        self._ticket: worker.Ticket | None = None
        # One call after the other, because calls that reach workers in different orders would not
        # match.
        self._turn = asyncio.Lock()

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the workers, by rank."""
        return self._workers

    def start(self) -> Any:
        """Make the workers meet. Entering the block does this, too."""
        return self._client.sync(self._meet)

    renew = start

    def run(
        self,
        function: Callable[Concatenate[aiodist.Group, P], Coroutine[Any, Any, Any]],
        *args: P.args,
        **options: P.kwargs,
    ) -> Any:
        """Run ``await function(group, *args, **options)`` on the event loop of each worker.

        Returns the results by address, in the order of ranks. If one raises, the call ends on all
        workers, and this raises the error. The group stays usable.

        Raises PeerLostError if a worker has died or was restarted, with its rank in `.ranks`. Call
        `renew` to make the survivors, and new workers, meet again. Raises RuntimeError if another
        group of the same name has replaced this one.
        """
        return self._client.sync(self._run, function, args, options)

    def close(self) -> Any:
        """Make the workers leave. Leaving the block does this, too."""
        return self._client.sync(self._close)

    def __enter__(self) -> Groups:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Groups:
        await self._meet()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    # -- on the client's event loop ----------------------------------------------------------------

    async def _meet(self) -> None:
        async with self._turn:
            await self._client.register_plugin(scheduler.CoordinatorPlugin())
            await self._client.register_plugin(worker.GroupsPlugin())
            address, token = await self._client.run_on_scheduler(scheduler.whereabouts)
            self._workers = _members(self._workers, self._wanted, await self._there())
            self._ticket = worker.Ticket(
                address,
                token,
                self._name,
                f"{self._name}/{self._client.id}/{next(_numbers)}",
                len(self._workers),
                self._options,
            )
            ranks = {address: rank for rank, address in enumerate(self._workers)}
            await self._on_workers(worker.join, self._ticket, ranks)

    async def _run(
        self,
        function: Callable[..., Coroutine[Any, Any, Any]],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        async with self._turn:
            if not self._workers:
                raise RuntimeError("the group has not met: use `with groups(…) as …:`, or start()")
            there = await self._there()
            if gone := [rank for rank, each in enumerate(self._workers) if each not in there]:
                raise self._lost(gone)  # because connecting to them would take until a deadline
            found = await self._on_workers(worker.call, self._ticket, function, args, options)
            return {each: result for each, (result,) in found.items()}

    async def _close(self) -> None:
        async with self._turn:
            there = await self._there()
            workers = [each for each in self._workers if each in there]
            # A worker that dies now has left as well.
            await self._client.run(worker.leave, self._ticket, workers=workers, on_error="ignore")
            self._workers = ()

    async def _on_workers(self, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Run `function` on all workers of the group. Returns the results, by rank.

        If several workers failed, this raises the cause of the others.
        """
        found: dict[str, Any] = await self._client.run(
            function, *args, workers=list(self._workers), on_error="return"
        )
        failures = [found[each] for each in self._workers if isinstance(found[each], BaseException)]
        dead = [
            rank
            for rank, each in enumerate(self._workers)
            if isinstance(found[each], CommClosedError | worker.NeverJoined)
        ]
        causes = [each for each in failures if not spawn.is_consequence(each)]
        if dead:
            raise self._lost(dead)
        if failures:
            raise (causes or failures)[0]
        return {each: found[each] for each in self._workers}

    async def _there(self) -> Collection[str]:
        """Return the addresses of the workers that the scheduler has now."""
        workers: Collection[str] = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        return workers

    def _lost(self, ranks: Sequence[int]) -> PeerLostError:
        where = ", ".join(self._workers[rank] for rank in ranks)
        text = f"lost {spawn.name_ranks(ranks)}, on {where}: renew() has the others meet anew"
        return PeerLostError(text, ranks=ranks, group=self._name)


def _members(
    before: Sequence[str], wanted: Sequence[str] | None, there: Collection[str]
) -> tuple[str, ...]:
    """Return the members: those of the wanted workers that exist, earlier members first.

    The first time, all wanted workers must exist.
    """
    twice = [each for each, count in Counter(wanted or ()).items() if count > 1]
    if twice:
        raise ValueError(f"workers= has {', '.join(twice)} more than once: list each worker once")
    missing = [each for each in wanted or () if each not in there]
    if missing and not before:
        raise ValueError(f"the cluster has no workers {', '.join(missing)}")
    candidates = [each for each in (sorted(there) if wanted is None else wanted) if each in there]
    kept = [each for each in before if each in candidates]
    members = (*kept, *(each for each in candidates if each not in kept))
    if not members:
        raise RuntimeError(
            "the cluster has none of the workers that are to be in the group: wait for "
            "them with client.wait_for_workers"
        )
    return members
