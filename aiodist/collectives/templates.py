"""Blobs of offers, but for their data: after the first time it is known what ranks show.

A rank that offers small arrays shows one blob: what it wants, the metadata of each array, and the
data among it. In calls of one kind only the data differs. So a blob that was read once by the rules
(`offers.unpack`) gives a `Template`, and one that has the same bytes beside its data means the same
and need not be read again. A template says nothing of what it has not seen: any other blob goes the
ordinary way.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import parse
from aiodist.collectives import fitting
from aiodist.collectives.offers import Offer, unpack

LENGTH = 4
"""Bytes before a blob in shared memory, which say how long it is: see `phases.memories.Blobs`."""


class Template(NamedTuple):
    """A blob with its length before it, as it lies in shared memory.

    `fixed`: what is the same each time, and where; `gaps`: where the data of each array lies, and
    what that is. `want`: what its rank takes, `given`: what it gives (see `fitting`). `apart`: the
    array that it gives, where its data travels behind the blob.
    """

    length: int
    fixed: tuple[tuple[int, bytes], ...]
    gaps: tuple[tuple[int, Spec], ...]
    want: bytes
    given: bytes
    apart: Spec | None = None

    def is_of(self, blob: bytes) -> bool:
        """Whether this is the template of `blob`."""
        (_, first), *more = self.fixed
        return (
            len(blob) + LENGTH == self.length
            and blob.startswith(first[LENGTH:])
            and all(blob.startswith(part, at - LENGTH) for at, part in more)
        )


def template_of(blob: bytes, count: int, src: int, *, moves: bool = False) -> Template | None:
    """The template of a sound blob of `src` with so many offers; None where these are not all
    arrays whose data is in the blob, nor, if it `moves`, one array whose data travels apart."""
    (want,), (words,) = fitting.parted([blob])
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
    apart: Spec | None = None
    for offer in offers:
        if not isinstance(offer.meta, bytes):
            return None
        spec = parse(offer.meta).array
        if spec is None or not spec.nbytes:
            return None
        if offer.data is None:
            if not moves or count > 1 or offer != Offer(offer.meta, spec.nbytes, None):
                return None
            apart = spec
            break
        # The data is the last but three of its fields, and these are small numbers.
        at += len(msgpack.packb(offer))
        gaps.append((at - len(msgpack.packb(offer[3:])) + 1 - spec.nbytes, spec))
    shown = len(blob).to_bytes(LENGTH, "big") + blob
    given = fitting.given([offer.meta for offer in offers]) if offers else fitting.NOTHING
    edges = [0, *[edge for start, spec in gaps for edge in (start, start + spec.nbytes)]]
    ends = [*edges[1:], len(shown)]
    fixed = tuple(
        (start, shown[start:stop]) for start, stop in list(zip(edges, ends, strict=True))[::2]
    )
    return Template(len(shown), fixed, tuple(gaps), want, given, apart)


class Reading:
    """A template in the area of one rank."""

    __slots__ = ("_fixed", "data", "given", "is_apart", "spec", "want")

    def __init__(self, template: Template, area: memoryview) -> None:
        self._fixed = [(area[at : at + len(part)], part) for at, part in template.fixed]
        self.data = [_Data(spec, area[at : at + spec.nbytes]) for at, spec in template.gaps]
        self.want = template.want
        self.given = template.given
        self.is_apart = template.apart is not None
        self.spec = template.gaps[0][1] if template.gaps else template.apart  # of the first array

    def is_there(self) -> bool:
        """Whether the area shows what the template says."""
        for view, part in self._fixed:
            if view.tobytes() != part:
                break
        else:
            return True
        return False

    def write(self) -> None:
        """Show all but the data."""
        for view, part in self._fixed:
            view[:] = part


class _Data:
    """The data of one array in an area: `flat` is a view of it."""

    __slots__ = ("_shape", "_spec", "flat")

    def __init__(self, spec: Spec, memory: memoryview) -> None:
        self._spec = spec
        self.flat: NDArray[np.generic] = np.frombuffer(memory, carrier(spec.name))
        # Most are numpy arrays: one call copies them.
        self._shape = self.flat.reshape(spec.shape) if spec.kind == "numpy" else None

    def copy(self) -> object:
        """An array of its own."""
        if self._shape is not None:
            return self._shape.copy()
        made = arrays.empty(self._spec.kind, self._spec.name, self._spec.shape, "value")
        made.read()[:] = self.flat
        return made.value
