"""The differences between versions that a participant has, and how a publisher makes them.

Each publish draws a random id, and a difference names the ids of its base and of its result. A
version is not known by its number, because a publisher that was restarted may use a number for
other bytes. Differences form a chain::

    id a ──difference──> id b ──difference──> id c      a subscriber that has `a` takes both

A difference can be used while it is still coming, part by part, because encoding and lines take
time. Participants forward differences as they came.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.channels.differences import Coded, decode, encode, width_of
from aiodist.channels.directory import MOST_RELEASES, Release
from aiodist.channels.holding import Holding, in_thread
from aiodist.channels.manifest import Leaf

log = logging.getLogger("aiodist.channels")

SHARE = 1 / 4
"""The most bytes of differences that a participant keeps, as a share of a version."""

SAMPLES = 4
"""The number of chunks that are encoded first, to see whether the difference is small enough."""

BATCH = 8 << 20
"""Bytes of a version that are encoded at once, because each wait for a thread takes time, too."""

LASTS = 60.0
"""Seconds that a publisher goes on encoding after a subscriber has asked for a difference."""

PIECE = 1 << 20
"""Bytes of two versions that are compared at once."""

SMALL = 1 << 20
"""Versions with fewer bytes are sent whole, because they are in flight at once."""

PAYS = 500e6
"""Bytes per second. A faster line brings a whole version before both ends have encoded and decoded
a difference, each on one core."""


def pays(rate: float, nbytes: int) -> bool:
    """Whether a difference is here before all of a version of `nbytes`. `rate`: bytes per second of
    the last one that came whole; 0: unknown."""
    return nbytes >= SMALL and rate <= PAYS


class Difference:
    """The changes from the version `base` to the version `result`, which are ids.

    `codes`: of the chunks from the first one on, out of `parts`.
    """

    def __init__(self, base: bytes, result: bytes, parts: int) -> None:
        self.base = base
        self.result = result
        self.parts = parts
        self.codes: list[bytes] = []
        self.nbytes = 0
        self.is_over = False
        """No more of it will come."""

    @property
    def is_whole(self) -> bool:
        return len(self.codes) == self.parts

    def add(self, code: bytes) -> None:
        self.codes.append(code)
        self.nbytes += len(code)
        self.is_over = self.is_whole


class Differences:
    """The differences that a participant has, the oldest first."""

    def __init__(self) -> None:
        self._known: dict[bytes, Difference] = {}  # by their results
        self.asked = -math.inf
        """When a subscriber last asked for a difference."""
        self.saved = 0
        """Bytes that did not have to come here, because differences came instead."""
        self.changed = 0.0
        """The share of the last version that had changed, for a publisher."""
        self.chain = 0
        """The number of differences that brought the last version here; 0: it came whole."""
        self.fallbacks = 0
        """Chunks that came whole, because a difference did not bring them."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._known.values())

    def add(self, one: Difference, most: float) -> None:
        """Add a difference, and forget old ones: see `trim`."""
        self._known.pop(one.result, None)
        self._known[one.result] = one
        self.trim(most)

    def trim(self, most: float) -> None:
        """Forget old differences above `most` bytes, or above `MOST_RELEASES`, because no chain is
        longer. Forget incomplete ones that are over, too."""
        useful = [one for one in self._known.values() if one.is_whole or not one.is_over]
        kept: list[Difference] = []
        nbytes = 0
        for one in useful[: -MOST_RELEASES - 1 : -1]:
            nbytes += one.nbytes
            if nbytes > most:
                break
            kept.append(one)
        self._known = {one.result: one for one in reversed(kept)}

    def between(self, base: bytes, result: bytes, most: int) -> list[Difference]:
        """The chain of differences from one version to another, oldest first.

        Empty if there is none, or if it has `most` bytes or more, or over `MOST_RELEASES`
        differences, because receivers refuse more.
        """
        found: list[Difference] = []
        at = result
        while at != base and len(found) < MOST_RELEASES and (one := self._known.get(at)):
            found.append(one)
            at = one.base
        return found[::-1] if at == base and sum(one.nbytes for one in found) < most else []


