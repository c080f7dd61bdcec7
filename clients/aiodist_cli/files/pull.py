"""`aiodist weights pull`: keeps a folder at the newest version of a channel."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import numpy as np

import aiodist
from aiodist.channels.subscriber import Subscriber
from aiodist.errors import CollectiveTimeoutError, MessageTooLargeError
from aiodist.launching import spawn
from aiodist_cli.files.folder import Folder, FolderError, Held
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.progress import arriving, in_thread, say, size, warn
from aiodist_cli.files.tree import ID, version_in

TRIES = 3
"""So often a command that fails is run in all, without ``--follow``."""

LONGEST_PAUSE = 60.0
"""Most seconds before what has failed is tried again."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a command whose pull ends."""

_LINGER = 0.05
"""Seconds between two checks of processes that end."""


class FailedError(Exception):
    """The command of the operator has failed."""


def pause_after(failures: int) -> float:
    """Seconds before what has failed so often is tried again."""
    return min(2.0 ** (failures - 1), LONGEST_PAUSE)


class Pulling:
    """Takes versions from a channel to a folder, and runs `command` for each of them."""

    def __init__(
        self, weights: Subscriber, folder: Folder, *, all_files: bool, command: str | None
    ) -> None:
        self._weights = weights
        self._folder = folder
        self._all_files = all_files
        self._command = command
        self._held: Held | None = None

    async def begin(self) -> None:
        """Find out what is in the folder from before."""
        self._held = await in_thread(f"checking {self._folder.path}", None, self._folder.held)

    async def once(self) -> None:
        """Take one version. Raises RefusedError, FolderError, OSError; FailedError if the command
        fails `TRIES` times; and what `Subscriber.latest` does."""
        number = await self._first()
        if number is None:
            number, tree = await self._latest(-1)
            await self._put(number, tree)
            del tree
        for failures in range(1, TRIES):
            try:
                await self._run(number)
                return
            except FailedError as error:
                pause = pause_after(failures)
                self._warn(f"version {number}: {error}; trying again in {pause:g} s")
                await asyncio.sleep(pause)
        await self._run(number)

    async def follow(self) -> None:
        """Take each newest version, until this is cancelled.

        If a version cannot be written, or the command fails, a line on stderr says so. Both are
        tried again after growing pauses, until there is a newer version. Raises what
        `Subscriber.latest` does.
        """
        number, failures, tree = await self._first(), 0, None
        if number is None:
            number, tree = await self._small_enough(-1)
        while True:
            pause: float | None = None
            try:
                if tree is not None:
                    await self._put(number, tree)
                await self._run(number)
                failures = 0
            except RefusedError as error:  # the next try would end in the same way
                self._warn(f"version {number}: {error}; waiting for a newer version")
            except (FolderError, FailedError, OSError) as error:
                failures += 1
                pause = pause_after(failures)
                self._warn(f"version {number}: {error}; trying again in {pause:g} s")
            tree = None  # it keeps its memory otherwise
            newer_than = number
            try:
                await self._weights.wait(newer_than=number, timeout=pause)
            except CollectiveTimeoutError:
                newer_than = number - 1
            number, tree = await self._small_enough(newer_than)

    async def _first(self) -> int | None:
        """The number of the newest version, if the folder has its content already. So a restart
        fetches 16 bytes only. None: take it."""
        if self._held is None:
            return None
        found = np.zeros(ID, np.uint8)
        into = {"id": aiodist.Shard(found, (slice(0, ID),), (ID,))}
        try:
            number = await self._weights.latest(into=into)
        except (TypeError, ValueError):  # this version is not one of files
            return None
        if found.tobytes().hex() != self._held.id:
            return None
        await self._has(number)
        return number

    async def _small_enough(self, newer_than: int) -> tuple[int, Any]:
        """The newest version that is not above `--max-bytes`."""
        while True:
            try:
                return await self._latest(newer_than)
            except MessageTooLargeError as error:
                self._warn(f"{error}; waiting for a newer version")
                assert self._weights.newest is not None
                newer_than = await self._weights.wait(newer_than=self._weights.newest) - 1

    async def _latest(self, newer_than: int) -> tuple[int, Any]:
        async with arriving(self._weights):
            return await self._weights.latest(newer_than=newer_than)

    async def _put(self, number: int, tree: Any) -> None:
        """Have a version in the folder."""
        version = version_in(tree, all_files=self._all_files)
        if self._held is None or self._held.id != version.id:
            await in_thread(
                f"writing version {number}",
                version.size,
                lambda wrote: self._folder.take(version, number, wrote),
            )
            count = len(version.files)
            what = f"{count} file{'s'[: count != 1]}, {size(version.size)} in {self._folder.path}"
            say(f"version {number}: {what}")
            self._held = Held(number, version.id)
            await self._weights.acknowledge(number, version.id)
        elif self._held.number != number:
            await self._has(number)

    async def _has(self, number: int) -> None:
        """The folder has the content of that version, maybe under another number."""
        assert self._held is not None
        if self._held.number != number:
            self._folder.renumber(number)
        self._held = Held(number, self._held.id)
        say(f"version {number}: {self._folder.path} has these files already")
        await self._weights.acknowledge(number, self._held.id)

    async def _run(self, number: int) -> None:
        """Run the command. Raises FailedError."""
        if self._command is None:
            return
        given = {"AIODIST_VERSION": str(number), "AIODIST_DIR": str(self._folder.path)}
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | given,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _ended(process)
            raise
        if code:
            raise FailedError(f"--exec ended with {code}")

    def _warn(self, text: str) -> None:
        warn(f"aiodist weights pull: {text}")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a command and all that it has started."""
    spawn.signal_group(process.pid, signal.SIGTERM)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                while spawn.signal_group(process.pid, 0):  # noqa: ASYNC110
                    await asyncio.sleep(_LINGER)
    finally:
        spawn.signal_group(process.pid, signal.SIGKILL)
    await process.wait()
