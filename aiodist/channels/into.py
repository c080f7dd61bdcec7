"""Delivers a version to the user: as a tree, or into arrays of the user."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from aiodist.buffers import arrays
from aiodist.buffers.arrays import UserArray
from aiodist.buffers.conversion import FLOATS, convert
from aiodist.channels import manifest
from aiodist.channels.changes import BATCH
from aiodist.channels.holding import Holding, in_thread
from aiodist.channels.lots import Lot
from aiodist.channels.manifest import Leaf
from aiodist.channels.slices import Arrays, Want
from aiodist.channels.trees import has_parts, parts_wanted
from aiodist.errors import MessageTooLargeError

Fit = Callable[[Holding | Lot, Sequence[Leaf]], None]
"""Looks whether a version, which has these arrays, fits where it is to go."""


class VersionReading:
    """What a user wants of a version: its tree, or writing to `into`, whole or in parts.

    `is_sliced`: only these parts are to come here. `max_bytes`: no more may come.
    """

    def __init__(
        self, into: Any = None, *, converts: bool = False, max_bytes: int | None = None
    ) -> None:
        """Raises TypeError and ValueError, naming the place in `into`, for parts that cannot be
        written."""
        self._into = into
        self._converts = converts
        self._max_bytes = max_bytes
        self.is_sliced = into is not None and (converts or has_parts(into))
        self._parts = IntoParts(into, converts=converts) if self.is_sliced else None
        self.begun = asyncio.Event()
        self.coming: Holding | Lot | None = None
        self.mixed: int | None = None
        """The version of which only some arrays were written."""

    def check_size(self, version: int, nbytes: int) -> None:
        """Before so many bytes of a version come. Raises MessageTooLargeError."""
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise MessageTooLargeError(
                f"version {version} takes {nbytes:,} bytes here, and max_bytes is"
                f" {self._max_bytes:,}: raise that, or publish less"
            )

    def begin(self, coming: Holding | Lot) -> None:
        before, self.coming = self.coming, coming
        self.begun.set()
        if before is not None and before is not coming:
            before.tell()  # no more of it comes

    def wanted(self, there: Arrays) -> Want:
        """The wanted slices of the arrays of a version.

        Raises TypeError and ValueError, naming the place in `into`, if they do not fit.
        """
        if self._into is None:
            return there.all()
        return self._wanted({key: there.leaf(key) for key in there.leaves})

    def _wanted(self, leaves: Mapping[str, Leaf]) -> Want:
        if self._parts is None:
            self._parts = IntoParts(self._into, converts=self._converts)
        return self._parts.wanted(leaves)

    def read(self, found: Holding | Lot) -> Any:
        """The user's result of a version that is here: its tree, or None if `into` was written.

        May run in a thread. Raises TypeError and ValueError, naming the place in `into`, if it does
        not fit.
        """
        if isinstance(found, Lot):
            if self._parts is None:
                return found.tree()
            for leaf in found.leaves():
                self._parts.write(found, leaf)
            return None
        data = found.release.data
        if self._into is None:
            return manifest.value_in(found.view, found.manifest, data)
        manifest.Into(found.manifest, self._into).write(found.view, data)
        return None

    async def arrays(
        self, fetch: asyncio.Future[Holding | Lot], fit: Fit | None = None
    ) -> AsyncGenerator[tuple[Holding | Lot, Sequence[Leaf]], None]:
        """The arrays of the version that `fetch` takes, when they are here, and what they lie in.

        They come in batches, because each wait for a thread takes time. `fit` runs in a thread.

        With `fit`, that is called as soon as the arrays are known, and if another version comes
        instead, all of its arrays come. Without it, `fetch` takes one version only. If that begins
        anew in other memory, only those arrays come from there that have not come yet.

        Raises what `fetch` and `fit` do.
        """
        coming: Holding | Lot | None = None
        leaves: list[Leaf] | None = None  # None: the arrays are not known yet
        given = 0
        with ExitStack() as reading:
            while True:
                is_here = fetch.done()
                newest = fetch.result() if is_here else self.coming
                if newest is not coming:
                    coming, leaves = newest, None
                    reading.close()
                    if coming is not None:
                        reading.enter_context(coming)
                if coming is not None and coming.has_leaves:
                    if leaves is None:
                        leaves = await in_thread(coming.leaves)
                        if fit is not None:
                            await in_thread(partial(fit, coming, leaves))
                            given = 0
                        else:
                            _check_names(leaves)
                    first, nbytes = given, 0
                    while given < len(leaves) and nbytes < BATCH and coming.has_leaf(leaves[given]):
                        nbytes += leaves[given].spec.nbytes
                        given += 1
                    if given > first:
                        yield coming, leaves[first:given]
                        continue
                if is_here:
                    assert leaves is not None, "a version was forgotten before it was read"
                    assert given == len(leaves), "an array of a version is missing"
                    return
                if newest is self.coming and not fetch.done():
                    await self._more(coming, fetch)

    async def in_place(self, fetch: asyncio.Future[Holding | Lot]) -> None:
        """Write what `fetch` brings to `into`, each array as soon as it is here.

        Raises what `fetch` does, and TypeError and ValueError, naming the place in `into`, if it
        does not fit.
        """
        async with aclosing(self.arrays(fetch, self._fit)) as arrays:
            async for coming, leaves in arrays:
                self.mixed = coming.version
                await in_thread(partial(self._write, coming, leaves))
        self.mixed = None

    def _fit(self, coming: Holding | Lot, leaves: Sequence[Leaf]) -> None:
        if isinstance(coming, Holding):
            manifest.Into(coming.manifest, self._into)  # raises if it does not fit
            self._wanted({leaf.key: leaf for leaf in leaves})

    def _write(self, coming: Holding | Lot, leaves: Sequence[Leaf]) -> None:
        assert self._parts is not None
        for leaf in leaves:
            self._parts.write(coming, leaf)

    async def _more(self, coming: Holding | Lot | None, fetch: asyncio.Future[Any]) -> None:
        """Wait until there is more of it, or another version is begun."""
        event = self.begun.wait() if coming is None else coming.news()
        waiting = asyncio.ensure_future(event)
        try:
            await asyncio.wait({waiting, fetch}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # only this, because a closed loop takes no calls
            waiting.cancel()
            raise
        waiting.cancel()


def _check_names(leaves: Sequence[Leaf]) -> None:
    """Raise ValueError if two arrays have the same name, because users could not tell them
    apart."""
    for name, count in Counter(leaf.name for leaf in leaves).most_common(1):
        if count > 1:
            raise ValueError(
                f"{count} arrays of this version have the name {name!r}: publish them by keys that"
                " differ when they are joined by dots, or take the version by `latest`"
            )


class IntoParts:
    """Where the wanted slices go. `converts`: convert floats to the dtypes of these arrays."""

    def __init__(self, into: Any, *, converts: bool) -> None:
        """Raises TypeError and ValueError, naming the place in `into`, for arrays that cannot be
        written."""
        self._converts = converts
        self._parts, self._others = parts_wanted(into)
        self._targets: dict[str, UserArray] = {
            key: arrays.writable(part.array, f"into{key}") for key, part in self._parts.items()
        }

    def wanted(self, leaves: Mapping[str, Leaf]) -> Want:
        """The wanted slices of the arrays of a version, which are given by their keys.

        Raises TypeError and ValueError, naming the place in `into`, if they do not fit.
        """
        places = sorted(leaves)
        for key, other in self._others.items():
            at = bisect_left(places, key)  # the first array there, or in a tree there
            if at < len(places) and places[at].startswith(key):
                raise TypeError(
                    f"into{key}: is {type(other).__name__}, the version has arrays there"
                )
        if leaves and not self._parts:
            raise ValueError(
                "into: has no array, and the version has some: give arrays to write to"
            )
        for key, part in self._parts.items():
            if key not in leaves:
                raise ValueError(f"into{key}: the version has no array there")
            leaf = leaves[key]
            name, target = leaf.spec.name, self._targets[key].name
            if part.shape != leaf.extent.shape:
                raise ValueError(
                    f"into{key}: is of an array of shape {part.shape}, the published one has"
                    f" {leaf.extent.shape}"
                )
            if target != name and not (self._converts and {target, name} <= FLOATS):
                hint = "" if self._converts else ": convert=True makes floats of other floats"
                raise TypeError(f"into{key}: is {target}, the published array is {name}{hint}")
        return {key: part.box for key, part in self._parts.items()}

    def write(self, found: Holding | Lot, leaf: Leaf) -> None:
        """Write one array that is here. May run in a thread."""
        target = self._targets[leaf.key]
        convert(found.lying(leaf), leaf.spec.name, target)
        target.commit(None)
