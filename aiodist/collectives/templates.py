"""Templates: how blobs of offers look in all bytes but their data.

A rank that offers small values shows one blob: what it wants, the metadata of each value, and the
data of its arrays in between. Calls of one kind differ in the data only. So a blob that was read
once by the rules (`offers.unpack`) gives a `Template`. If a later blob has the same bytes besides
its data, it means the same, and need not be read again. All other blobs are read the ordinary way.

The data of a tree is its numbers, which are within its metadata, and its arrays, one behind the
other. Its strings and keys are fixed in a template. Numbers that are reduced: see `numbers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays, tensors, tokens
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.packed_numbers import NUMBERS, WIDTH, packed, unpacked
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import Incoming, parse
from aiodist.collectives import fitting
from aiodist.collectives.offers import Offer, unpack
from aiodist.compiled import core
from aiodist.phases import berths
from aiodist.shared_memory.posts import CHEAP_COPY

LENGTH = 4
"""The bytes before a blob in shared memory that give its length: see `phases.memories.Blobs`."""


class Template(NamedTuple):
    """A blob with its length before it, as it is in shared memory.

    Attributes:
        length: The bytes of the blob with its length.
        fixed: The bytes that are the same each time, with their offsets.
        gaps: The offset and kind of the data of each array.
        metas: The metadata of each value.
        want: What its rank takes (see `fitting`).
        given: What its rank gives (see `fitting`).
        is_apart: Whether the data travels behind the blob. The rank then gives an array, or several
            of one kind.
        order: Which number or array goes into each gap, in the order of the call. (): the first
            goes into the first.
        places: The offset of the metadata of each value.
    """

    length: int
    fixed: tuple[tuple[int, bytes], ...]
    gaps: tuple[tuple[int, Spec], ...]
    metas: tuple[bytes, ...] = ()
    want: bytes = fitting.NOTHING
    given: bytes = fitting.NOTHING
    is_apart: bool = False
    order: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, blob: bytes, gaps: Sequence[tuple[int, Spec]], *more: Any) -> Template:
        """Return the template of a `blob` with data in these `gaps`."""
        shown = len(blob).to_bytes(LENGTH, "big") + blob
        edges = [0, *[edge for start, spec in gaps for edge in (start, start + spec.nbytes)]]
        ends = [*edges[1:], len(shown)]
        fixed = tuple(
            (start, shown[start:stop]) for start, stop in list(zip(edges, ends, strict=True))[::2]
        )
        return cls(len(shown), fixed, tuple(gaps), *more)

    def shown(self, data: Sequence[bytes | memoryview]) -> bytes:
        """Return the blob with `data` in its gaps."""
        parts: list[bytes | memoryview] = [*self.parts()]
        parts[1::2] = data
        return b"".join(parts)

    def parts(self) -> list[bytes]:
        """Return the parts of the blob. Every second one is a gap, which is empty."""
        parts = [b""] * (2 * len(self.fixed) - 1)
        parts[::2] = [part for _, part in self.fixed]
        return parts

    def shown_of(self, flats: Sequence[NDArray[Any]]) -> bytes:
        """Return the blob with the data of the first of `flats`: see `shown_flats`."""
        shown = self.shown_flats(flats)
        if self.length <= CHEAP_COPY:
            return self.shown([flat.tobytes() for flat in shown])
        return self.shown([flat.view(np.uint8).data for flat in shown])  # copied once

    def shown_flats(self, flats: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return what goes into the gaps, of the arrays and numbers of a call.

        Calls that take an array in place also have its target there, which is not shown.
        """
        order = self.order or range(len(self.gaps))
        return [flats[at] for at in order]

    def is_of(self, blob: bytes) -> bool:
        """Whether this is the template of `blob`."""
        (_, first), *more = self.fixed
        return (
            len(blob) + LENGTH == self.length
            and blob.startswith(first[LENGTH:])
            and all(blob.startswith(part, at - LENGTH) for at, part in more)
        )


