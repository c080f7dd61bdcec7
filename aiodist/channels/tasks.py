"""The tasks of a participant, which end with it, its failure, and jobs beside a loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from aiodist.composing import check_home, failure_of
from aiodist.errors import AiodistError, GroupClosedError

T = TypeVar("T")


class ChannelTasks:
    """The tasks of a participant of `channel`.

    `changed` is set by the next `tell`: take it, look, and wait for it. It is not cleared, because
    others wait for it, too.
    """

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None  # None: it has not begun
        self._failure: AiodistError | None = None
        # A dictionary, because its order is that in which tasks were added. A set has another order
        # in each process, and simulated programs would not repeat exactly.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.changed = asyncio.Event()

    def begin(self) -> None:
        """Note that the participant takes part from now on."""
        self._home = os.getpid(), asyncio.get_running_loop()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ends with this participant. If it fails, so does the participant."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, name=f"aiodist channel {self._channel}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task when this participant ends. The caller looks at its result: see
        `outcome`."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.pop(task, None)
            if not task.cancelled():
                task.exception()

        self._tasks[task] = None
        task.add_done_callback(ended)

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Wait for an adopted task, and return its result. The task goes on if this is
        cancelled."""
        await asyncio.wait({task})
        if task.cancelled():
            self.check()
        return task.result()

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event. Raises the error of this participant, if it fails before."""
        while not event.is_set():
            self.check()
            waits = [asyncio.ensure_future(one.wait()) for one in (event, self.changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()

    def check(self) -> None:
        """Raise the error of this participant, if it has failed. Raises GroupClosedError in a
        forked child, and RuntimeError in another event loop or thread, and if it has not begun."""
        if self._home is None:
            raise RuntimeError(f"enter the channel {self._channel!r} by `async with` first")
        if self._failure is not None:
            raise self._failure
        check_home(f"the channel {self._channel!r}", *self._home)

    def fail(self, error: AiodistError) -> None:
        """Let the participant fail, unless it has failed before."""
        if self._failure is None:
            self._failure = error
        self.tell()

    def tell(self) -> None:
        """Wake up those that wait, because this participant has failed or knows more."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        """End all tasks, and let further ones fail."""
        self.fail(GroupClosedError(f"the channel {self._channel!r} was closed here"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = failure_of(task, f"the channel {self._channel!r}")
        if error is not None:
            self.fail(error)


class OneBeside:
    """One job at a time, beside the loop of its caller: ``async with OneBeside() as beside: await
    beside.begin(job())``.

    For example, a parcel is checked while the next one comes. The context waits for the last job,
    and raises its error, unless the caller has failed before.
    """

    def __init__(self) -> None:
        self._job: asyncio.Task[None] | None = None

    async def begin(self, job: Coroutine[Any, Any, None]) -> None:
        """Begin a job, after the one before has ended. Raises the error of that one."""
        try:
            await self._end()
        except BaseException:
            job.close()
            raise
        self._job = asyncio.ensure_future(job)

    async def _end(self) -> None:
        if self._job is not None:
            await self._job

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self._end()
        finally:
            # A job goes on after it was cancelled as long as its thread uses memory.
            if self._job is not None:
                await asyncio.gather(self._job, return_exceptions=True)
