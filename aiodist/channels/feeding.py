"""Keeps a transfer of a version going for a moment after the call that wanted it was cancelled.

It goes on until the current part is here. So calls that are cancelled again and again, or have a
short timeout, make progress by at least one part each, and no byte is sent twice for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiodist.channels.holding import ComingVersion
from aiodist.channels.participant import Participant
from aiodist.channels.search import NobodyError
from aiodist.channels.store import AWAY


class Feeding:
    """The versions that are being received, and the tasks that do it."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._tasks: dict[ComingVersion, asyncio.Task[None]] = {}

    async def whole(
        self, coming: ComingVersion, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait until all of `coming` is here.

        `work` receives it, and returns early if it is not `wanted` any more. Raises what `work`
        does, NobodyError if the coordinator is away, and the failure of this participant.
        """
        with coming.wanting():
            while not coming.is_whole:
                task = self._tasks.get(coming)
                if task is None:
                    task = self._begun(coming, work)
                await self._participant.tasks.outcome(task)

    def _begun(
        self, coming: ComingVersion, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        async def feed() -> None:
            # The memory stays until this task is done with it, even if another version was given
            # meanwhile.
            with coming, coming.feeding():
                try:
                    await work()
                except NobodyError:
                    coming.starve()
                    raise
                except AWAY as error:  # the coordinator may come back
                    coming.starve()
                    raise NobodyError from error

        task = self._tasks[coming] = asyncio.ensure_future(feed())
        self._participant.tasks.adopt(task)
        task.add_done_callback(lambda _: self._tasks.pop(coming))
        return task