def template_of(blob: bytes, count: int, src: int, *, moves: bool = False) -> Template | None:
    """Return the template of a sound blob of `src` with `count` offers, or None if it has none.

    It has none if it contains more than arrays, or if data is missing in it. If it `moves` values,
    the data of arrays of one kind may be missing, because it travels behind the blob.
    """
    (want,), (words,) = fitting.parted([blob])
    if words[:1] == berths.MARK:
        return None  # its operation has a lane of its own
    offers: list[Offer] = []
    if count:
        offers, more = unpack(words, count, src)
        if more:
            return None
    elif words:
        return None
    head = len(msgpack.packb([None] * count)) - count
    at = LENGTH + len(blob) - len(words) + (head if count else 0)
    gaps: list[tuple[int, Spec]] = []
    metas: list[bytes] = []
    order: list[int] = []
    places: list[int] = []
    is_apart = False
    for offer in offers:
        if not isinstance(offer.meta, bytes):
            return None
        value = parse(offer.meta)
        if not all(spec.nbytes for spec in value.specs) or value.has_pickles:
            return None
        if offer.data is None:
            # If several values are of one kind, one offer stands for all.
            if not moves or any(each != offer for each in offers):
                return None
            if value.array is None or offer != Offer(offer.meta, value.nbytes, None):
                return None
            is_apart = True
            metas = [offer.meta] * count
            break
        leaves = tokens.leaves(offer.meta)
        if leaves is None:
            return None
        # The metadata is the first field, behind a byte for the number of fields.
        first = at + 1 + len(msgpack.packb(offer.meta)) - len(offer.meta)
        numbers = [leaf for leaf in leaves if type(leaf) is tokens.Number]
        gaps += [(first + number.at, _number(number.kind)) for number in numbers]
        metas.append(_without(offer.meta, numbers))
        places.append(first)
        by_gap = sorted(enumerate(leaves), key=lambda leaf: type(leaf[1]) is Spec)
        order += [len(order) + number for number, _ in by_gap]
        # The data is the fourth field from the end. The fields behind it are small numbers.
        at += len(msgpack.packb(offer))
        start = at - len(msgpack.packb(offer[3:])) + 1 - value.nbytes
        for spec in value.specs:
            gaps.append((start, spec))
            start += spec.nbytes
    given = fitting.given(metas) if offers else fitting.NOTHING
    in_order = () if order == [*range(len(order))] else tuple(order)
    seen = tuple(metas), want, given, is_apart, in_order, tuple(places)
    return Template.of(blob, gaps, *seen)


@cache
def _number(kind: type) -> Spec:
    """Return what stands for a number of this type in a template."""
    return Spec("scalar", f"one {kind.__name__}", (), WIDTH)


_TYPES = {_number(kind).name: kind for kind in NUMBERS}


def _without(meta: bytes, numbers: Iterable[tokens.Number]) -> bytes:
    """Return metadata with other numbers, which are the same each time."""
    made = bytearray(meta)
    for kind, at in numbers:
        made[at : at + WIDTH] = cast(bytes, packed(kind()))
    return bytes(made)


def _wholes(template: Template) -> list[tuple[int, Spec]]:
    """Return the offset of the metadata of each value, and what stands for it."""
    metas = zip(template.places, template.metas, strict=False)
    return [(at, Spec("scalar", "metadata", (), len(meta))) for at, meta in metas]


class Reading:
    """A template in the area of one rank."""

    __slots__ = ("data", "fixed", "given", "is_apart", "meta", "values", "want")

    def __init__(self, template: Template, area: memoryview) -> None:
        self.fixed = [(area[at : at + len(part)], part) for at, part in template.fixed if part]
        data = [_Data(spec, area[at : at + spec.nbytes]) for at, spec in template.gaps]
        metas = [_Data(spec, area[at : at + spec.nbytes]) for at, spec in _wholes(template)]
        self._has(template, data, metas)

    def _has(self, template: Template, data: Sequence[Data], metas: Sequence[Data]) -> None:
        """Set the `data`, and build the values from it, or from `metas`, all of their metadata."""
        self.data = data
        self.values: list[Data | Tree] = []  # the values that are offered
        first = 0
        for number, meta in enumerate(() if template.is_apart else template.metas):
            value = parse(meta)
            if value.array is not None:
                self.values.append(data[first])
                first += 1
                continue
            middle = first + value.take_out_numbers()
            stop = middle + len(value.specs)
            whole = metas[number] if value.is_plain else None
            self.values.append(Tree(value, data[first:middle], data[middle:stop], whole))
            first = stop
        self.want = template.want
        self.given = template.given
        self.is_apart = template.is_apart
        self.meta = template.metas[0] if template.metas else b""  # the first value's metadata

    def is_there(self) -> bool:
        """Whether the area shows a blob of this template."""
        for view, part in self.fixed:
            if view.tobytes() != part:
                break
        else:
            return True
        return False

    def write(self) -> None:
        """Write everything but the data to the area."""
        for view, part in self.fixed:
            view[:] = part


class MovingTemplate(Reading):
    """A template that moves: it is at `start` in `area`, which is of `rank`.

    `first` is the part before the first array, and `rest` are those behind it.
    """

    __slots__ = ("_rest", "area", "first", "length", "rank", "rest", "start")

    def __init__(self, template: Template, rank: int) -> None:
        self.rank = rank
        self.area = memoryview(b"")
        self.start = 0
        self.length = template.length
        self.fixed = []
        (_, self.first), *rest = template.fixed
        self._rest = [(at, at + len(part), part) for at, part in rest]
        self.rest: list[tuple[Place, bytes]] = [
            ((rank, at, len(part)), part) for at, part in rest if part
        ]
        data = [_Shifting(self, at, spec) for at, spec in template.gaps]
        self._has(template, data, [_Shifting(self, at, spec) for at, spec in _wholes(template)])

    def lie(self, area: memoryview, start: int) -> None:
        """Move the template to `start` in `area`."""
        self.area = area
        self.start = start

    def is_there(self) -> bool:
        at, first = self.start, self.first
        return self.area[at : at + len(first)].tobytes() == first and self.goes_on()

    def goes_on(self) -> bool:
        """Whether the parts behind `first` are as the template says."""
        area, at = self.area, self.start
        for start, stop, part in self._rest:
            if area[at + start : at + stop].tobytes() != part:
                break
        else:
            return True
        return False

    def rest_of(self, shown: Sequence[NDArray[Any]]) -> list[bytes | memoryview]:
        """Return the parts behind `first` with the data of `shown`: see `Template.shown_flats`."""
        found: list[bytes | memoryview] = []
        for (_, _, part), flat in zip(self._rest, shown, strict=True):
            found.append(flat.view(np.uint8).data)
            found.append(part)
        return found