class Encoding:
    """Encodes published versions, in threads, after `publish` has returned.

    `is_wanted` says whether to encode a version. The base is the newest version that was encoded,
    or that did not have to be. If publishing is faster than encoding, the versions between have no
    differences.
    """

    def __init__(self, known: Differences, is_wanted: Callable[[], bool]) -> None:
        self._known = known
        self._is_wanted = is_wanted
        self._base: Holding | None = None
        self._next: Holding | None = None
        self._task: asyncio.Task[None] | None = None

    def published(self, holding: Holding) -> None:
        """Encode a version, and keep it as long as it is the base or may become it."""
        holding.__enter__()
        if self._next is not None:
            self._next.__exit__()
        self._next = holding
        if self._task is not None:
            _begin(holding)  # it is sent whole until then
        else:
            self._task = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for holding in (self._base, self._next):
            if holding is not None:
                holding.__exit__()
        self._base = self._next = None

    async def _work(self) -> None:
        try:
            while (newest := self._next) is not None:
                self._next = None
                base, self._base = self._base, newest
                try:
                    if base and self._is_wanted() and are_alike(base, newest):
                        await self._encode(base, newest)
                finally:
                    _begin(newest)
                    if base is not None:
                        base.__exit__()
        except Exception:  # such as no memory: then versions are sent whole
            log.exception("a version could not be encoded")
        finally:
            self._task = None

    async def _encode(self, base: Holding, newest: Holding) -> None:
        release, most = newest.release, SHARE * newest.release.nbytes
        one = Difference(base.release.id, release.id, release.parts - 1)
        coder = _Coder(base, newest)
        if await in_thread(coder.sampled) > SHARE:
            return  # the difference would be too large
        self._known.add(one, most)
        _begin(newest)
        changed, each = 0, max(1, BATCH // release.chunk)
        try:
            while not one.is_whole:
                first = 1 + len(one.codes)
                numbers = range(first, min(first + each, release.parts))
                found = await in_thread(partial(coder.coded, numbers))
                if one.nbytes + sum(len(code) for code, _ in found) > most:
                    break
                for code, differs in found:
                    changed += differs
                    one.add(code)
                newest.tell()
        finally:
            one.is_over = True
            newest.tell()
            self._known.trim(most)
        if one.is_whole:
            self._known.changed = changed / max(1, release.nbytes - release.data)


class _Coder:
    """Encodes chunks of a version, in a thread."""

    def __init__(self, base: Holding, newest: Holding) -> None:
        self._base = base
        self._newest = newest
        self._widths: list[int] = []
        self._samples: dict[int, Coded] = {}

    def sampled(self) -> float:
        """The size of the differences of some chunks, as a share of these chunks."""
        self._widths = widths_of(self._newest)
        parts = self._newest.release.parts
        whole = 0
        for number in range(1, parts, max(1, -(-(parts - 1) // SAMPLES))):
            self._samples[number] = self._one(number)
            whole += len(self._newest.part(number))
        return sum(len(one.code) for one in self._samples.values()) / max(1, whole)

    def coded(self, numbers: Iterable[int]) -> list[Coded]:
        samples = self._samples
        return [samples.pop(one) if one in samples else self._one(one) for one in numbers]

    def _one(self, number: int) -> Coded:
        base, newest = _part(self._base, number), _part(self._newest, number)
        return encode(base, newest, self._widths[number - 1])


def _begin(holding: Holding) -> None:
    """Note that it is known whether a version has differences."""
    holding.is_begun = True
    holding.tell()


def are_alike(base: Holding, newest: Holding) -> bool:
    """Whether two versions have the same tree, dtypes, shapes and layout."""
    old, new = base.manifest, newest.manifest
    return (old.meta, old.extents) == (new.meta, new.extents) and lie_alike(
        base.release, newest.release
    )


def changed(base: Holding, newest: Holding, leaves: Sequence[Leaf]) -> list[bool]:
    """For each of these arrays, whether it has other bytes in the newer version.

    All have, if the versions are not alike. May run in a thread.
    """
    if not are_alike(base, newest):
        return [True] * len(leaves)
    return [_is_changed(base, newest, leaf) for leaf in leaves]


def _is_changed(base: Holding, newest: Holding, leaf: Leaf) -> bool:
    start = newest.release.data + leaf.start
    stop = start + leaf.spec.nbytes
    for at in range(start, stop, PIECE):  # most arrays that have changed differ in the first piece
        old, new = (
            np.frombuffer(one.bytes_from(at, min(at + PIECE, stop)), np.uint8)
            for one in (base, newest)
        )
        if not np.array_equal(old, new):
            return True
    return False


def lie_alike(old: Release, new: Release) -> bool:
    """Whether the chunks of two versions have the same places."""
    return (old.data, old.nbytes, old.chunk) == (new.data, new.nbytes, new.chunk)


def widths_of(holding: Holding) -> list[int]:
    """For each chunk, the element size of the array in its middle. Elements of other sizes cost
    more bytes."""
    leaves = [leaf for leaf in holding.leaves() if leaf.spec.nbytes]
    starts = [leaf.start for leaf in leaves]
    release = holding.release
    found = []
    for number in range(1, release.parts):
        start, stop = release.span(number)
        middle = (start + stop) // 2 - release.data
        dtype = carrier(leaves[bisect.bisect_right(starts, middle) - 1].spec.name)
        found.append(width_of(dtype))
    return found


def apply(base: Holding, holding: Holding, number: int, codes: Sequence[bytes]) -> None:
    """Make a chunk of a version from that of another one, by the codes of successive differences.

    May run in a thread. Raises ProtocolError if the result is not what was published.
    """
    old, new = _part(base, number), _part(holding, number)
    for code in codes:
        decode(code, old, new)
        old = new
    holding.check(number)


def _part(holding: Holding, number: int) -> Flat:
    found: Flat = np.frombuffer(holding.part(number), np.uint8)
    return found
