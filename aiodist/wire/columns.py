"""Pack many rows of the same fields into few bytes, because the view of a large group goes to all.

A view of n members goes to n members. As rows of msgpack a member takes more than a hundred bytes,
most of which are the same for every member or follow from the one before. What cannot be guessed is
16 random bytes of the id, and the port. So rows are sent as columns::

    rows                                             columns
    [0, "0e5c…", "10.0.0.1", 4711, "tcp://…:40001"]  numbers  0 1 1 1 …: the first, then the steps
    [1, "77ab…", "10.0.0.1", 4712, "tcp://…:40117"]  texts    the shapes that there are: "tcp://…:#"
    [2, "f30d…", "10.0.0.1", 4713, "tcp://…:40009"]           which of them each text has
                                                              what stands in place of "#", as bytes

zlib then makes next to nothing of all that repeats. zlib alone, on rows, leaves nearly twice as
much: it spends more than four bits on each hexadecimal digit, and some on each change between
random and repeated text.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat
from struct import Struct
from typing import Any

import msgpack

from aiodist.wire.limits import MAX_ADDRESSES, MAX_MEMBERS, MAX_METADATA, MAX_NAME, MAX_REPLY
from aiodist.wire.schema import pack

_VARIES = re.compile(r"((?:[0-9a-f]{2}){6,40})|(?<![0-9])(0|[1-9][0-9]{0,4})(?![0-9])")
"""What differs from text to text: hexadecimal bytes, and decimal numbers."""

_HEX, _NUMBER = "\0", "\1"
"""The holes of a shape: for bytes, followed by a character with their number; for a number of two
bytes."""

_HOLE = re.compile("(\0.|\1)", re.DOTALL)
_TWO_BYTES = Struct(">H")

_PER_SECOND = 100
_MOST_SECONDS = 2.0**40
"""Times travel as whole numbers if all are multiples of 1 / _PER_SECOND and below _MOST_SECONDS."""


def pack_rows(rows: Sequence[Sequence[Any]]) -> bytes:
    """Pack rows of one length, of values that msgpack knows. Raises TypeError for other values."""
    columns = [_packed(column) for column in zip(*rows, strict=True)]
    return zlib.compress(pack([len(rows), columns]))


def unpack_rows(data: bytes) -> list[list[Any]]:
    """Unpack rows. Raises ValueError for bytes that `pack_rows` did not make.

    Takes no more memory than the largest reply, whatever `data` would become.
    """
    try:
        # The longest arrays are lists in metadata.
        count, columns = msgpack.unpackb(
            _inflated(data), max_array_len=MAX_METADATA, max_map_len=MAX_MEMBERS, max_ext_len=0
        )
        if not 0 <= count <= MAX_MEMBERS:
            raise ValueError(f"{count} rows")
        unpacked = [_unpacked(column) for column in columns]
        if any(len(column) != count for column in unpacked):
            raise ValueError("columns of different lengths")
    except Exception as error:  # msgpack, zlib and forged types raise a dozen types
        raise ValueError(f"rows as columns, not {type(error).__name__}: {error}") from None
    return [list(row) for row in zip(*unpacked, strict=True)]


def _inflated(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(data, MAX_REPLY)
    if not inflater.eof or inflater.unused_data:
        raise ValueError(f"not one stream of at most {MAX_REPLY} bytes")
    return inflated


def _packed(column: Sequence[Any]) -> list[Any]:
    """Return how a column is packed, and the packed column."""
    # A way of packing is used only if it gives back exactly what it was given. Types are compared
    # exactly (True is not 1, and 1.0 is not 1). Times that are not hundredths, and texts with the
    # characters for holes, travel as they are.
    kinds = {type(value) for value in column}
    if kinds == {int}:
        return ["numbers", _steps(column)]
    if kinds == {float} and all(abs(time) < _MOST_SECONDS for time in column):
        parts = [round(time * _PER_SECOND) for time in column]
        if all(part / _PER_SECOND == time for part, time in zip(parts, column, strict=True)):
            return ["times", _steps(parts)]
    if kinds == {str} and not any(_HEX in text or _NUMBER in text for text in column):
        return ["texts", *_taken_apart(column)]
    if kinds == {tuple}:
        # All first texts, then all second texts, because these are alike.
        longest = max(map(len, column))
        padded = [texts + ("",) * (longest - len(texts)) for texts in column]
        positions = [_packed(texts) for texts in zip(*padded, strict=True)]
        return ["lists", _steps([len(texts) for texts in column]), positions]
    return ["values", list(column)]


def _unpacked(column: list[Any]) -> Sequence[Any]:
    kind, *parts = column
    return _UNPACK[kind](*parts)


def _steps(numbers: Sequence[int]) -> list[int]:
    """Return the first number, and the step to each further one."""
    return [*numbers[:1], *[after - before for before, after in pairwise(numbers)]]


def _numbers(steps: list[int]) -> list[int]:
    return list(accumulate(steps))


def _times(steps: list[int]) -> list[float]:
    return [part / _PER_SECOND for part in _numbers(steps)]


def _taken_apart(texts: Sequence[str]) -> tuple[list[str], list[int], bytes]:
    """Return the shapes of texts, the shape of each text, and the bytes that fill the holes.

    For each shape, the first hole of all its texts comes first, then the second, because equal
    holes are alike.
    """
    filled: dict[str, list[list[bytes]]] = {}
    shaped: list[str] = []
    for text in texts:
        fillings: list[bytes] = []
        shaped.append(_VARIES.sub(partial(_take, fillings), text))
        filled.setdefault(shaped[-1], []).append(fillings)
    numbers = {shape: number for number, shape in enumerate(filled)}
    varying = [
        b"".join(hole) for fillings in filled.values() for hole in zip(*fillings, strict=True)
    ]
    return list(filled), [numbers[shape] for shape in shaped], b"".join(varying)


def _take(fillings: list[bytes], found: re.Match[str]) -> str:
    digits, number = found.groups()
    if digits is not None:
        fillings.append(bytes.fromhex(digits))
        return _HEX + chr(len(digits) // 2)
    if int(number) > 0xFFFF:
        return found.group()
    fillings.append(_TWO_BYTES.pack(int(number)))
    return _NUMBER


def _texts(shapes: list[str], which: list[int], varying: bytes) -> list[str]:
    if any(len(shape) > MAX_NAME for shape in shapes):
        raise ValueError(f"a text of more than {MAX_NAME} characters")
    counts = Counter(which)
    data = memoryview(varying)
    made: list[Iterator[str]] = []
    for number, shape in enumerate(shapes):
        parts: list[Iterable[str]] = []
        for part in _HOLE.split(shape):
            width = ord(part[1]) if part.startswith(_HEX) else 2 * (part == _NUMBER)
            hole, data = data[: width * counts[number]], data[width * counts[number] :]
            if len(hole) < width * counts[number]:
                raise ValueError("too little of what varies")
            if part == _NUMBER:
                parts.append([str(one) for (one,) in _TWO_BYTES.iter_unpack(hole)])
            elif width:
                parts.append([hole[at : at + width].hex() for at in range(0, len(hole), width)])
            else:
                parts.append(repeat(part, counts[number]))
        made.append(map("".join, zip(*parts, strict=True)))
    if data:
        raise ValueError("too much of what varies")
    return [next(made[number]) for number in which]


def _lists(steps: list[int], positions: list[list[Any]]) -> list[list[str]]:
    if len(positions) > MAX_ADDRESSES:
        raise ValueError(f"{len(positions)} texts in a list")
    lengths = _numbers(steps)
    if not positions:
        return [[] for _ in lengths]
    padded = zip(*map(_unpacked, positions), strict=True)
    return [list(texts[:length]) for texts, length in zip(padded, lengths, strict=True)]


_UNPACK: dict[str, Callable[..., Sequence[Any]]] = {
    "numbers": _numbers,
    "times": _times,
    "texts": _texts,
    "lists": _lists,
    "values": list,
}