Place = memoryview | tuple[int, int, int]
"""A place for the compiled part: its memory, or the rank in whose post it is, its offset in the
data there, and its bytes."""


class Data(Protocol):
    """The data of one array in an area. `flat` is a view of it, `memory` are its bytes, `place` is
    where they are, and `copy` makes an array of its own."""

    @property
    def flat(self) -> Any: ...

    @property
    def memory(self) -> memoryview: ...

    @property
    def place(self) -> Place: ...

    def copy(self) -> Any: ...


class _Shifting:
    """The data of one array in a `MovingTemplate`."""

    __slots__ = ("_at", "_dtype", "_shape", "_spec", "_window", "place")

    def __init__(self, window: MovingTemplate, at: int, spec: Spec) -> None:
        self.place: Place = window.rank, at, spec.nbytes
        self._window = window
        self._at = at
        self._spec = spec
        self._dtype = None if spec.kind == "scalar" else np.dtype(carrier(spec.name))
        # Most arrays are of numpy, and these can be copied in one step.
        self._shape = spec.shape if spec.kind == "numpy" else None

    @property
    def flat(self) -> Any:
        window, dtype = self._window, self._dtype
        at = window.start + self._at
        if dtype is None:
            return window.area[at : at + self._spec.nbytes]
        return np.ndarray((self._spec.nbytes // dtype.itemsize,), dtype, window.area, at)

    @property
    def memory(self) -> memoryview:
        at = self._window.start + self._at
        return self._window.area[at : at + self._spec.nbytes]

    def copy(self) -> Any:
        window, shape = self._window, self._shape
        if shape is not None:
            return np.ndarray(shape, self._dtype, window.area, window.start + self._at).copy()
        if self._dtype is not None:
            return _made(self._spec, self.flat)
        kind = _TYPES.get(self._spec.name)
        return self.flat.tobytes() if kind is None else unpacked(kind, self.flat)


class _Data:
    """The data of one array in an area that does not move."""

    __slots__ = ("_spec", "copy", "flat", "memory", "place")

    def __init__(self, spec: Spec, memory: memoryview) -> None:
        self._spec = spec
        self.memory = memory
        self.place: Place = memory
        self.flat: Any = memory
        self.copy: Any = memory.tobytes  # makes the copy
        if spec.name in _TYPES:
            self.copy = partial(unpacked, _TYPES[spec.name], memory)
        elif spec.kind != "scalar":  # the bytes of a number that is reduced are used as they are
            self.flat = np.frombuffer(memory, carrier(spec.name))
            # One call copies arrays of numpy, and tensors.
            if spec.kind == "numpy":
                self.copy = self.flat.reshape(spec.shape).copy
            else:
                seen = tensors.seen(self.flat, *spec[1:3]) if spec.kind == "torch" else None
                self.copy = self._made if seen is None else seen.clone

    def _made(self) -> object:
        return _made(self._spec, self.flat)


def _made(spec: Spec, flat: NDArray[Any]) -> object:
    """Return an array as `spec` says, with the numbers of `flat`."""
    made = arrays.empty(spec.kind, spec.name, spec.shape, "value")
    made.read()[:] = flat
    return made.value


class Tree:
    """A value in an area that is not exactly one array."""

    __slots__ = ("_arrays", "_numbers", "_value", "_whole")

    def __init__(
        self,
        value: Incoming,
        numbers: Sequence[Data],
        arrays: Sequence[Data],
        whole: Data | None = None,
    ) -> None:
        self._value = value
        self._whole = whole  # all of it, if the compiled part may read it there
        self._numbers = numbers
        self._arrays = arrays

    def copy(self) -> object:
        """Return the value with arrays of its own."""
        if core is not None and self._whole is not None:
            read: object = core.read_value(self._whole.memory)
            if read is not NotImplemented:
                return read
        return self._value.build(
            [data.copy() for data in self._arrays], [data.copy() for data in self._numbers]
        )

    def fill(self, place: Any) -> object:
        """Return the value with the arrays of `place`, which get the data."""
        value = self._value.anew()
        value.allocate(place)
        for buffer, data in zip(value.buffers, self._arrays, strict=True):
            buffer[:] = data.memory
        return value.finish([data.copy() for data in self._numbers])
