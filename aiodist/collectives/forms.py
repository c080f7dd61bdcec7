"""Forms compare a call with one before it as fast as possible, for calls of a few microseconds.

`kinds.kind_of` can describe any call, so that its recipe can be found, but needs one to three
microseconds. A *form* is made from one call. It only checks whether another call is like that one:
the same objects as roots and operators, arrays of the same dtype and shape, the same keys, numbers
and strings. Other calls go the slow way, which also finds calls that are equal in other respects.

A form keeps none of the arrays that it was made from. It checks each new array by its type, dtype
and shape, which numpy has at hand. If an array is only shown to others, it may be read-only and
need not be contiguous, because its bytes are copied in order.

The compiled part has forms of its own (`core.Caller.know`), which are made from descriptions
(`aiodist.buffers.descriptions`). They also know tensors, and places for results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np

from aiodist.buffers.descriptions import WORDS
from aiodist.buffers.packed_numbers import NUMBERS, packed
from aiodist.collectives.templates import Template

Matches = Callable[[Any, list[bytes]], bool]
"""Whether a value is like the known one. If so, the data to show is added to the list."""


Form = Callable[..., tuple[Any, Any] | None]
"""Lays a call out as `Recipe.lay_out` does. It takes the arguments as a tuple, then one by one.
Returns None if the call is not like the known one."""


_float_bits = struct.Struct("d").pack
_complex_bits = struct.Struct("dd").pack


def said(word: Any) -> Any:
    """Return a key for `word`, which is one of WORDS: keys are equal if the words are the same."""
    # Floats are compared by their bits, because 0.0 == -0.0, and all NaNs have the same text.
    cls = type(word)
    if cls is float:
        return _float_bits(word)
    return _complex_bits(word.real, word.imag) if cls is complex else word


def showing(
    template: Template, value: Any, matches: Matches | None
) -> Callable[[Any], bytes | None] | None:
    """Return a function from a value like `value` to the bytes that `template` shows of it.

    The function returns None for any other value. The result is None if not all of `value` is
    shown, or if `matches` is None.
    """
    parts, found, order = template.parts(), list[bytes](), template.order
    if matches is None or not matches(value, found) or len(found) != len(template.gaps):
        return None

    def show(x: Any) -> bytes | None:
        data: list[bytes] = []
        if not matches(x, data):
            return None
        parts[1::2] = [data[at] for at in order] if order else data
        return b"".join(parts)

    return show


def placing(place: Any) -> Matches | None:
    """Return a check for arrays like `place` to write to. It shows no data.

    None if `place` is no numpy array.
    """
    if type(place) is not np.ndarray:
        return None
    dtype, shape = place.dtype, place.shape
    return lambda x, data: (
        type(x) is np.ndarray and x.dtype is dtype and x.shape == shape and x.flags.carray
    )


def matching(value: Any) -> Matches | None:
    """Return a check for values like this one.

    None if it contains anything but words and numpy arrays.
    """
    cls = type(value)
    if cls is np.ndarray:
        dtype, shape = value.dtype, value.shape

        def array(x: Any, data: list[bytes]) -> bool:
            if type(x) is np.ndarray and x.dtype is dtype and x.shape == shape:
                data.append(x.tobytes())
                return True
            return False

        return array
    if cls in NUMBERS:

        def number(x: Any, data: list[bytes]) -> bool:
            if type(x) is not cls or (found := packed(x)) is None:
                return False
            data.append(found)
            return True

        return number if packed(value) is not None else None
    if cls in WORDS:
        text = said(value)
        return lambda x, data: x is value or (type(x) is cls and said(x) == text)
    if cls not in (dict, list, tuple):
        return None
    keys = [*value] if cls is dict else None
    known: Any = cls
    inner = [m for each in (value if keys is None else value.values()) if (m := matching(each))]
    if len(inner) < len(value):
        return None

    def tree(x: Any, data: list[bytes]) -> bool:
        if type(x) is not known or len(x) != len(inner):
            return False
        if keys is not None:
            # By identity, because an equal string may be of another type.
            if not all(map(is_, x, keys)):
                return False
            x = x.values()
        # A plain loop, because `all` of a generator, or a strict `zip`, would double the time.
        for each, matches in zip(x, inner):  # noqa: B905, SIM110
            if not matches(each, data):
                return False
        return True

    return tree
