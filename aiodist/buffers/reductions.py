"""What a reduction works on: a user's `x` as flat vectors, one for each dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np

from aiodist.buffers import arrays, overlaps
from aiodist.buffers.arrays import Flat, UserArray, check_same, check_writable, view, writable
from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.paths import Path, Where, as_list
from aiodist.buffers.scalars import Scalar, check_scalar
from aiodist.buffers.vector import Vector
from aiodist.types import ReduceOp

_SHOWN: Final = 4
"""Up to this many arrays are shown one by one in a signature."""


@dataclass(slots=True)
class DtypeGroup:
    """All arrays of one dtype, joined.

    `x` is the input and `out` the result. Without slots they have the same length, and each array
    of one is either the same memory as its counterpart or disjoint from all of the other. With
    slots, `out` is the own slot, disjoint from `x`. `bounds` has the index in `x` at which each
    slot begins, and the end of the last; without slots `[0, len(x)]`. `kernel` is the operator. One
    that is not `sliceable` has single flat arrays as `x` and `out`, and applies to the own slot
    alone.
    """

    name: str
    kernel: Kernel | CustomKernel
    x: Vector
    out: Vector
    bounds: list[int]


class Operand:
    """The input of a reduction and the memory of its result.

    `kind` is "arrays", to be reduced `groups` by group; "scalar", a number in `value`; or
    "scalars", a list of numbers in `value`, one for each slot. `signature` is what must be the same
    on all ranks, fit for texts. `nbytes` are the bytes of the arrays, or 8. `finish()` returns the
    result when `groups[…].out` is filled.
    """

    __slots__ = ("_given", "_listed", "_own", "groups", "kind", "nbytes", "signature", "value")

    def __init__(
        self,
        kind: Literal["arrays", "scalar", "scalars"],
        signature: str,
        value: Scalar | list[Scalar] | None = None,
    ) -> None:
        self.kind = kind
        self.signature = signature
        self.value = value
        self.nbytes = 8
        self.groups: list[DtypeGroup] = []
        self._own: list[_InputPart] = []  # the arrays whose result this rank gets
        self._given: Any = None  # what `finish` returns, if that is the user's own
        self._listed = False  # whether it returns a list

    @staticmethod
    def of(x: object, op: ReduceOp, *, out: object = None, in_place: bool) -> Operand:
        """Make an operand of `x`: an array, a flat list of arrays, or a number.

        The result goes to `out` if it is given. Otherwise it goes into `x` if `in_place` is set and
        the array can be written, else to new arrays. Raises TypeError or ValueError, naming the
        place, if `x` cannot be reduced, if an array to write in place is read-only, or if `out`
        does not fit.
        """
        # Nearly every call has one array, in place. The general way makes lists, parts and groups
        # by dtype, which one array does not need.
        if in_place and out is None and op.function is None:
            simple = Operand._of_one_flat(x, op)
            if simple is not None:
                return simple
        if _is_scalar(x):
            _refuse_out(out)
            value = check_scalar(x, op)
            return Operand("scalar", type(value).__name__, value)
        items = _arrays(x, "x")
        operand = Operand("arrays", _signature(items, joined=_is_list(x)))
        if out is not None:
            places = _fitting(items, out, _is_list(x), "x")
        else:
            places = [
                _place(item, in_place, Path("x", index) if _is_list(x) else "x")
                for index, item in enumerate(items)
            ]
        operand._build(op, [items], 0, places)
        operand._expect(x, out)
        return operand

    @staticmethod
    def of_slots(xs: object, op: ReduceOp, *, rank: int, size: int, out: object = None) -> Operand:
        """Make an operand of `size` slots, as `split_slots` takes them. The result is that of slot
        `rank`.

        A slot is an array, a flat list of arrays, or a number. The result goes to `out` if it is
        given, else to new arrays. Raises as `of` and `split_slots`.
        """
        slots = split_slots(xs, size)
        numbers = [*map(_is_scalar, slots)]
        if all(numbers):
            _refuse_out(out)
            values = [check_scalar(slot, op) for slot in slots]
            names = ", ".join([type(value).__name__ for value in values])
            return Operand("scalars", f"slots [{names}]", values)
        if any(numbers):
            raise TypeError(
                f"xs[{numbers.index(True)}] is a number and xs[{numbers.index(False)}] is not: "
                "give numbers for all ranks, or arrays for all"
            )
        items = [_arrays(slot, Path("xs", index)) for index, slot in enumerate(slots)]
        own = items[rank]
        texts = [_signature(slot, joined=len(slot) != 1) for slot in items]
        elements = sum([item.base.size for slot in items for item in slot])
        operand = Operand("arrays", f"slots {signature_of_list(texts, elements, 'slots')}")
        if out is not None:
            places = _fitting(own, out, _is_list(slots[rank]), f"slot {rank} of xs")
        else:
            places = [_place(item, False, "xs") for item in own]
        operand._build(op, items, rank, places)
        operand._expect(slots[rank], out)
        return operand

    def finish(self) -> Any:
        """Return the result, after all `out` vectors are filled: `x` or `out` if that was
        written."""
        for part in self._own:
            part.place.commit(part.staged)
        if self._given is not None:
            return self._given
        made = [
            part.place.value[()] if part.item.kind == "scalar" else part.place.value
            for part in self._own
        ]
        return made if self._listed else made[0]

    @staticmethod
    def _of_one_flat(x: object, op: ReduceOp) -> Operand | None:
        """Make the operand of the common case: one array, in place, as it is."""
        item = view(x, "x")
        if item is None or not item.is_flat or item.kind not in ("numpy", "torch"):
            return None
        check_writable(item, "x")
        flat = item.base.reshape(-1)
        vector = Vector.of(flat)
        operand = Operand("arrays", str(item))
        kernel = Kernel.of(op, item.name)
        operand.groups.append(DtypeGroup(item.name, kernel, vector, vector, [0, vector.length]))
        operand._own.append(_InputPart(0, item, flat))
        operand._given = x
        operand.nbytes = vector.nbytes
        return operand

    def _build(
        self, op: ReduceOp, slots: list[list[UserArray]], own: int, places: list[UserArray]
    ) -> None:
        """Make the groups. `places` are the places of the arrays of slot `own`."""
        parts = [
            _InputPart(index, item, item.read())
            for index, slot in enumerate(slots)
            for item in slot
        ]
        self._own = [part for part in parts if part.slot == own]
        for part, place in zip(self._own, places, strict=True):
            part.assign(place)
        if len(parts) > 1 or (parts and parts[0].place is not parts[0].item):
            _separate(parts, self._own, len(slots))
        for name in dict.fromkeys([part.item.name for part in parts]):
            named = [part for part in parts if part.item.name == name]
            self.groups.append(_group(op, name, named, own, len(slots)))
        if parts:
            self.nbytes = sum([group.x.nbytes for group in self.groups])

    def _expect(self, x: Any, out: Any) -> None:
        """Note what `finish` returns: `out`, `x` if all of it is written in place, or new
        arrays."""
        self._listed = _is_list(x)
        in_place = all(part.place is part.item for part in self._own)
        self._given = x if out is None and in_place else out


class _InputPart:
    """An array of the input.

    `x` has its elements. Arrays of the own slot have a `place` for the result, and a `target` that
    they are reduced into. `staged` is the target if that has to be copied to `place` in the end,
    else None.
    """

    __slots__ = ("item", "place", "slot", "staged", "target", "x")

    def __init__(self, slot: int, item: UserArray, x: Flat) -> None:
        self.slot = slot
        self.item = item
        self.x = x
        self.place = item
        self.target = x
        self.staged: Flat | None = None

    def assign(self, place: UserArray) -> None:
        if place is self.item:
            self.staged = None if place.is_flat else self.x
        else:
            self.place = place
            self.target, self.staged = place.stage()


def _separate(parts: list[_InputPart], own: list[_InputPart], slots: int) -> None:
    """Copy inputs that overlap with the memory of another array's result."""
    # The plan of a reduction writes parts of the result while other ranks still wait for parts of
    # the input. If one array's input is the place of another one's result, as in `reduce([a, b],
    # out=[b, a])`, what we send would depend on which frame came first. Such an input is copied
    # first: it is rare, and we would have to refuse it otherwise.
    #
    # An array that is its own target needs no copy, because plans are made for that. But two
    # results in one place have no right answer.
    targets = overlaps.Ranges([part.target for part in own if part.staged is None])
    # Staged results are written at the end. Even then data may have to be sent again, and it is
    # read from the input until its receiver has it.
    late = [part.place.base for part in own if part.staged is not None]
    if targets.overlap or (
        late and any(overlaps.meetings(late, [part.target for part in own if part.staged is None]))
    ):
        raise ValueError(
            "two of the arrays that the result goes to share memory: give each array once"
        )
    for part in parts:
        if slots == 1 and overlaps.same(part.x, part.target):
            continue
        # An input that is not flat was copied to be read.
        if targets.touch(part.x) or (
            part.item.is_flat and any(overlaps.shares(part.x, place) for place in late)
        ):
            part.x = part.x.copy()


