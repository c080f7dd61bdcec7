"""`aiodist.lifespan`: a group beside the requests of a web service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from aiodist import timeouts
from aiodist.errors import AiodistError, CollectiveAbortedError, GroupClosedError, leaves
from aiodist.group import Group
from aiodist.rank import whereabouts
from aiodist.services.asking import Answer, Asking
from aiodist.services.keeper import Keeper
from aiodist.session import connect
from aiodist.types import RankOptions

Q = TypeVar("Q")
T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger("aiodist.services")

_PAUSE = 1.0
"""Seconds before a service tries again to form a group."""


class Lifespan:
    """The group of a web service's workers, from the start of a worker to its end.

    For Starlette and FastAPI, and for aiohttp::

        lifespan = aiodist.lifespan(min_size=1)
        app = Starlette(routes=routes, lifespan=lifespan)

        app = web.Application()
        app.cleanup_ctx.append(lifespan.cleanup_ctx)

    A worker joins the group before its first request, and leaves after its last one. If another
    worker dies or ends, the group goes on without it. A new worker is taken in. `group` is the
    group of the present epoch (Starlette: ``request.app.state.group``). If the epoch ends during a
    request, the request's operations fail. `call` repeats them in the next epoch.

    `serve` is ``async def serve(group)``. It runs beside the requests, anew in each epoch, for
    example to join in what other workers were asked for. It is cancelled when the epoch or the
    worker ends. If it raises something else, `call` and `group` raise that from then on.

    `answer` is ``async def answer(question)``: what this worker replies to `ask` of any worker.
    Either all workers give it, or none.

    `address`, `min_size` (how many workers each epoch takes), `max_size` and `options` are those of
    `aiodist.connect`. The start of the worker raises the errors of `connect`. If later no group
    forms within `timeout`, that is logged, every waiting `call` raises it, and the worker tries
    again until it ends.

    Raises TypeError if `serve` or `answer` is not a function. A result of theirs that cannot be
    awaited is a TypeError, too.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        serve: Callable[[Group], Awaitable[None]] | None = None,
        answer: Answer | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        **options: Unpack[RankOptions],
    ) -> None:
        # Not resolved yet, because a module that is imported for another reason needs no
        # environment.
        self._connect = partial(connect, address, min_size=min_size, max_size=max_size, **options)
        self._caller = whereabouts.of_caller()  # later, only a web framework calls this object
        self._serve = None if serve is None else _checked("serve", serve)
        self._asking = None if answer is None else Asking(_checked("answer", answer))
        self._keeper: Keeper | None = None  # None: the worker has not started
        self._next: asyncio.Future[None]  # done when the next epoch begins
        self._has_begun = False  # this worker has had a group
        self._stopping = False
        self._app: Any = None  # its `state` gets the group

    # -- what requests use ------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group of the present epoch, or of the last one until the next begins."""
        group = self._started().group
        if self._next.done():
            self._next.result()  # raises why this worker has no group any more
        if group is None:
            raise RuntimeError("this worker is joining its group anew: use lifespan.call")
        return group

    async def call(
        self,
        function: Callable[Concatenate[Group, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Await ``function(group, *args)``, and do so again in the next epoch if an epoch ends
        meanwhile.

        All other errors are raised, `CollectiveAbortedError` too. So are errors of other groups,
        also of groups made of this one, if the epoch does not end within a second. If the worker
        fails to get a next epoch, this raises the reason, for example CollectiveTimeoutError after
        `timeout`, so that the request can answer.
        """
        keeper = self._started()
        if self._next.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(
                "call and ask belong to the event loop of the worker: in other threads, use "
                "asyncio.run_coroutine_threadsafe"
            )
        while True:
            while keeper.over.is_set() or keeper.group is None:
                await asyncio.shield(self._next)
            group, over = keeper.group, keeper.over
            try:
                return await function(group, *args, **kwargs)
            except Exception as error:
                # If this worker itself has closed the group, the next turn of the loop raises the
                # reason.
                if _are(GroupClosedError, error) and over.is_set():
                    continue
                if _are(CollectiveAbortedError, error) and not over.is_set():
                    raise  # one rank has given up one operation, and the group goes on
                if not await keeper.ends(group, error):
                    raise
                group.revoke()

    async def ask(self, question: Any, *, timeout: float | None = None) -> list[Any]:
        """Ask all workers, including this one. Returns their answers, by rank (scatter-gather).

        Question and answers are values as messages have them. Each worker answers with the function
        `answer` that it was given. If a worker is lost or joins meanwhile, all are asked again, so
        an answer must be safe to repeat. You can ask many questions at once. Do not receive with
        `ANY_TAG` in `serve`, because that would take the questions.

        Raises RuntimeError with the text of the error if another worker's `answer` raised, the
        error itself if this worker's did, and what `call` raises. Raises TimeoutError after
        `timeout` seconds (None: the group's `op_timeout`, `math.inf`: never), and names the ranks
        that have not answered.

        For example::

            async def answer(question):
                return len(cache)

            lifespan = aiodist.lifespan(answer=answer)
            sizes = await lifespan.ask("how many?", timeout=2.0)  # in a request
        """
        if self._asking is None:
            raise RuntimeError("ask needs workers that answer: give lifespan(answer=…)")
        timeouts.check_timeout(timeout)
        seconds = self._started().op_timeout if timeout is None else timeout
        silent: list[int] = []
        limit = asyncio.timeout(None if seconds == math.inf else seconds)
        try:
            async with limit:
                return await self.call(self._asking.ask, question, silent)
        except TimeoutError:
            if not limit.expired():
                raise  # by this worker's `answer`, or because no next epoch has formed
            ranks = ", ".join(f"rank {rank}" for rank in silent) or "the group is being formed"
            raise TimeoutError(f"not all have answered within {seconds:g} s: {ranks}") from None

    def _started(self) -> Keeper:
        if self._keeper is None:
            raise RuntimeError("the worker has not started: is this the application's lifespan?")
        return self._keeper

    # -- what frameworks call ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def __call__(self, app: Any) -> AsyncIterator[None]:
        """The lifespan of a Starlette or FastAPI application."""
        self._app = app
        app.state.lifespan = self
        async with self._life():
            yield

    async def cleanup_ctx(self, app: object) -> AsyncIterator[None]:
        """The cleanup context of an aiohttp application."""
        async with self._life():
            yield

    # -- the life of a worker ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        """Join at the beginning, and leave in order at the end."""
        if self._keeper is not None:
            raise RuntimeError("this lifespan is that of a worker that runs: make another one")
        keeper = Keeper(self._connect().called_at(self._caller), eager=True)
        self._keeper, self._has_begun, self._stopping = keeper, False, False
        joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next = joined
        epochs = asyncio.create_task(self._epochs(keeper), name="aiodist lifespan")
        pid = os.getpid()
        try:
            await asyncio.shield(joined)
            yield
        finally:
            if os.getpid() == pid:  # a forked child has nothing to leave
                self._stopping = True
                epochs.cancel()
                await asyncio.wait({epochs})
                self._keeper = None
                self._fail(RuntimeError("the worker has ended"))
                if not epochs.cancelled():
                    epochs.result()

    async def _epochs(self, keeper: Keeper) -> None:
        try:
            while (group := await self._formed(keeper)) is not None:
                async with group:
                    await self._epoch(keeper, group)
            if not self._stopping:
                raise GroupClosedError("this worker's program has closed its group")
        except Exception as error:
            if self._has_begun:
                log.exception(
                    "this worker has no group any more: what its requests ask of it fails"
                )
            self._fail(error)
            raise
        finally:
            await keeper.end()

    def _fail(self, error: Exception) -> None:
        """Give `error` to every `call` that waits for the next epoch.

        If there will be no next epoch, `_next` keeps the error for later calls.
        """
        if not self._next.done():
            self._next.set_exception(error)
            self._next.exception()  # marks it as retrieved, because there may be no waiter

    async def _formed(self, keeper: Keeper) -> Group | None:
        """Return the group of the next epoch, or None once the worker ends."""
        while not self._stopping:
            try:
                group = await keeper.next()
            except AiodistError as error:
                if not self._has_begun:
                    raise
                log.warning("the workers have no group, and try again to form one: %s", error)
                self._fail(error)
                self._next = asyncio.get_running_loop().create_future()
                await asyncio.sleep(_PAUSE)
                continue
            if group is not None:
                self._begin(group)
            return group
        return None

    def _begin(self, group: Group) -> None:
        if self._app is not None:
            self._app.state.group = group
        self._has_begun = True
        self._next.set_result(None)
        self._next = asyncio.get_running_loop().create_future()

    async def _epoch(self, keeper: Keeper, group: Group) -> None:
        """Serve until the worker ends, or until the epoch is over, which raises the reason."""
        over = asyncio.create_task(keeper.over.wait())
        serving = asyncio.create_task(self._served(keeper, group))
        try:
            await asyncio.wait({over, serving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            # This worker's requests have ended. Those of others are repeated in the next epoch,
            # because this worker joins in no more of them. It must not wait for what it joined in
            # so far: that may need another worker that ends, too.
            group.revoke()
        finally:
            over.cancel()
            serving.cancel()
            await asyncio.wait({over, serving})
        try:
            serving.result()
        except asyncio.CancelledError as error:
            if not (self._stopping or keeper.over.is_set()):
                raise RuntimeError(
                    "serve ended by CancelledError, but neither its epoch nor its worker has "
                    "ended: was something cancelled that it awaits?"
                ) from error
        if not self._stopping:
            group._context.check_open()

    async def _served(self, keeper: Keeper, group: Group) -> None:
        jobs = [job for job in (self._serve, self._asking and self._asking.serve) if job]
        tasks = [asyncio.ensure_future(job(group)) for job in jobs]
        try:
            await asyncio.gather(*tasks)
            await keeper.over.wait()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


def _checked(name: str, function: Callable[[Q], Awaitable[T]]) -> Callable[[Q], Awaitable[T]]:
    """Return `function`, the argument `name`, with a check that its results can be awaited."""
    if not callable(function):
        raise TypeError(f"{name} must be an async function, not {function!r:.200}")

    def call(argument: Q) -> Awaitable[T]:
        result = function(argument)
        if not inspect.isawaitable(result):
            raise TypeError(f"{name} must be an async function; it returned {result!r:.200}")
        return result

    return call


def _are(kind: type[Exception], error: Exception) -> bool:
    """Return whether `error`, or each leaf of it if it is an exception group, is of this kind."""
    return all(isinstance(leaf, kind) for leaf in leaves(error))


lifespan = Lifespan
"""The name to call it by: ``aiodist.lifespan(…)``."""
