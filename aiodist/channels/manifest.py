"""A version of weights as one piece of memory: a manifest, and the arrays behind it.

The manifest is the metadata of the tree (`aiodist.buffers.encoding`) and the CRC-32 of each chunk.
The checks detect broken memory or wires, not an enemy, because any publisher may publish anything.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.encoding import Encoded
from aiodist.buffers.foreign import Target
from aiodist.buffers.mapped import Mapped
from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import parse
from aiodist.channels.checks import crc32
from aiodist.channels.directory import Release, aligned
from aiodist.channels.trees import Extent, whole
from aiodist.errors import ProtocolError
from aiodist.transports.polling import cores

CHUNK = 4 << 20
"""The most bytes of a chunk, which is checked, forwarded and asked for again as a whole."""

SMALLEST = 1 << 18
"""Bytes of a chunk of small versions, which have fewer than `CHUNKS` chunks."""

CACHED = 256 * 1024
"""Bytes that are copied before they are checked, so that both copies stay in the cache of a
core."""

THREADS = 4
"""The most threads that copy and check the chunks of a version, because more would only wait for
the memory. One core is left to the event loop, which was up to 2 ms later without it."""

CHUNKS = 32
"""The least number of chunks, so that a host receives one chunk while the one before it receives
the next."""


def chunk_of(nbytes: int) -> int:
    """Bytes of a chunk, for a version with `nbytes` of arrays."""
    return min(CHUNK, max(SMALLEST, aligned(nbytes // CHUNKS)))


class Manifest:
    """The contents of a version.

    `meta`: of its tree. `checks`: of its chunks. `extents`: of the arrays that are parts of others,
    by their place in the tree.
    """

    def __init__(
        self, meta: bytes, checks: Sequence[int], extents: Mapping[str, Extent] | None = None
    ) -> None:
        self.meta = meta
        self.checks = checks
        self.extents = extents or {}

    def pack(self) -> bytes:
        checks = struct.pack(f"<{len(self.checks)}I", *self.checks)
        packed: bytes = msgpack.packb((self.meta, checks, self.extents))
        return packed

    @classmethod
    def read(cls, memory: memoryview, release: Release) -> Manifest:
        """Read the manifest at the front of the memory of `release`. Raises ProtocolError."""
        packed = bytes(memory[: release.manifest])
        if crc32(packed) != release.check:
            raise ProtocolError(f"the manifest of version {release.version} came damaged")
        try:
            meta, checks, extents = msgpack.unpackb(packed)
            manifest = cls(
                meta,
                struct.unpack(f"<{release.parts - 1}I", checks),
                {key: _extent(*extent) for key, extent in extents.items()},
            )
            starts = _starts([spec.nbytes for spec in parse(meta).specs])
            for leaf in leaves(manifest):
                leaf.check()
        except Exception as error:  # msgpack raises half a dozen unrelated types
            raise ProtocolError(f"no manifest of version {release.version}: {error}") from None
        if release.data + starts[-1] != release.nbytes:
            raise ProtocolError(
                f"version {release.version} has {starts[-1]} bytes of arrays by its manifest, and"
                f" {release.nbytes - release.data} by its release"
            )
        return manifest


class Writing:
    """A value to be written to the memory of a version. `release` is complete except for its
    check."""

    def __init__(
        self,
        value: Encoded,
        version: int,
        extents: Mapping[str, Extent] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`share`: (number, of how many)."""
        self._value = value
        self._extents = extents
        self._starts = _starts([buffer.nbytes for buffer in value.buffers])
        data = self._starts[-1]
        chunk = chunk_of(data)
        manifest = len(Manifest(value.meta, [0] * -(-data // chunk), extents).pack())
        self.release = Release(version, manifest, aligned(manifest) + data, chunk, 0, *share)

    def write(self, memory: memoryview) -> Release:
        """Copy the value into `memory`; may run in a thread."""
        source = Stretches(self._starts[:-1], self._value.buffers)
        data = memory[self.release.data :]
        packed, release = self._sealed(self._checks(partial(self._write_chunk, source, data)))
        memory[: release.manifest] = packed
        memory[release.manifest : release.data] = bytes(release.data - release.manifest)
        return release

    def _write_chunk(self, source: Stretches, data: memoryview, number: int) -> int:
        """Copy a chunk, and return its check. Bytes are checked while they are in the cache."""
        chunk = self.release.chunk
        stop, check = min((number + 1) * chunk, len(data)), 0
        for at in range(number * chunk, stop, CACHED):
            place = data[at : min(at + CACHED, stop)]
            source.copy(at, place)
            check = crc32(place, check)
        return check

    def lend(self) -> tuple[Release, Stretches]:
        """Use the value in its own memory; may run in a thread."""
        starts = [self.release.data + start for start in self._starts[:-1]]
        lent = Stretches(starts, self._value.buffers)
        span = self.release.span
        checks = self._checks(lambda number: crc32(lent.read(*span(number + 1))))
        lent.front, release = self._sealed(checks)
        return replace(release, lent=True), lent

    def _checks(self, of_chunk: Callable[[int], int]) -> list[int]:
        """The check of each chunk, by several threads if there are several chunks."""
        chunks = self.release.parts - 1
        threads = min(THREADS, cores() - 1, chunks)
        if threads < 2:
            return [*map(of_chunk, range(chunks))]
        with ThreadPoolExecutor(threads, thread_name_prefix="aiodist-weights") as pool:
            return [*pool.map(of_chunk, range(chunks))]

    def _sealed(self, checks: Sequence[int]) -> tuple[bytes, Release]:
        release = self.release
        packed = Manifest(self._value.meta, checks, self._extents).pack()
        return packed, replace(release, check=crc32(packed))


class Stretches:
    """Arrays of a user, read as if they were one piece of memory behind `front`, the manifest."""

    def __init__(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self.front = b""
        self._starts = starts
        self._buffers = buffers

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop`; a copy if they are in several arrays."""
        if stop <= len(self.front):
            return memoryview(self.front)[start:stop]
        found = self._between(start, stop)
        if len(found) == 1 and stop <= found[0][0] + found[0][1].nbytes:
            at, buffer = found[0]
            return buffer[start - at : stop - at]
        gathered = memoryview(bytearray(stop - start))
        self.copy(start, gathered)
        return gathered

    def copy(self, start: int, place: memoryview) -> None:
        """Copy the bytes from `start` on to `place`.

        The gaps behind arrays become zeros, because `place` may have other data of this process,
        and because equal arrays must have equal checks.
        """
        stop = start + len(place)
        for at, buffer in self._between(start, stop):
            end = at + buffer.nbytes
            low, high = max(start, at), min(stop, end)
            if low < high:  # else there is only the gap behind it
                # By numpy, which lets other threads run meanwhile.
                piece = np.frombuffer(buffer[low - at : high - at], np.uint8)
                np.copyto(np.frombuffer(place[low - start : high - start], np.uint8), piece)
            low, high = max(start, end), min(stop, aligned(end))
            if low < high:
                place[low - start : high - start] = bytes(high - low)

    def _between(self, start: int, stop: int) -> list[tuple[int, memoryview]]:
        """The arrays that may have bytes there, with their starts."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, stop)
        return [*zip(self._starts[first:last], self._buffers[first:last], strict=True)]


class Leaf(NamedTuple):
    """An array of a tree.

    `name`: its keys, joined by dots. `start`: its offset among the arrays. `key`: its place in the
    tree. `extent`: its part of the whole array.
    """

    name: str
    start: int
    spec: Spec
    key: str
    extent: Extent

    def check(self) -> None:
        """Raise ValueError if the extent does not fit."""
        box, shape = self.extent
        lengths = tuple(stop - start for start, stop in box)
        inside = all(0 <= at <= end <= n for (at, end), n in zip(box, shape, strict=True))
        if lengths != self.spec.shape or not inside:
            raise ValueError(f"{self.key}: {self.spec} cannot be {self.extent}")

    def over(self, read: Callable[[int, int], memoryview], data: int) -> Flat:
        """The array as numpy elements. `data`: the offset of the arrays."""
        start = data + self.start
        lying = np.frombuffer(read(start, start + self.spec.nbytes), np.uint8)
        array: Flat = lying.view(carrier(self.spec.name)).reshape(self.spec.shape)
        return array

    def read(self, memory: memoryview, data: int) -> Any:
        """The array in the form of `shown`. `data`: the offset of the arrays.

        A numpy array is a view of the memory.
        """
        lying = self.over(lambda start, stop: memory[start:stop].toreadonly(), data)
        return shown(lying, self.spec, self.name)


def shown(lying: Flat, spec: Spec, name: str) -> Any:
    """An array in the form that users get: numpy arrays are read-only, and tensors are copies.

    torch has no read-only memory.
    """
    if spec.kind == "numpy":
        lying.flags.writeable = False
        return lying
    own = arrays.empty(spec.kind, spec.name, lying.shape, name)
    np.copyto(own.base, lying)
    return own.value


def leaves(manifest: Manifest) -> list[Leaf]:
    """The arrays of a version, in the order of its tree."""
    return _Leaves.of(manifest, lambda leaf: None)[0]


def tree_of(manifest: Manifest, make: Callable[[Leaf], Any]) -> Any:
    """The tree of a version, with what `make` returns for each array."""
    return _Leaves.of(manifest, make)[1]


def value_in(memory: memoryview, manifest: Manifest, data: int) -> Any:
    """The tree, with its arrays as `Leaf.read` returns them. `data`: the offset of the arrays."""
    return tree_of(manifest, lambda leaf: leaf.read(memory, data))


class Into:
    """Arrays of a user that a version will be written to."""

    def __init__(self, manifest: Manifest, into: Any) -> None:
        """Raises TypeError and ValueError, naming the place in `into`, if the version does not
        fit."""
        self._incoming = parse(manifest.meta)
        self._incoming.allocate(into, name="into")

    def write(self, memory: memoryview, data: int) -> None:
        """May run in a thread."""
        incoming = self._incoming
        sizes = [buffer.nbytes for buffer in incoming.buffers]
        for start, buffer in zip(_starts(sizes), incoming.buffers, strict=False):
            source = np.frombuffer(memory[data + start : data + start + buffer.nbytes], np.uint8)
            np.copyto(np.frombuffer(buffer, np.uint8), source)
        incoming.finish()


class _Leaves:
    """Finds the arrays of a tree, and replaces each by what `make` returns: a `Taker`."""

    def __init__(self, make: Callable[[Leaf], Any], extents: Mapping[str, Extent]) -> None:
        self._make = make
        self._extents = extents
        self._end = 0
        self.found: list[Leaf] = []

    @classmethod
    def of(cls, manifest: Manifest, make: Callable[[Leaf], Any]) -> tuple[list[Leaf], Any]:
        """The arrays of a version, and its tree with what `make` returns."""
        taker = cls(make, manifest.extents)
        incoming = parse(manifest.meta)
        incoming.allocate(foreign=taker)
        return taker.found, incoming.finish()

    def is_foreign(self, value: Any) -> bool:
        return False

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        key = str(where).removeprefix("value")
        extent = self._extents.get(key) or Extent(whole(spec.shape), spec.shape)
        leaf = Leaf(_name(where), self._end, spec, key, extent)
        self._end += aligned(spec.nbytes)
        self.found.append(leaf)
        return Mapped(self._make(leaf))


def _extent(box: Any, shape: Any) -> Extent:
    return Extent(tuple((int(start), int(stop)) for start, stop in box), tuple(map(int, shape)))


def _name(where: Where) -> str:
    keys: list[str] = []
    while isinstance(where, Path):
        keys.insert(0, str(where.key))
        where = where.parent
    return ".".join(keys)


def _starts(sizes: Sequence[int]) -> list[int]:
    """The offsets of arrays of these sizes, and the end of the last one."""
    return list(accumulate(map(aligned, sizes), initial=0))