def _group(op: ReduceOp, name: str, parts: list[_InputPart], own: int, slots: int) -> DtypeGroup:
    mine = [part for part in parts if part.slot == own]
    xs = [part.x for part in parts]
    sizes = [0] * slots
    for part in parts:
        sizes[part.slot] += len(part.x)
    kernel: Kernel | CustomKernel
    if op.function is None:
        kernel = Kernel.of(op, name)
    else:
        given = [part.item for part in (parts if op.elementwise else mine)]
        kernel = CustomKernel(op, name, [(item.kind, item.shape) for item in given])
    # A function that cannot take slices gets each array whole, in its own shape. So its arrays are
    # copied side by side (`CustomKernel` knows their bounds), and the plan does not cut.
    # `elementwise=True` avoids this copy.
    if not kernel.sliceable and len(parts) > 1:
        xs = [np.concatenate(xs)]
    if not kernel.sliceable and len(mine) > 1:
        outs = [_join(mine, np.empty(sizes[own], kernel.dtype))]
    else:
        outs = [part.target for part in mine]
    x = Vector(xs, kernel.dtype)
    same = len(xs) == len(outs) == 1 and xs[0] is outs[0]
    out = x if same else Vector(outs, kernel.dtype)
    return DtypeGroup(name, kernel, x, out, [0, *accumulate(sizes)])


