"""Collectives that reduce: all_reduce, reduce, reduce_scatter, scan, exscan.

Small arrays are reduced as a whole in few rounds. Large arrays are cut into slices, and all ranks
work on them at once. `aiodist.schedules.selection` decides which is which. In every plan each rank
hears from all others, or a phase comes first in which it does. Numbers are shared, and every rank
reduces all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup, Operand
from aiodist.buffers.scalars import Scalar, reduce_scalars
from aiodist.buffers.vector import align
from aiodist.collectives.numbers import pack, unpack
from aiodist.collectives.operators import confirm
from aiodist.collectives.templates import LENGTH
from aiodist.engine.operation import NoResult, Program, Start
from aiodist.engine.phase import Phase, prepared
from aiodist.errors import ProtocolError
from aiodist.phases import berths, lanes
from aiodist.phases.base import Call, Part, Place, share
from aiodist.phases.memories import Partials, Reductions, SmallReductions
from aiodist.schedules import direct_exchange, recursive_doubling
from aiodist.schedules.choose_reductions import (
    Shape,
    choose_all_reduce,
    choose_reduce,
    choose_reduce_scatter,
    choose_scan,
    goes_whole,
    is_gathered,
)
from aiodist.schedules.plan import Plan
from aiodist.schedules.selection import EAGER_LIMIT, Choice
from aiodist.types import ReduceOp
from aiodist.wire.frames import MAX_PAYLOAD, MAX_WHOLE

Can = Callable[[Place, Sequence[DtypeGroup]], bool]
MAX_RANKS_LISTING_NUMBERS = 128
"""With more ranks, the lists of numbers of all ranks do not fit into frames of one all-gather."""
POSTED_OF_TWO = MAX_PAYLOAD
"""The most bytes of an array that two ranks show each other whole, in one post or one frame. Each
then reduces all of it. No plan with fewer waits moves fewer bytes."""
LEAD = bytes(LENGTH)
"""Comes before the numbers in the blob of a reduce_scatter. Together with the length, which takes
as many bytes, it aligns the numbers, because aligned numbers of 8 bytes are reduced fastest."""
assert MAX_PAYLOAD + LENGTH + len(LEAD) <= MAX_WHOLE


def all_reduce(place: Place, x: Any, op: ReduceOp, out: Any) -> Call:
    """Make the call that reduces `x` on every rank."""
    operand = Operand.of(x, op, out=out, in_place=True)

    def program(on_lane: bool) -> Program:
        if operand.kind == "scalar":
            values = yield from _share_numbers(place, [operand.value], on_lane)
            total = _folded([value[0] for value in values], op)
            yield from confirm(place, op, on_lane)
            return total
        groups = operand.groups
        if goes_on_berths(place, groups, on_lane):
            on_lane = yield from berths.meet(place)
        yield from all_reduce_where(place, groups, on_lane)
        yield from confirm(place, op, on_lane)
        return operand.finish()

    posts = is_posted(place, operand.groups)
    gathers = not posts and has_berths(place, operand.groups, False)
    text = f"{op}, {operand.signature}"
    return _call(place, "all_reduce", text, program, operand, gathers=gathers, settles=not posts)


def all_reduce_where(place: Place, groups: Sequence[DtypeGroup], on_lane: bool) -> Part[None]:
    """Do an all_reduce, after it is decided whether it has a lane. All other choices how to do it
    are made here."""
    if on_lane and groups and lanes.can_reduce(place, groups):
        yield from lanes.all_reduce(place, groups)
        return
    yield from _over_links(place, groups, on_lane, choose_all_reduce)


def _over_links(
    place: Place,
    groups: Sequence[DtypeGroup],
    on_lane: bool,
    choose: Callable[..., Choice],
    *dst: int,
) -> Part[None]:
    """Reduce over links to all ranks or to one.

    Ranks that share memory also do this if they have no plan for such arrays and operators there.
    `choose` returns the plan for arrays that are cut into slices. `dst`: the rank that gets the
    result, if it is one.
    """
    if not on_lane and is_posted(place, groups):
        yield _small(place, groups, direct_exchange.all_reduce)
        return
    size, costs = place.size, place.costs
    sliceable = all(group.kernel.sliceable for group in groups)
    ordered = has_berths(place, groups, on_lane)
    if ordered and not sliceable:
        for group in groups:
            yield _small(place, [group], direct_exchange.all_reduce)
    elif goes_whole(_nbytes(groups), size, sliceable, costs):
        yield _small(place, groups)
    else:
        chosen = [choose(_shape(group, ordered), size, *dst, costs) for group in groups]
        yield from _run(place, groups, chosen, on_lane)


def is_posted(place: Place, groups: Sequence[DtypeGroup]) -> bool:
    """Whether each rank shows its whole value to all others, so that a post can carry it.

    This is only asked for reductions without a lane. Some ranks may post (see `post_express`) while
    others send frames.
    """
    if not place.may_post or len(groups) != 1:
        return False
    (group,) = groups
    kernel = group.kernel
    most = POSTED_OF_TWO if place.size == 2 else EAGER_LIMIT
    return isinstance(kernel, Kernel) and not kernel.loads and 0 < group.x.nbytes <= most


def shows_slots(place: Place, kernel: Kernel | CustomKernel, bounds: Sequence[int]) -> bool:
    """Whether a reduce_scatter of slots with these bounds can be posted: see `is_posted`."""
    if not (place.may_post and isinstance(kernel, Kernel) and not kernel.loads and bounds[-1]):
        return False
    if place.size == 2:
        one, other = (b - a for a, b in itertools.pairwise(bounds))
        return one == other and one * kernel.dtype.itemsize <= POSTED_OF_TWO
    # All slots are copied once and one of them is read, which is as much as on berths. The limit is
    # lower because over links all ranks would get all slots.
    return bounds[-1] * kernel.dtype.itemsize <= min(POSTED_OF_TWO, place.size * EAGER_LIMIT)


def shown_by(rank: int, bounds: Sequence[int]) -> tuple[int, int]:
    """Return the start and stop of the elements that `rank` shows in a reduce_scatter.

    `bounds` are those of the slots. The rank shows all slots, or with two ranks the other's slot.
    """
    if len(bounds) > 3:
        return 0, bounds[-1]
    return bounds[1 - rank], bounds[2 - rank]


def has_berths(
    place: Place, groups: Sequence[DtypeGroup], on_lane: bool, can: Can = lanes.can_reduce
) -> bool:
    """Whether a reduction without a lane is large enough for berths, if all ranks have some.

    Over links its plan is `ordered`, because nothing but time decides whether all have one. `can`
    says whether there are plans for it on a lane.
    """
    if on_lane or not place.may_post:
        return False
    return sum([group.x.nbytes for group in groups]) > EAGER_LIMIT and can(place, groups)


def goes_on_berths(place: Place, groups: Sequence[DtypeGroup], on_lane: bool) -> bool:
    """Whether a reduction of whole arrays gets berths because it is too large for a post."""
    return has_berths(place, groups, on_lane) and not is_posted(place, groups)


def reduce(place: Place, x: Any, dst: int, op: ReduceOp, out: Any) -> Call:
    """Make the call that reduces `x` at rank `dst`."""
    here = place_at(place, x, dst, out) is not None
    # Other ranks have no result, so their `x` is only read.
    operand = Operand.of(x, op, out=out, in_place=here)

    def program(on_lane: bool) -> Program:
        if operand.kind == "scalar":
            values = yield from _share_numbers(place, [operand.value], on_lane)
            total = _folded([value[0] for value in values], op) if here else None
            yield from confirm(place, op, on_lane)
            return total
        groups = operand.groups
        if goes_on_berths(place, groups, on_lane):
            on_lane = yield from berths.meet(place)
        yield from reduce_where(place, groups, on_lane, dst=dst)
        yield from confirm(place, op, on_lane)
        return operand.finish() if here else None

    text = f"{op}, dst={dst}, {operand.signature}"
    posts = is_posted(place, operand.groups)
    gathers = not posts and has_berths(place, operand.groups, False)
    return _call(place, "reduce", text, program, operand, gathers=gathers, settles=not posts)


def place_at(place: Place, x: Any, dst: int, out: Any) -> Any:
    """Return the destination of the reduction on this rank, or None if it gets no result."""
    if place.rank == dst:
        return x if out is None else out
    if out is not None:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    return None


def reduce_where(
    place: Place, groups: Sequence[DtypeGroup], on_lane: bool, *, dst: int
) -> Part[None]:
    """See `all_reduce_where`."""
    if on_lane and groups and lanes.can_reduce(place, groups):
        yield from lanes.reduce(place, groups, dst)
        return
    yield from _over_links(place, groups, on_lane, choose_reduce, dst)


def reduce_scatter(place: Place, xs: Any, op: ReduceOp, out: Any) -> Call:
    """Make the call that reduces slot `rank` of `xs` on each rank."""
    operand = Operand.of_slots(xs, op, rank=place.rank, size=place.size, out=out)
    if operand.kind == "scalars" and place.size > MAX_RANKS_LISTING_NUMBERS:
        raise ValueError(
            f"a list of numbers is for up to {MAX_RANKS_LISTING_NUMBERS} ranks, "
            f"this group has {place.size}: give one array, it is split among the ranks"
        )

    def program(on_lane: bool) -> Program:
        if operand.kind == "scalars":
            assert isinstance(operand.value, list)
            values = yield from _share_numbers(place, operand.value, on_lane)
            total = _folded([value[place.rank] for value in values], op)
            yield from confirm(place, op, on_lane)
            return total
        if not on_lane and posts:
            (group,) = operand.groups
            shown = group.x.views(*shown_by(place.rank, group.bounds))
            blobs = yield from share(place, b"".join((LEAD, *shown)), False, first=True)
            _reduce_slot(group, blobs, place.rank)
            yield from confirm(place, op, on_lane)
            return operand.finish()
        if has_berths(place, operand.groups, on_lane, lanes.can_slice):
            on_lane = yield from berths.meet(place)
        yield from reduce_scatter_where(place, operand.groups, on_lane)
        yield from confirm(place, op, on_lane)
        return operand.finish()

    text, groups = f"{op}, {operand.signature}", operand.groups
    posts = len(groups) == 1 and shows_slots(place, groups[0].kernel, groups[0].bounds)
    gathers = posts or has_berths(place, groups, False, lanes.can_slice)
    call = _call(
        place, "reduce_scatter", text, program, operand, gathers=gathers, settles=not posts
    )
    return call._replace(place=_place_of(place, operand))


def reduce_scatter_where(place: Place, groups: Sequence[DtypeGroup], on_lane: bool) -> Part[None]:
    """See `all_reduce_where`."""
    if on_lane and groups and lanes.can_slice(place, groups):
        yield from lanes.reduce_scatter(place, groups)
        return
    ordered, costs = has_berths(place, groups, on_lane, lanes.can_slice), place.costs
    chosen = [choose_reduce_scatter(_shape(g, ordered), tuple(g.bounds), costs) for g in groups]
    yield from _run(place, groups, chosen, on_lane)


def scan(place: Place, x: Any, op: ReduceOp, out: Any, *, exclusive: bool) -> Call:
    """Make the call that reduces `x` of all ranks up to this one, or before it if `exclusive`."""
    name = name_of_scan(op, exclusive)
    operand = Operand.of(x, op, out=out, in_place=True)
    stop = place.rank if exclusive else place.rank + 1

    def program(on_lane: bool) -> Program:
        if operand.kind == "scalar":
            values = yield from _share_numbers(place, [operand.value], on_lane)
            total = _folded([value[0] for value in values[:stop]], op) if stop else x
            yield from confirm(place, op, on_lane)
            return total
        groups = operand.groups
        ordered = has_berths(place, groups, on_lane, lanes.can_scan)
        if ordered:
            on_lane = yield from berths.meet(place)
        if on_lane and groups and lanes.can_scan(place, groups):
            yield from lanes.scan(place, groups, exclusive)
        elif is_gathered(_nbytes(groups), place.size):
            own = b"".join(_bytes_of(groups))
            blobs = yield from share(place, own, on_lane, first=True)
            _fold(groups, blobs[:stop])
        else:
            costs = place.costs
            shapes = [_shape(group, ordered) for group in groups]
            chosen = [choose_scan(shape, place.size, exclusive, costs) for shape in shapes]
            yield from _run(place, groups, chosen, on_lane)
        yield from confirm(place, op, on_lane)
        return operand.finish()

    whole = is_gathered(_nbytes(operand.groups), place.size)
    gathers = whole or has_berths(place, operand.groups, False, lanes.can_scan)
    text = f"{op}, {operand.signature}"
    return _call(place, name, text, program, operand, gathers=gathers, settles=not whole)


def name_of_scan(op: ReduceOp, exclusive: bool) -> str:
    """Return the name of the collective. Raises TypeError for an operator that it cannot use."""
    if op.name == "AVG":
        raise TypeError("AVG has no meaning for scan and exscan: use SUM, and divide")
    return "exscan" if exclusive else "scan"


def _call(
    place: Place,
    op: str,
    arguments: str,
    start: Start,
    operand: Operand,
    *,
    gathers: bool,
    settles: bool,
) -> Call:
    """Make a call.

    `gathers`: it begins by sharing bytes if it has no lane. `settles`: see `Call`. The bits do not
    depend on the way if each rank gets all operands whole, and combines them in rank order, as on a
    lane. That is true for numbers, for arrays that may be posted, and for a scan of gathered ones.
    """
    numbers = operand.kind in ("scalar", "scalars")
    shares_first = place.may_post and (gathers or numbers)
    text, settles = f"{op}({arguments})", settles and not numbers
    return Call(op, text, start, operand.nbytes, shares_first=shares_first, settles=settles)


def _place_of(place: Place, operand: Operand) -> int:
    """Return the location of the array in memory that all ranks see, or 0."""
    groups = operand.groups
    return place.heap.place_of(groups[0].x.arrays) if len(groups) == 1 else 0


def _nbytes(groups: Sequence[DtypeGroup]) -> int:
    """Return the bytes of the partial results that a small reduction sends."""
    return sum([group.x.length * group.kernel.wire_dtype.itemsize for group in groups])


def _run(
    place: Place, groups: Sequence[DtypeGroup], chosen: Sequence[Choice], on_lane: bool
) -> Part[None]:
    """Run the chosen plans, after a phase that synchronises the ranks if one plan does not.

    On a lane this phase always comes first, because data must not arrive before the receiver's
    turn.
    """
    if on_lane or not chosen or any(choice.before for choice in chosen):
        yield from share(place, b"", on_lane, first=True)
    for group, (algorithm, args, _, partials, _) in zip(groups, chosen, strict=True):
        plan = prepared(algorithm, place.rank, place.size, *args)
        memory = Partials if partials else Reductions
        yield Phase(plan, memory(group.x, group.out, plan.plan.scratch, group.kernel, place.size))


def _small(
    place: Place,
    groups: Sequence[DtypeGroup],
    algorithm: Callable[[int, int], Plan] = recursive_doubling.all_reduce,
) -> Phase:
    plan = prepared(algorithm, place.rank, place.size)
    return Phase(
        plan, SmallReductions([(group.kernel, group.x, group.out) for group in groups], place.size)
    )


def _shape(group: DtypeGroup, ordered: bool) -> Shape:
    kernel = group.kernel
    return Shape(
        group.x.length,
        group.x.itemsize,
        kernel.wire_dtype.itemsize,
        kernel.sliceable,
        kernel.op.commutative,
        ordered,
    )


def _bytes_of(groups: Sequence[DtypeGroup]) -> list[memoryview]:
    return [view for group in groups for view in group.x.views(0, group.x.length)]


def _fold(groups: Sequence[DtypeGroup], blobs: Sequence[bytes]) -> None:
    """Reduce the inputs of some ranks, in the form of `_bytes_of`, into `out`."""
    due = sum(group.x.nbytes for group in groups)
    if any(len(blob) != due for blob in blobs):
        raise ProtocolError(f"a rank sent an operand that does not have {due} bytes")
    at = 0
    for group in groups:
        # Without ranks, as on the first rank of an exscan, the result is the input.
        operands = [[np.frombuffer(blob, group.x.dtype, group.x.length, at)] for blob in blobs] or [
            group.x.pieces(0, group.x.length)
        ]
        out = group.out.pieces(0, group.out.length)
        if group.x.length:
            for into, *parts in align([out, *operands]):
                if blobs:
                    group.kernel.reduce(parts, into, 1)
                else:
                    np.copyto(into, parts[0])
        at += group.x.nbytes


def _reduce_slot(group: DtypeGroup, blobs: Sequence[bytes], rank: int) -> None:
    """Reduce slot `rank` of all ranks into `out`. `blobs` are what the ranks have shown."""
    start, stop = group.bounds[rank : rank + 2]
    slots: list[list[Any]] = []
    for src, blob in enumerate(blobs):
        first, last = shown_by(src, group.bounds)
        if len(blob) != len(LEAD) + (last - first) * group.x.itemsize:
            raise ProtocolError(f"rank {src} sent slots of a wrong size")
        if src == rank:
            slots.append(group.x.pieces(start, stop))
        else:
            offset = len(LEAD) + (start - first) * group.x.itemsize
            slots.append([np.frombuffer(blob, group.x.dtype, stop - start, offset)])
    if start < stop:
        for into, *parts in align([group.out.pieces(0, stop - start), *slots]):
            group.kernel.reduce(parts, into, len(blobs))


def _share_numbers(place: Place, own: Any, on_lane: bool) -> Part[list[list[Scalar]]]:
    """Share this rank's numbers, and return those of all ranks, by rank."""
    blobs = yield from share(place, pack(own), on_lane, first=True)
    numbers: list[list[Scalar]] = []
    for src, blob in enumerate(blobs):
        try:
            values = unpack(blob)
        except Exception as error:
            raise ProtocolError(f"malformed numbers of rank {src}: {error!r}") from None
        # All ranks have called the same, and the call names the types. But another rank may send
        # anything, and numbers of other types must not be reduced.
        if [type(value) for value in values] != [type(value) for value in own]:
            raise ProtocolError(f"rank {src} has numbers of other types than it announced")
        numbers.append(values)
    return numbers


def _folded(values: Sequence[Scalar], op: ReduceOp) -> Scalar | NoResult:
    """Reduce numbers. If the result does not fit, return a NoResult, because the results of other
    ranks may fit."""
    try:
        return reduce_scalars(values, op)
    except OverflowError as error:
        if op.function is not None:  # the user's function may raise this for its own reasons
            raise
        return NoResult(error)
