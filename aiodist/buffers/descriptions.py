"""Descriptions of values, from which the compiled part knows later ones.

`aiodist.collectives.forms` says what forms are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from aiodist.buffers import tensors
from aiodist.buffers.packed_numbers import NUMBERS, packed

WORDS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""The types that values may contain besides arrays."""

AN_ARRAY, A_TENSOR, A_NUMBER, A_WORD, A_TREE = range(5)
"""What a part of a description is."""

Part = tuple[int, Any, Any, bool]
"""A part of the arguments.

This is what it is, and then its dtype, its type or the object itself. Then comes an array like it,
or the keys and parts of a list or dict. The last item says whether the result goes there.
"""


class KnownCall(NamedTuple):
    """A call as the compiled part knows it: see `core.Caller.know`.

    `args` describes the arguments. `result` is the number of the argument that is the result, or
    -1. If `is_apart`, no array may share memory with a place. Otherwise no two places may.
    """

    args: list[Part]
    result: int = -1
    is_apart: bool = False


def word(x: object) -> Part:
    """Describe an argument that has to be this object."""
    return A_WORD, x, None, False


def described(value: Any, *, is_place: bool = False) -> Part | None:
    """Describe a value, or a place for the result.

    None if it contains anything but words, arrays in the byte order of this machine, and tensors,
    or an int of more than 64 bits, because smaller ones lie elsewhere.
    """
    cls = type(value)
    if cls is np.ndarray:
        return (AN_ARRAY, value.dtype, value, is_place) if value.dtype.isnative else None
    if cls is tensors.plain_type():
        return A_TENSOR, value, None, is_place
    if cls in NUMBERS and not is_place:
        return None if packed(value) is None else (A_NUMBER, cls, None, False)
    if cls in WORDS:
        return None if is_place else word(value)
    if cls not in (dict, list, tuple):
        return None
    keys = (*value,) if cls is dict else None
    parts: list[Part] = []
    for each in value if keys is None else value.values():
        part = described(each, is_place=is_place)
        if part is None:
            return None
        parts.append(part)
    return A_TREE, cls, (keys, parts), False


def has_tensors(parts: Iterable[Part]) -> bool:
    """Say whether there are places in tensors among the described `parts`."""
    return any(
        has_tensors(more[1]) if kind == A_TREE else is_place and kind == A_TENSOR
        for kind, _, more, is_place in parts
    )
