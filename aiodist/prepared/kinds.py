"""Of which kind a call is: calls of one kind share a recipe (`aiodist.prepared.express`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.arrays import Flat
from aiodist.buffers.descriptions import WORDS
from aiodist.buffers.packed_numbers import NUMBERS, packed
from aiodist.buffers.tokens import FEW
from aiodist.collectives.forms import said
from aiodist.types import ReduceOp

WIDE = 1024
"""The most items of a container that `kind_of` looks at."""
DEEP = 4
"""The most levels of nested containers that `kind_of` looks at."""


def kind_of(
    op: str, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
) -> tuple[Any, ...] | None:
    """Return a key that calls of `op` share if one recipe fits them all.

    The key has the dtypes, shapes and types of the value, which is the first of `args`, and of
    `out`, if the last one is that. It has the other arguments as they are. The memory of arrays is
    added to `flats`, and so are the bytes of numbers. Everything else in the value is added to
    `words`, as objects that are equal if the originals are. None: something in the call cannot be
    prepared.
    """
    kinds: list[Any] = [op]
    last = 0 if op == "broadcast" else len(args) - 1
    for index, each in enumerate(args):
        cls = type(each)
        if each is None or (index and cls is int):
            kinds.append(each)
        elif cls is ReduceOp and index and each.function is None:
            kinds.append(id(each))
        elif not index or index == last:
            kind = _kind(each, flats, None if index else words)
            if kind is None:
                return None
            kinds.append(kind)
        else:
            return None
    return tuple(kinds)


def _kind(x: Any, flats: list[Flat], words: list[Any] | None, depth: int = 0) -> Any:
    """Return the part of the key for `x`. `words`: None if `x` may have arrays only."""
    cls = type(x)
    if cls is np.ndarray:  # the most common case
        # Recipes move bytes, so bytes in another order would be taken for other numbers.
        if not (x.flags.carray and x.dtype.isnative):
            return None
        flats.append(x.reshape(-1))
        return x.dtype, x.shape
    if cls in WORDS:
        if words is None:
            return None
        if cls not in NUMBERS:
            words.append(said(x))
        elif len(flats) >= FEW:
            return None  # no template has so many numbers
        elif (number := packed(x)) is not None:
            flats.append(np.frombuffer(number, np.uint8))
        else:
            words.append(x)
            return cls, "wide"  # its length depends on its value
        return cls
    kinds: list[Any] = [cls]
    if cls is dict:
        kinds += x
        if {*map(type, x)} - {str}:
            return None
        x = x.values()
    elif not (cls is list or cls is tuple):
        flat = arrays.plain(x)
        if flat is None:
            return None
        flats.append(flat)
        return x.dtype, x.shape
    if len(x) > WIDE or depth == DEEP:
        return None
    for each in x:
        kind = _kind(each, flats, words, depth + 1)
        if kind is None:
            return None
        kinds.append(kind)
    return tuple(kinds)
