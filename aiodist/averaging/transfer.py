"""The transfer of one round: each member reduces some slices, and takes the means of the others.

The elements are cut into chunks, and the chunks are dealt to the members whose contributions count
(reduce-scatter, then all-gather: each byte moves 2 (n - 1) / n times). A chunk is reduced as soon
as all contributions to it are there, and its mean is sent on at once. So a long line carries both
halves at the same time::

    member 0   own chunks: 0 2   sends 1 3 to member 1, takes means of these
    member 1   own chunks: 1 3   sends 0 2 to member 0, takes means of these

If a member is left out in the middle, the others keep the contributions that they have. They reduce
again without it, deal its chunks among themselves, and exchange means again.

One member reduces a chunk, in the order of members, and all take the same bytes of its mean: so all
have the same bits.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.averaging.values import narrowed, widened
from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.codecs.base import NOT_DECODED, Codec
from aiodist.codecs.feedback import ErrorFeedback
from aiodist.errors import in_words
from aiodist.group import Group
from aiodist.work import Work

log = logging.getLogger("aiodist.averaging")

CHUNK = 1 << 20
"""Bytes of a chunk, at most."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of one vector. `home`: which of the contributors reduces it, if it is not lost."""

    vector: int
    start: int
    stop: int
    home: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def chunks(names: Sequence[str], sizes: Sequence[int], sources: int) -> list[Chunk]:
    """The chunks of vectors, dealt to so many contributors in turn."""
    found: list[Chunk] = []
    for vector, (name, size) in enumerate(zip(names, sizes, strict=True)):
        most = CHUNK // carrier(name).itemsize
        # A block of a codec must not be cut: see `aiodist.codecs`.
        step = max(1, min(most, -(-size // (sources * 256)) * 256))
        for start in range(0, size, step):
            found.append(Chunk(vector, start, min(start + step, size), len(found) % sources))
    return found


@dataclass(slots=True)
class PartResiduals:
    """What codings of one part have lost so far, by vector: of contributions, and of the means that
    this member has reduced. `form`: the digest of the form of these vectors."""

    form: bytes
    contributions: list[NDArray[np.float32] | None]
    means: list[NDArray[np.float32] | None]

    @staticmethod
    def none(form: bytes, names: Sequence[str], sizes: Sequence[int]) -> PartResiduals:
        """Nothing was lost yet."""

        def zeros() -> list[NDArray[np.float32] | None]:
            return [
                np.zeros(size, np.float32) if name == "float32" else None
                for name, size in zip(names, sizes, strict=True)
            ]

        return PartResiduals(form, zeros(), zeros())

    def copy(self) -> PartResiduals:
        return PartResiduals(
            self.form,
            [None if one is None else one.copy() for one in self.contributions],
            [None if one is None else one.copy() for one in self.means],
        )


class Transfer:
    """One round on one member. `group`: of all members of the first decision, in their order.
    `weights`: theirs. `vectors`: this member's contribution; `names`: their dtypes. `report` is
    called when more is here: with the members whose contributions are here, and those whose means
    are. `failed` is called with an error of the codec. Errors within `begin` are raised there."""

    def __init__(
        self,
        group: Group,
        weights: Sequence[float],
        vectors: Sequence[Flat],
        names: Sequence[str],
        *,
        codec: Codec | None,
        residuals: PartResiduals | None,
        sums: bool,
        report: Callable[[tuple[int, ...], tuple[int, ...]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._me = group.rank
        self._weights = weights
        self._vectors = vectors
        self._names = names
        self._codec = codec
        self._sums = sums
        self._report = report
        self._failed = failed
        self._sources = [one for one, weight in enumerate(weights) if weight > 0]
        self._chunks = chunks(names, [one.size for one in vectors], len(self._sources))
        self._sent: set[tuple[int, int]] = set()  # (chunk, member) of contributions
        self._coded: dict[int, NDArray[np.uint8]] = {}  # by chunk, if there is a codec
        self._own: dict[int, NDArray[Any]] = {}  # this member's contribution, as others decode it
        self._here: dict[tuple[int, int], NDArray[Any]] = {}  # (chunk, member), to be added
        self._awaited: set[tuple[int, int]] = set()  # those that were asked for
        self._works: dict[Work[Any], None] = {}  # that go on over attempts
        self._attempt_works: dict[Work[Any], None] = {}
        self._residuals = residuals
        self._lost = None if residuals is None else residuals.copy()  # what becomes of these
        self.results: list[Flat] = [np.empty_like(one) for one in vectors]
        self._attempt = -1  # none has begun
        self._counted: list[int] = []  # the sources of this attempt
        self._said: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._closed = False

    # An attempt.

    def begin(self, attempt: int, remaining: Sequence[int]) -> None:
        """Exchange what is missing with these members. `attempt` counts from 0. An attempt goes on
        if only receivers are left out, because its means stay the same."""
        self._remaining = list(remaining)
        counted = [one for one in self._sources if one in remaining]
        if attempt == self._attempt and counted == self._counted:
            self._said = None  # a coordinator that is back may not have heard
            self._tell()
            return
        self._drop(self._attempt_works)
        self._attempt = attempt
        self._counted = counted
        self._owner = [self._owner_of(at) for at in range(len(self._chunks))]
        self._mine = [at for at, owner in enumerate(self._owner) if owner == self._me]
        self._reduced: set[int] = set()
        self._means: set[int] = set()  # chunks of which the mean is here
        if self._lost is not None and self._residuals is not None:
            self._lost.means = self._residuals.copy().means
        self._said = None
        # How many chunks lack the contribution of a member, and how many of its means are not here.
        self._lacking = Counter(
            one for at in self._mine for one in self._counted if (at, one) not in self._here
        )
        self._unheard = Counter(owner for owner in self._owner if owner != self._me)
        # Receives first, so that what arrives has a place.
        for at, owner in enumerate(self._owner):
            if owner == self._me:
                for source in self._counted:
                    self._expect(at, source)
            else:
                self._expect_mean(at, owner)
        if self._me in self._counted:
            for at in self._turns():
                if self._owner[at] != self._me:
                    self._give(at, self._owner[at])
        for at in self._mine:
            self._reduce(at)
        self._tell()

    def _owner_of(self, at: int) -> int:
        home = self._sources[self._chunks[at].home]
        return home if home in self._counted else self._counted[at % len(self._counted)]

    def _turns(self) -> list[int]:
        """The chunks, so that not all members send to the same one first."""
        count = len(self._chunks)
        first = self._me + 1
        return [(first + at) % count for at in range(count)]

    def _give(self, at: int, owner: int) -> None:
        if (at, owner) in self._sent:
            return
        self._sent.add((at, owner))
        self._send(at, self._outgoing(at), owner, at, self._works)

    def _outgoing(self, at: int) -> NDArray[Any]:
        """This member's contribution to a chunk, as it travels."""
        chunk = self._chunks[at]
        values = self._vectors[chunk.vector][chunk.start : chunk.stop]
        if not self._is_coded(chunk):
            return values
        if at not in self._coded:
            lost = None if self._lost is None else self._lost.contributions[chunk.vector]
            assert self._codec is not None
            self._coded[at], self._own[at] = _coded(self._codec, values, lost, chunk)
        return self._coded[at]

    def _own_values(self, at: int) -> NDArray[Any]:
        chunk = self._chunks[at]
        if self._is_coded(chunk):
            self._outgoing(at)
            return self._own[at]
        name = self._names[chunk.vector]
        return widened(self._vectors[chunk.vector][chunk.start : chunk.stop], name)

    def _is_coded(self, chunk: Chunk) -> bool:
        return self._codec is not None and self._names[chunk.vector] == "float32"

    def _expect(self, at: int, source: int) -> None:
        key = (at, source)
        if source == self._me and key not in self._here:
            self._here[key] = self._own_values(at)
            self._lacking[source] -= 1
        elif source != self._me and key not in self._awaited:
            self._awaited.add(key)
            self._receive(at, source, at, self._works, partial(self._came, at, source))

    def _expect_mean(self, at: int, owner: int) -> None:
        tag = (1 + self._attempt) * len(self._chunks) + at
        self._receive(at, owner, tag, self._attempt_works, partial(self._mean_came, at))

    def _receive(
        self,
        at: int,
        source: int,
        tag: int,
        works: dict[Work[Any], None],
        came: Callable[[NDArray[Any]], None],
    ) -> None:
        chunk = self._chunks[at]
        out: Any = None
        if not self._is_coded(chunk):
            out = np.empty(chunk.count, carrier(self._names[chunk.vector]))
        work = self._group.recv(src=source, tag=tag, out=out, timeout=math.inf)
        works[work] = None
        work.add_done_callback(partial(self._ended, works, came))

    def _send(
        self, at: int, data: NDArray[Any], to: int, tag: int, works: dict[Work[Any], None]
    ) -> None:
        chunk = self._chunks[at]
        if self._is_coded(chunk):
            self._group._context.saved(
                self._vectors[chunk.vector].itemsize * chunk.count - data.nbytes
            )
        work = self._group.send(data, to, tag=tag, timeout=math.inf)
        works[work] = None
        work.add_done_callback(partial(self._ended, works, None))

    def _ended(
        self,
        works: dict[Work[Any], None],
        came: Callable[[NDArray[Any]], None] | None,
        work: Work[Any],
    ) -> None:
        error = None if work.cancelled() else work.exception()
        if work not in works:
            return  # it was dropped when it had ended already, and belongs to an earlier attempt
        del works[work]
        if work.cancelled():
            return
        if error is not None:
            # The coordinator sees which members are gone and what is missing, and decides.
            log.debug("a round waits for a member: %s", in_words(error))
        elif came is not None and not self._closed and self._group._context.ended is None:
            try:
                came(work.result())
            except BaseException as broken:  # a codec may raise anything
                self._failed(broken)

    # What has come.

    def _came(self, at: int, source: int, data: NDArray[Any]) -> None:
        chunk = self._chunks[at]
        values: NDArray[Any]
        if self._is_coded(chunk):
            values = np.empty(chunk.count, np.float32)
            if not self._decode(data, values, chunk, source):
                return
        else:
            values = widened(data, self._names[chunk.vector])
        self._here[at, source] = values
        if self._owner[at] == self._me:
            self._lacking[source] -= 1
            self._reduce(at)
        self._tell()

    def _decode(
        self, data: Any, values: NDArray[np.float32], chunk: Chunk, source: int | None
    ) -> bool:
        assert self._codec is not None
        codec = self._codec if source is not None else self._codec.of_sum(len(self._counted))
        try:
            codec.decode(data, values)
        except NOT_DECODED as error:
            # The round waits for that member until it counts as behind.
            log.warning("a member sent what cannot be decoded: %s", in_words(error))
            return False
        return True

    def _reduce(self, at: int) -> None:
        if at in self._reduced or any((at, one) not in self._here for one in self._counted):
            return
        self._reduced.add(at)
        chunk = self._chunks[at]
        name = self._names[chunk.vector]
        with np.errstate(all="ignore"):
            weights = [self._weights[one] for one in self._counted]
            values = [self._here[at, one] for one in self._counted]
            total = (_sum if self._sums else _mean)(values, weights)
        place = self._results(chunk)
        if self._is_coded(chunk):
            assert self._codec is not None
            codec = self._codec.of_sum(len(self._counted))
            lost = None if self._lost is None else self._lost.means[chunk.vector]
            data, place[:] = _coded(codec, total, lost, chunk)
        else:
            place[:] = narrowed(total, name)
            data = place
        tag = (1 + self._attempt) * len(self._chunks) + at
        for other in self._remaining:
            if other != self._me:
                self._send(at, data, other, tag, self._attempt_works)

    def _results(self, chunk: Chunk) -> Flat:
        return self.results[chunk.vector][chunk.start : chunk.stop]

    def _mean_came(self, at: int, data: NDArray[Any]) -> None:
        chunk = self._chunks[at]
        place = self._results(chunk)
        if not self._is_coded(chunk):
            place[:] = data
        elif not self._decode(data, place, chunk, None):
            return
        self._means.add(at)
        self._unheard[self._owner[at]] -= 1
        self._tell()

    def _tell(self) -> None:
        """Report what is here, if that is more than before."""
        others = [one for one in self._counted if one != self._me]
        contributions = tuple(one for one in others if not self._lacking[one])
        means = tuple(one for one in others if not self._unheard[one])
        if self._said != (contributions, means):
            self._said = (contributions, means)
            self._report(contributions, means)

    @property
    def is_held(self) -> bool:
        """Whether the whole result is here."""
        return len(self._means) + len(self._reduced) == len(self._chunks)

    def lost(self) -> PartResiduals | None:
        """What the codings of this round have lost, now that it counts."""
        return self._lost

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._closed = True
        self._drop(self._works)
        self._drop(self._attempt_works)

    def _drop(self, works: dict[Work[Any], None]) -> None:
        for work in list(works):
            work.cancel()
        works.clear()


def _in_range(weights: Sequence[float]) -> list[float]:
    """Weights of the same ratios, the largest from 1 to 2, so that none is over the range of
    float32. They are divided by a power of two, so the bits of a mean stay the same."""
    _, exponent = math.frexp(max(weights))
    return [math.ldexp(one, 1 - exponent) for one in weights]


def _mean(values: Sequence[NDArray[Any]], weights: Sequence[float]) -> NDArray[Any]:
    """The weighted mean, summed up in their order.

    It is finite where all values are, unless it rounds up from the largest number of the dtype.
    """
    weights = _in_range(weights)
    try:
        with np.errstate(over="raise"):
            total = _sum(values, weights)
    except FloatingPointError:
        # Only the sum is over the range. With weights whose sum is below 1, it is not.
        _, exponent = math.frexp(math.fsum(weights))
        weights = [math.ldexp(one, -exponent) for one in weights]
        total = _sum(values, weights)
    total /= total.dtype.type(math.fsum(weights))
    return total


def _sum(values: Sequence[NDArray[Any]], weights: Sequence[float]) -> NDArray[Any]:
    """The weighted sum, in their order, in the dtype of the values."""
    total: NDArray[Any] = values[0] * values[0].dtype.type(weights[0])
    for one, weight in zip(values[1:], weights[1:], strict=True):
        total += one if weight == 1 else one * one.dtype.type(weight)
    return total


def _coded(
    codec: Codec, values: NDArray[np.float32], lost: NDArray[np.float32] | None, chunk: Chunk
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The bytes of some values, and what they decode to. `lost`: what codings of their vector have
    lost before, to be updated."""
    out = np.empty(codec.nbytes(values.size), np.uint8)
    decoded = np.empty(values.size, np.float32)
    if lost is None:
        size = codec.encode(np.ascontiguousarray(values), out)
        codec.decode(out[:size], decoded)
    else:
        feedback = ErrorFeedback(0)
        feedback.residual = lost[chunk.start : chunk.stop]
        size = feedback.encode(codec, values, out, decoded)
    return out[:size], decoded
