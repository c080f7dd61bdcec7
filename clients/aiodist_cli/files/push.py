"""`aiodist weights push`: publishes files, or each checkpoint that a trainer writes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from aiodist.channels.publisher import Publisher
from aiodist_cli.files import checkpoints, names, reading
from aiodist_cli.files.checkpoints import SETTLED, IncompleteError, Listing, State, Watch
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.progress import in_thread, say, size, warn
from aiodist_cli.files.tree import Version, tree_of, version_of

EVERY = 0.5
"""Seconds between two looks at a folder that is watched."""


class Found(NamedTuple):
    """A checkpoint that was found: its folder, relative to what is pushed; its files as they were
    listed, and the version that they make."""

    folder: str
    files: Listing
    version: Version


class Pushing:
    """Publishes what is at `source`, a file or a folder. `first`: the number of the first version;
    None: the newest and one more."""

    def __init__(
        self, out: Publisher, source: Path, *, all_files: bool, first: int | None = None
    ) -> None:
        self._out = out
        self._source = source
        self._all_files = all_files
        self._next = first
        self._last = ""  # the id of what was published last
        self._said: set[str] = set()

    async def once(
        self, watch: Watch, clock: Callable[[], float], every: float = EVERY
    ) -> tuple[int, str]:
        """Publish the newest checkpoint once it has settled: its number, and its id. Raises
        RefusedError, IncompleteError, OSError, and what `Publisher.publish` does."""
        settling = clock() + SETTLED
        before: Set[tuple[str, State]] = set()
        while True:
            files = await asyncio.to_thread(reading.listing, self._source)
            moving = checkpoints.travelling(files, all_files=self._all_files)
            folder = checkpoints.candidates(moving)[0]
            now = clock()
            if folder in watch.look(now, moving) or not files:
                break
            seen = checkpoints.within(moving, folder).items()
            if now > settling and (changed := min(seen ^ before, default=None)):
                self._tell(
                    f"waiting until no file has changed for {SETTLED:g} s: {changed[0]} changes"
                )
                settling = math.inf
            before = seen
            await asyncio.sleep(every)
        found = await self._read(folder, checkpoints.within(files, folder))
        return await self._publish(found), found.version.id

    async def watch(self, watch: Watch, clock: Callable[[], float], every: float = EVERY) -> None:
        """Publish each new checkpoint, until this is cancelled. What cannot be published is told on
        stderr, and the next one is waited for. Raises what `Publisher.publish` does."""
        while True:
            await self._look(watch, clock())
            await asyncio.sleep(every)

    async def _look(self, watch: Watch, now: float) -> None:
        try:
            files = await asyncio.to_thread(reading.listing, self._source)
        except (OSError, RefusedError) as error:
            self._tell(f"{self._source}: {error}")
            return
        for folder in watch.look(now, checkpoints.travelling(files, all_files=self._all_files)):
            where = self._source / folder
            try:
                found = await self._read(folder, checkpoints.within(files, folder))
            except IncompleteError as error:
                # The trainer may be writing it. An older one is better than none.
                self._tell(f"{where} is not complete: {error}")
                continue
            except (RefusedError, OSError) as error:
                self._tell(f"{where} is not published: {error}")
                watch.done(folder)
                return
            watch.done(folder)
            if found.version.id != self._last:
                try:
                    await self._publish(found)
                except IncompleteError as error:  # the next listings differ from this one
                    self._tell(str(error))
            return

    async def _read(self, folder: str, files: Listing) -> Found:
        root = self._source / folder if self._source.is_dir() else self._source.parent
        chosen, left_out = checkpoints.chosen(files, all_files=self._all_files)
        if left_out:
            self._tell(f"left out, because they can run code: {', '.join(left_out)}; --all-files")
        sources = await asyncio.to_thread(reading.sources, root, files, chosen)
        total = sum(one.size for one in sources)
        checks = await in_thread(
            f"reading {root.name}", total, lambda read: reading.checked(sources, read)
        )
        found = Found(folder, files, version_of(sources, checks))
        self._check_unchanged(found)
        return found

    def _check_unchanged(self, found: Found) -> None:
        """Raises IncompleteError if the files were changed since they were listed."""
        now = checkpoints.within(reading.listing(self._source), found.folder)
        for file in found.version.files:
            if now.get(file.name) != found.files[file.name]:
                raise IncompleteError(f"{file.name} changed while it was read")

    async def _publish(self, found: Found) -> int:
        newest = self._out.newest
        number = self._next if self._next is not None else 0 if newest is None else newest + 1
        await self._out.publish(tree_of(found.version), version=number)
        self._next = None
        self._last = found.version.id
        try:
            self._check_unchanged(found)
        except (IncompleteError, OSError) as error:
            # Receivers find that the checksums of the files are wrong.
            self._last = ""
            raise IncompleteError(
                f"version {number} is damaged, and no host takes it: {error}"
            ) from error
        count = len(found.version.files)
        say(
            f"version {number}: {self._source / found.folder}, {count} file{'s'[: count != 1]},"
            f" {size(found.version.size)}"
        )
        return number

    def _tell(self, text: str) -> None:
        """Once, for it is found again with each look."""
        if text not in self._said:
            self._said.add(text)
            warn(f"aiodist weights push: {text}")


async def serve(out: Publisher, number: int, content: str, wanted: float) -> None:
    """Serve a version until so many hosts have it in a folder, or (`math.inf`) until this is
    cancelled. Raises CoordinatorLostError, GroupClosedError."""
    of = "" if wanted == math.inf else f" of {wanted}"
    async for count in out.acknowledged(number, content):
        say(f"version {number}: on {count}{of} hosts")
        if count >= wanted:
            break


def check_source(source: Path, *, all_files: bool, watch: bool) -> None:
    """Raises RefusedError for a source that is never published."""
    if not watch and not source.exists():
        raise RefusedError(f"there is no {source}")
    if not source.is_dir() and not all_files:
        names.check_harmless([source.name])
