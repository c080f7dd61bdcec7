"""Memory of results, and memory that is read meanwhile: one rule for memory that a call gets twice.

If places of different values share memory, the call is refused (`check`), because no order of
writing would be right. Inputs may overlap with outputs: the result is as if all inputs had been
read before anything was written. If that would not hold by itself, the input is copied first
(`overlapping`). This is rare, and the other ranks cannot tell. All of this holds for arrays on
devices, too, because their addresses are enough for it.

One kind of sharing is common and costs nothing: a value that lies at its own place on its own rank
(`MPI_IN_PLACE`). Writing there changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import overlaps, tensors
from aiodist.buffers.arrays import UserArray, check_writable, plain, view
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.tokens import MAX_DEPTH, NO_ARRAYS, TOO_DEEP
from aiodist.buffers.values import parse

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


def overlapping(
    values: Sequence[Sequence[Any]],
    out: Any,
    places: Callable[[], Mapping[int, Any]],
    own: int | None = None,
    at: int = 0,
    meta: bytes = b"",
) -> list[Any]:
    """Return those arrays of `values` that overlap with `out`, so that they have to be copied.

    Each value is a list of byte views and of arrays on devices, in order, without empty ones.
    Results go to `out`. ``values[own]``, whose metadata is `meta`, goes to ``places()[at]``. Each
    of its arrays may lie in its own place.
    """
    memories = [[_memory(array) for array in value] for value in values]
    # Nearly always nothing overlaps, and the parts of `out` do not matter.
    if not _met([memory for each in memories for memory in each], _arrays(out)):
        return []
    given = places()
    targets = _targets(meta, given.get(at))
    mine = _arrays(given.get(at)) if targets is None else [x for x in targets if x.base.nbytes]
    others = [x for slot, place in given.items() if slot != at for x in _arrays(place)]
    found: list[Any] = []
    for number, each in enumerate(memories):
        for index, memory in enumerate(each):
            rest = [*others, *mine]
            is_own = number == own and targets is not None and index < len(mine)
            if is_own and _is_in_place(memory, mine[index]):
                rest = [*others, *mine[:index], *mine[index + 1 :]]
            if _met([memory], rest):
                found.append(values[number][index])
    return found


def _memory(array: Any) -> Memory:
    on_device = _on_device(array)
    return np.frombuffer(array, np.uint8) if on_device is None else on_device.base


def _met(read: Sequence[Memory], written: Sequence[UserArray]) -> bool:
    """Tell whether anything that is read overlaps with something that is written."""
    count = len(written)
    pairs = overlaps.meetings([array.base for array in written], read)
    return any(other >= count for _, other in pairs)


def _targets(meta: bytes, place: Any) -> list[UserArray] | None:
    """Return where each array of the value with this metadata goes in a place.

    None if the value does not fit, or if arrays of a tree are on devices.
    """
    if not isinstance(place, (list, tuple, dict)):
        return _arrays(place)
    value = parse(meta, allow_pickle=True)
    try:
        value.allocate(place)
    except (TypeError, ValueError):
        return None
    return cast(list[UserArray], value.targets)


def _is_in_place(memory: Memory, array: UserArray) -> bool:
    """Tell whether the memory that is read is the memory that is written, byte for byte."""
    return array.is_flat and overlaps.bounds(array.base) == overlaps.bounds(memory)


def _arrays(place: Any) -> list[UserArray]:
    """Return the arrays in a place. The caller refuses other objects."""
    found: list[UserArray] = []
    for leaf in leaves_of(place):
        if type(leaf) in NO_ARRAYS:
            continue
        try:
            array = _on_device(leaf) or view(leaf, "out")
        except (TypeError, ValueError):
            continue
        if array is not None and array.kind != "scalar":
            found.append(array)
    return found


def _on_device(value: Any) -> UserArray | None:
    """Return an array on a device, whose elements must not be accessed. None for other values.

    Raises TypeError or ValueError for an array that does not travel.
    """
    device = getattr(value, "__aiodist_device__", None)
    if device is not None:
        return UserArray(value, "device", device.describe(value)[0], device.layout(value), None)
    if getattr(value, "is_cuda", False) is not True:
        return None
    name = tensors.dense_name(value)
    return UserArray(value, "device", name, tensors.strided(value, carrier(name)), None)
