"""Small integers, and a scale for each block of values."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiodist.codecs.base import Bytes, Codec, Floats, checked_count, checked_feedback

_AT_ONCE: Final = 1 << 15
"""Values that are coded at once: what is computed on the way stays in the cache."""
_LEAST: Final = np.float32(1e-36)
"""Blocks of smaller values become zeros, because the inverse of their scale would be infinite."""

_Rows = NDArray[Any]


class _Integers(Codec):
    """Values as integers from -levels to levels times the scale of their block.

        bytes:  scale of block 0 (float32) | scale of block 1 | … | integers of block 0 | …

    The last block may be shorter than the others. The scale of a block that holds a value that is
    not finite is NaN.
    """

    _levels: int

    def __init__(self, block: int, error_feedback: bool) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= _AT_ONCE:
            raise ValueError(f"block={block!r}: expected an integer from 1 to {_AT_ONCE}")
        self.name = f"{type(self).__name__}(block={block})"
        self.error_feedback = checked_feedback(error_feedback)
        self.block = block
        most = np.finfo(np.float32).max / np.float32(self._levels)
        self._largest_scale = np.nextafter(most, np.float32(0))

    @abstractmethod
    def _width(self, columns: int) -> int:
        """The bytes of as many integers."""

    @abstractmethod
    def _pack(self, integers: _Rows, out: _Rows) -> None:
        """Write float32[rows, columns], which hold integers, to uint8[rows, width]."""

    @abstractmethod
    def _unpack(self, packed: _Rows, out: _Rows) -> None:
        """Write uint8[rows, width] to float32[rows, columns]."""

    def nbytes(self, count: int) -> int:
        rows, rest = divmod(checked_count(count), self.block)
        size = rows * (4 + self._width(self.block))
        return size + 4 + self._width(rest) if rest else size

    def _pieces(self, floats: Floats, data: Bytes) -> list[tuple[_Rows, _Rows, _Rows]]:
        """The values, scales and packed integers of as many blocks as are coded at once."""
        rows, rest = divmod(floats.size, self.block)
        scales = data[: 4 * (rows + (rest > 0))].view("<f4")
        width, body = self._width(self.block), scales.nbytes
        values = floats[: rows * self.block].reshape(rows, self.block)
        packed = data[body : body + rows * width].reshape(rows, width)
        step = _AT_ONCE // self.block
        cuts = [slice(start, start + step) for start in range(0, rows, step)]
        pieces = [(values[cut], scales[:rows][cut], packed[cut]) for cut in cuts]
        if rest:
            tail = data[body + rows * width :][: self._width(rest)]
            last = (floats[rows * self.block :].reshape(1, rest), scales[rows:], tail[np.newaxis])
            pieces.append(last)
        return pieces

    def encode(self, values: Floats, out: Bytes) -> int:
        with np.errstate(all="ignore"):
            scratch = np.empty(min(values.size, _AT_ONCE), np.float32)
            for floats, scales, packed in self._pieces(values, out):
                self._encode(floats, scales, packed, scratch[: floats.size].reshape(floats.shape))
        return self.nbytes(values.size)

    def _encode(self, floats: _Rows, scales: _Rows, packed: _Rows, scratch: _Rows) -> None:
        np.abs(floats, out=scratch)
        peaks = scratch.max(axis=1)
        peaks[peaks < _LEAST] = 0
        # Rounded to the nearest, the scale of the largest values could lead beyond them.
        np.minimum(peaks / np.float32(self._levels), self._largest_scale, out=scales)
        inverse = np.float32(self._levels) / peaks
        inverse[peaks == 0] = 0
        np.multiply(floats, inverse[:, np.newaxis], out=scratch)
        np.rint(scratch, out=scratch)
        broken = ~np.isfinite(peaks)
        if broken.any():
            scales[broken] = np.nan
            scratch[broken] = 0
        self._pack(scratch, packed)

    def decode(self, data: Bytes, out: Floats) -> None:
        if data.size != self.nbytes(out.size):
            raise self.refuse(data, out.size)
        with np.errstate(all="ignore"):
            for floats, scales, packed in self._pieces(out, data):
                self._unpack(packed, floats)
                floats *= scales[:, np.newaxis]


class int8(_Integers):
    """Integers from -127 to 127, with a scale for each `block` of values: 25.4 % of the bytes.

    The largest error is about 1/254 of the largest value of its block. If a block holds a
    value that is not finite, all of the block becomes NaN. Blocks of values below 1e-36 become
    zeros.

    Args:
        block: values that share a scale, 1 to 32768. Smaller blocks are more exact and take more
            bytes: 1 + 4 / block for each value.
    """

    _levels = 127

    def __init__(self, block: int = 256, *, error_feedback: bool = False) -> None:
        super().__init__(block, error_feedback)

    def _width(self, columns: int) -> int:
        return columns

    def _pack(self, integers: _Rows, out: _Rows) -> None:
        np.copyto(out.view(np.int8), integers, casting="unsafe")

    def _unpack(self, packed: _Rows, out: _Rows) -> None:
        np.copyto(out, packed.view(np.int8))


class int4(_Integers):
    """Integers from -7 to 7, with a scale for each `block` of values: 13.3 % of the bytes.

    The largest error is about 1/14 of the largest value of its block. If a block holds a
    value that is not finite, all of the block becomes NaN. Blocks of values below 1e-36 become
    zeros.

    Args:
        block: values that share a scale, 1 to 32768. Smaller blocks are more exact and take more
            bytes: 1/2 + 4 / block for each value.
    """

    _levels = 7

    def __init__(self, block: int = 128, *, error_feedback: bool = False) -> None:
        super().__init__(block, error_feedback)

    def _width(self, columns: int) -> int:
        return (columns + 1) // 2

    def _pack(self, integers: _Rows, out: _Rows) -> None:
        columns = integers.shape[1]
        small = np.zeros((out.shape[0], 2 * out.shape[1]), np.int8)
        np.copyto(small[:, :columns], integers, casting="unsafe")
        pairs = small.view("<u2")  # two at once: 0x0b0a becomes 0xba
        upper = pairs >> 4
        pairs &= 0x0F
        upper &= 0xF0
        pairs |= upper
        np.copyto(out, pairs, casting="unsafe")

    def _unpack(self, packed: _Rows, out: _Rows) -> None:
        pairs = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        pairs ^= 0x0808  # the sign is the fourth bit: 0..7, -8..-1 become 8..15, 0..7
        small = pairs.view(np.int8)
        small -= 8
        np.copyto(out, small[:, : out.shape[1]])
