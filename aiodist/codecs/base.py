"""What a codec does."""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.types import check_name

Floats = NDArray[np.float32]
"""Contiguous, one-dimensional, of any alignment."""
Bytes = NDArray[np.uint8]
"""Contiguous, one-dimensional."""


NOT_DECODED = (ValueError, TypeError, AttributeError, LookupError)
"""What `decode` may raise if the data is wrong. Other errors are those of the codec itself."""


class Codec(ABC):
    """Turns float32 arrays into fewer bytes, and back into nearly the same values.

    Derive from it to write your own. A codec has no state: the same values always give the same
    bytes, and the same bytes always give the same bits, on every member. Threads may share one.
    `aiodist.testing.CodecConformance` tests all that is said here.
    """

    name: str
    """What it is, with all parameters that change bytes: ``int8(block=256)``. Members that use a
    codec together compare names, because other parameters would give them other values."""

    error_feedback: bool = False
    """Whether what a coding loses is added to the values of the next one."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the most bytes that `count` values take, an int. It is 0 for no values."""

    @abstractmethod
    def encode(self, values: Floats, out: Bytes) -> int:
        """Write the coded `values`, float32[n], to the start of `out`, uint8[nbytes(n)].

        Return how many bytes were written, an int. `values` are read-only. If only one of them is
        not finite, it must not become finite, because that would hide a failure. The values near it
        may become NaN as well. If several are not finite, at least one of them must stay so.
        """

    @abstractmethod
    def decode(self, data: Bytes, out: Floats) -> None:
        """Write the values of `data`, uint8[m], to `out`, float32[n]; each of them.

        `data` is read-only. It may come from a network and hold anything.

        Raises:
            ValueError: `data` cannot be n coded values.
        """

    def of_sum(self, members: int) -> Codec:
        """Return the codec for the sum of as many coded arrays: this one, unless you override it.

        A sum of sparse arrays has more values than each of them, so `topk` returns another.
        """
        return self

    def __repr__(self) -> str:
        return f"aiodist.codecs.{self.name}"

    def refuse(self, data: Bytes, count: int) -> ValueError:
        """Return the error for `data` that cannot be `count` values."""
        return ValueError(
            f"{data.size} bytes are not {count} values coded by {self.name}, which take at most "
            f"{self.nbytes(count)} bytes: all members must use the same codec and shapes"
        )


def checked_feedback(error_feedback: Any) -> bool:
    """Return it. Raises ValueError if it is no bool."""
    if not isinstance(error_feedback, bool | np.bool_):
        raise ValueError(f"error_feedback={error_feedback!r}: expected True or False")
    return bool(error_feedback)


def checked_count(count: int) -> int:
    """Return it. Raises TypeError if it is no integer, and ValueError if it is below 0."""
    if operator.index(count) < 0:
        raise ValueError(f"count={count!r}: expected 0 or more values")
    return operator.index(count)


def codec_of(value: Any, said: str = "codec") -> Codec:
    """Return `value`, a `Codec` or an object with the same methods and attributes, as a codec whose
    answers are checked.

    Raises TypeError for anything else. `said`: what the error calls it.
    """
    lacks = [name for name in _NAMES if not hasattr(value, name)]
    if lacks or isinstance(value, type):
        raise TypeError(
            f"{said}={value!r} is no codec: give one of aiodist.codecs, such as "
            "aiodist.codecs.int8(), or an object of a class that derives from aiodist.codecs.Codec"
        )
    return _Checked(value)


class _Checked(Codec):
    """A codec, perhaps of a user. Its arguments are read-only, and wrong answers raise errors that
    name the codec and the method. Each size is asked for once."""

    def __init__(self, codec: Any) -> None:
        self.name, self.error_feedback = str(codec.name), bool(codec.error_feedback)
        check_name(self.name, "codec")
        self._codec = codec
        self._sizes: dict[int, int] = {}

    def nbytes(self, count: int) -> int:
        size = self._sizes.get(count)
        if size is None:
            size = self._size(f"nbytes({count})", self._codec.nbytes(count), sys.maxsize)
            self._sizes[count] = size
        return size

    def encode(self, values: Floats, out: Bytes) -> int:
        return self._size("encode", self._codec.encode(_read_only(values), out), out.size)

    def decode(self, data: Bytes, out: Floats) -> None:
        self._codec.decode(_read_only(data), out)

    def of_sum(self, members: int) -> Codec:
        made = getattr(self._codec, "of_sum", None)
        codec = self._codec if made is None else made(members)
        return self if codec is self._codec else codec_of(codec, f"{self.name}.of_sum({members})")

    def _size(self, method: str, size: Any, most: int) -> int:
        """Return `size`, which `method` has returned, as an int. Raises ValueError if it is none
        from 0 to `most`."""
        with suppress(TypeError):
            if 0 <= operator.index(size) <= most:
                return operator.index(size)
        limit = "0 or more" if most == sys.maxsize else f"0 to {most}"
        raise ValueError(
            f"{self.name}.{method} returned {size!r}: expected the number of bytes, an int, {limit}"
        )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


_NAMES = ("name", "error_feedback", "nbytes", "encode", "decode")

__all__ = ["Bytes", "Codec", "Floats", "codec_of"]