def _join(parts: list[_InputPart], joined: Flat) -> Flat:
    """Stage the results of all parts in one array."""
    start = 0
    for part in parts:
        stop = start + len(part.x)
        part.target = part.staged = joined[start:stop]
        start = stop
    return joined


def _place(item: UserArray, in_place: bool, where: Where) -> UserArray:
    """Return the place of the result for `item` if there is no `out`."""
    if in_place and item.kind in ("numpy", "torch"):
        check_writable(item, where)
        return item
    return arrays.empty(item.kind, item.name, item.shape, where)


def _fitting(items: list[UserArray], out: object, joined: bool, what: str) -> list[UserArray]:
    """Return the arrays of `out`, after checking that they match `items`."""
    if not joined:
        places = [writable(out, "out")]
    elif isinstance(out, (list, tuple)) and len(out) == len(items):
        places = [writable(array, Path("out", index)) for index, array in enumerate(out)]
    else:
        got = f"{len(out)} items" if isinstance(out, (list, tuple)) else f"a {type(out).__name__}"
        raise ValueError(f"out: expected a list of {len(items)} arrays, as {what} is, got {got}")
    for index, (item, place) in enumerate(zip(items, places, strict=True)):
        where: Where = Path("out", index) if joined else "out"
        source: Where = Path(what, index) if joined else what
        check_same(str(source), item.name, item.shape, place, where)
    return places


def split_slots(xs: object, size: int) -> list[Any]:
    """Return the slots of `xs`, one for each rank.

    `xs` is a list or tuple of `size` items, or one array, which is cut along its first dimension as
    `numpy.array_split` does (into views of the same kind). Raises ValueError for another number of
    items or an array without dimensions, and TypeError for anything else.
    """
    if isinstance(xs, (list, tuple)):
        return check_slots(xs, size)
    array = view(xs, "xs")
    if array is None:
        raise TypeError(
            f"xs: expected a list of {size} slots, one a rank, or an array to split, "
            f"got {type(xs).__name__}{as_list(xs, 'xs')}"
        )
    if not array.shape:
        raise ValueError(f"xs: {array} has no dimension to split into {size} slots")
    whole: Any = xs if array.kind == "torch" else array.base
    each, more = divmod(array.shape[0], size)
    ends = list(accumulate([each + (rank < more) for rank in range(size)]))
    return [whole[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def check_slots(xs: Sequence[Any], size: int) -> list[Any]:
    """Raise ValueError unless there are `size` slots."""
    if len(xs) != size:
        raise ValueError(f"xs: expected {size} slots, one a rank, got {len(xs)}")
    return list(xs)


def _is_scalar(x: object) -> bool:
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def _is_list(x: object) -> bool:
    return isinstance(x, (list, tuple))


def _refuse_out(out: object) -> None:
    if out is not None:
        raise TypeError(
            "out: a number is returned, not written: leave out= away, or reduce an array"
        )


def _arrays(x: Any, where: Where) -> list[UserArray]:
    items = x if _is_list(x) else [x]
    found = []
    for index, item in enumerate(items):
        place = Path(where, index) if _is_list(x) else where
        array = view(item, place)
        if array is None:
            wanted = "an array" if _is_list(x) else "an array, a flat list of arrays or a number"
            hint = "" if _is_list(x) else as_list(x, where)
            if _is_scalar(item) or isinstance(item, range):
                hint = f": of a list of numbers, pass np.array({where})"
            raise TypeError(
                f"{place}: expected {wanted} to reduce, got {type(item).__name__}{hint}"
            )
        found.append(array)
    return found


def _signature(items: list[UserArray], *, joined: bool) -> str:
    if not joined:
        return str(items[0])
    return signature_of_list([str(item) for item in items], sum([i.base.size for i in items]))


def signature_of_list(texts: list[str], elements: int, what: str = "arrays") -> str:
    """Return what all ranks must agree on for a list of arrays, or of slots, given the text of
    each."""
    if len(texts) <= _SHOWN:
        return f"[{', '.join(texts)}]"
    digest = hashlib.blake2b(" ".join(texts).encode(), digest_size=6).hexdigest()
    return f"[{len(texts)} {what}, {_short(elements)} elements, #{digest}]"


def _short(count: float) -> str:
    """Shorten a count: 25600000 → 25.6M."""
    units = iter(("", "k", "M", "G", "T"))
    unit = next(units)
    while count >= 1000 and unit != "T":
        count /= 1000
        unit = next(units)
    return f"{count:.1f}".removesuffix(".0") + unit
