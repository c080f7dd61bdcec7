"""Whether a call is like one before it, in the shortest way: for calls of some microseconds.

`express.kind_of` describes any call, so that a recipe is found by what it says; that takes one to
three microseconds. A *form* is made of one call, and asks of further ones no more than whether they
are like that: the same objects as roots and operators, arrays with the same dtype and shape, the
same keys, numbers and strings. What is not goes the longer way, which knows what else is equal.

A form keeps none of the arrays that it was made of. It looks at each anew, by what numpy has at
hand: type, dtype and shape. An array that is only shown may lie anyhow and may be read-only, for
its bytes are copied, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np

from aiodist.collectives.templates import Template

WORDS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""The types of what is in values beside arrays."""

Matches = Callable[[Any, list[bytes]], bool]
"""Whether something is like the value that is known. What is shown of it is added to the list."""


Form = Callable[..., tuple[Any, Any] | None]
"""What lays a call out as `Recipe.lay_out` does, given its arguments as a tuple, and one by one.
None: the call is not like those."""


_float_bits = struct.Struct("d").pack
_complex_bits = struct.Struct("dd").pack


def said(word: Any) -> Any:
    """Something that is equal if `word`, which is one of WORDS, is the same."""
    # By their bits, because 0.0 and -0.0 are equal as numbers, and all NaNs alike as texts.
    cls = type(word)
    if cls is float:
        return _float_bits(word)
    return _complex_bits(word.real, word.imag) if cls is complex else word


def showing(
    template: Template, value: Any, matches: Matches | None
) -> Callable[[Any], bytes | None] | None:
    """What gives all that is shown, by that template, for something like `value`; and None for
    anything else. None: not all of `value` is shown, or nothing `matches`."""
    parts, found = template.parts(), list[bytes]()
    if matches is None or not matches(value, found) or len(found) != len(template.gaps):
        return None

    def show(x: Any) -> bytes | None:
        data: list[bytes] = []
        if not matches(x, data):
            return None
        parts[1::2] = data
        return b"".join(parts)

    return show


def placing(place: Any) -> Matches | None:
    """What finds arrays like `place` to write to, of which nothing is shown. None: it is none of
    numpy."""
    if type(place) is not np.ndarray:
        return None
    dtype, shape = place.dtype, place.shape
    return lambda x, data: (
        type(x) is np.ndarray and x.dtype is dtype and x.shape == shape and x.flags.carray
    )


def matching(value: Any) -> Matches | None:
    """What finds values like this one. None: it has something else than words, and arrays of numpy
    in the byte order of this machine."""
    cls = type(value)
    if cls is np.ndarray:
        dtype, shape = value.dtype, value.shape

        def array(x: Any, data: list[bytes]) -> bool:
            if type(x) is np.ndarray and x.dtype is dtype and x.shape == shape:
                data.append(x.tobytes())
                return True
            return False

        return array if dtype.isnative else None
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
            # By identity: another string that is equal may be of another type.
            if not all(map(is_, x, keys)):
                return False
            x = x.values()
        # Plain, as `all` of a generator, or to have `zip` compare lengths, costs as much again.
        for each, matches in zip(x, inner):  # noqa: B905, SIM110
            if not matches(each, data):
                return False
        return True

    return tree
