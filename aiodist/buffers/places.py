"""Memory of results, and memory that is read meanwhile: one rule for memory that a call gets twice.

If places of different values share memory, the call is refused (`check`), because no order of
writing would be right. Inputs may overlap with outputs: the result is as if all inputs had been
read before anything was written. If that would not hold by itself, the input is copied first
(`keep_apart`). This is rare, and the other ranks cannot tell.

One kind of sharing is common and costs nothing: a value that lies at its own place on its own rank
(`MPI_IN_PLACE`). Writing there changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import overlaps
from aiodist.buffers.arrays import UserArray, check_writable, plain, view
from aiodist.buffers.encoding import Encoded
from aiodist.buffers.tokens import MAX_DEPTH, NO_ARRAYS, TOO_DEEP

Memory = NDArray[Any]


def leaves_of(value: Any, depth: int = 0) -> list[Any]:
    """Return the leaves of a tree. Raises ValueError if it is too deep.

    A tree that contains itself would never end.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        found: list[Any] = []
        for item in value:
            if type(item) in NO_ARRAYS:  # without a call for each, because there may be thousands
                found += () if item is None else (item,)
            else:
                found += leaves_of(item, depth + 1)
        return found
    return [] if value is None else [value]


def check(places: Sequence[Any], name: str) -> None:
    """Raise ValueError if two of `places` share memory. Each is an array or a tree of arrays.

    One tree may have an array more than once, as tied weights are, because both get the same data.
    """
    found = [(slot, array.base) for slot, place in enumerate(places) for array in _arrays(place)]
    for one, other in overlaps.meetings([array for _, array in found]):
        (slot, a), (second, b) = found[one], found[other]
        if slot != second:
            raise ValueError(
                f"{name}[{slot}] and {name}[{second}] share memory: give each value a place of its "
                "own"
            )
        if not overlaps.alike(a, b):
            raise ValueError(
                f"{name}: two of its arrays share a part of their memory: give each of them memory "
                "of its own"
            )


def check_tree(place: Any, name: str) -> None:
    """Raise ValueError if arrays of one tree share a part of their memory: see `check`."""
    if isinstance(place, (list, tuple, dict)):
        check([place], name)


def check_out(out: Any) -> None:
    """Raise as `check_tree` and `arrays.check_writable` do, unless a value can be written to
    `out`."""
    # Most are plain, and this is faster than below.
    if out is None or (type(out) is np.ndarray and out.flags.carray) or plain(out) is not None:
        return
    for array in _arrays(out):
        check_writable(array, "out")
    check_tree(out, "out")


def meet(value: Any, place: Any) -> bool:
    """Tell whether arrays of a `value`, which is read, overlap with a `place`, which is written."""
    return _met([array.base for array in _arrays(value)], _arrays(place))


def keep_apart(
    values: Sequence[Encoded],
    out: Any,
    places: Callable[[], Mapping[int, Any]],
    own: Encoded | None = None,
    at: int = 0,
) -> bool:
    """Copy those arrays of `values` that overlap with `out`. Returns whether there were any.

    Results go to `out`. `own` is the value that goes to ``places()[at]``: each of its arrays may
    lie in its own place.
    """
    memories = [[np.frombuffer(buffer, np.uint8) for buffer in value.buffers] for value in values]
    # Nearly always nothing overlaps, and the parts of `out` do not matter.
    if not _met([memory for each in memories for memory in each], _arrays(out)):
        return False
    slots = {slot: _arrays(place) for slot, place in places().items()}
    mine = [array for array in slots.pop(at, ()) if array.base.nbytes]
    others = [array for arrays in slots.values() for array in arrays]
    copied = False
    for value, each in zip(values, memories, strict=True):
        for index, memory in enumerate(each):
            rest = [*others, *mine]
            if value is own and index < len(mine) and _is_in_place(memory, mine[index]):
                rest = [*others, *mine[:index], *mine[index + 1 :]]
            if _met([memory], rest):
                value.buffers[index] = memory.copy().data
                copied = True
    return copied


def _met(read: Sequence[Memory], written: Sequence[UserArray]) -> bool:
    """Tell whether anything that is read overlaps with something that is written."""
    count = len(written)
    pairs = overlaps.meetings([array.base for array in written], read)
    return any(other >= count for _, other in pairs)


def _is_in_place(memory: Memory, array: UserArray) -> bool:
    """Tell whether the memory that is read is the memory that is written, byte for byte."""
    return array.is_flat and overlaps.bounds(array.base) == overlaps.bounds(memory)


def _arrays(place: Any) -> list[UserArray]:
    """Return the host's arrays in a place. The caller refuses other objects, or sends them
    elsewhere."""
    found: list[UserArray] = []
    for leaf in leaves_of(place):
        if type(leaf) in NO_ARRAYS:
            continue
        try:
            array = view(leaf, "out")
        except (TypeError, ValueError):
            continue
        if array is not None and array.kind != "scalar":
            found.append(array)
    return found
