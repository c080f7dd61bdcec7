"""Where results go, and what is read meanwhile: the one rule for memory that a call gives twice.

A result has one place. So places of different values that share memory are refused (`check`): no
order of writing them would be right. What is *read* may lie anywhere, also where results go: the
result is as if it had been read before anything was written. Where that would not be so by itself,
it is read from a copy (`keep_apart`); the others cannot tell, and it is rare.

One kind of sharing is common, and costs nothing: a value that lies where it would go on its own
rank (`MPI_IN_PLACE` to who knows MPI). What is written there is what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import overlaps
from aiodist.buffers.arrays import Array, view
from aiodist.buffers.encoding import Encoded
from aiodist.buffers.tokens import MAX_DEPTH, TOO_DEEP

Memory = NDArray[Any]


def leaves_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """What a tree is made of. Raises ValueError where it is deeper than values may be: one that
    contains itself would never end."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        for item in value:
            yield from leaves_of(item, depth + 1)
    elif value is not None:
        yield value


def check(places: Sequence[Any], name: str) -> None:
    """Raise ValueError where two of `places`, each an array or a tree of arrays, share memory. In
    one tree an array may be found more than once, as weights that are tied are: what comes there is
    the same each time."""
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
    """Raise ValueError where arrays of one tree share a part of their memory: see `check`."""
    if isinstance(place, (list, tuple, dict)):
        check([place], name)


def meet(value: Any, place: Any) -> bool:
    """Whether arrays of a `value`, which is read, lie in a `place`, which is written."""
    return _met([array.base for array in _arrays(value)], _arrays(place))


def keep_apart(
    values: Sequence[Encoded],
    out: Any,
    places: Callable[[], Mapping[int, Any]],
    own: Encoded | None = None,
    at: int = 0,
) -> bool:
    """Have those arrays of `values` copied that lie in `out`, where results go; whether there were
    any.

    `own`: the one of them that goes to ``places()[at]`` itself: its arrays may lie there, each
    where it goes.
    """
    memories = [[np.frombuffer(buffer, np.uint8) for buffer in value.buffers] for value in values]
    # Nearly always nothing meets, and then nobody need know which part of `out` is whose.
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


def _met(read: Sequence[Memory], written: Sequence[Array]) -> bool:
    """Whether anything that is read lies in what is written."""
    count = len(written)
    pairs = overlaps.meetings([array.base for array in written], read)
    return any(other >= count for _, other in pairs)


def _is_in_place(memory: Memory, array: Array) -> bool:
    """Whether what is read there is what is written there, byte for byte."""
    return array.is_flat and overlaps.bounds(array.base) == overlaps.bounds(memory)


def _arrays(place: Any) -> list[Array]:
    """The arrays of the host in a place. What is none is refused, or sent somewhere else, by
    whoever goes on with it."""
    found: list[Array] = []
    for leaf in leaves_of(place):
        try:
            array = view(leaf, "out")
        except (TypeError, ValueError):
            continue
        if array is not None and array.kind != "scalar":
            found.append(array)
    return found
