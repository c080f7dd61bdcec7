"""`reshard` moves parts of arrays from ranks that hold them to ranks that want other parts.

All ranks tell what they hold and want, and all make the same plan (see
`aiodist.schedules.resharding`). The data that one rank sends to another is then one value of an
`all_to_all`. This value is a list of views of the arrays that the rank holds, and it arrives in
views of the arrays that are wanted. No rank assembles a whole array, and no byte goes to a rank
that does not want it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from aiodist.buffers import overlaps
from aiodist.buffers.arrays import UserArray, view, writable
from aiodist.collectives.shards import Shard, parts_of
from aiodist.collectives.values import all_gather, all_to_all
from aiodist.devices import device_of
from aiodist.engine import failures
from aiodist.engine.operation import Program
from aiodist.errors import MismatchError, ProtocolError
from aiodist.phases.base import Call, Place
from aiodist.schedules import resharding
from aiodist.schedules.resharding import Box, BoxLayout, BoxTransfer, Unheld
from aiodist.schedules.teams import Teams


class _PartWords(NamedTuple):
    """What a rank says about a part: dtype, bytes of an element, shape of the whole, and box."""

    dtype: str
    item: int
    shape: tuple[int, ...]
    box: Box

    @property
    def whole(self) -> str:
        """The array that it is a part of."""
        return f"{self.dtype}{list(self.shape)}"

    def __str__(self) -> str:
        return f"{resharding.text(self.box)} of {self.whole}"


_NO_NOTES: Mapping[int, str] = MappingProxyType({})

_Parts = list[dict[str, _PartWords]]
"""By rank, then by the path in the tree."""


def reshard(place: Place, x: Any, out: Any) -> Call:
    """Make the call that fills `out` of each rank with parts that the `x` of all ranks hold."""
    held, wanted = parts_of(x, "x"), parts_of(out, "out")
    sources = _viewed(held, "x", to_write=False)
    targets = _viewed(wanted, "out", to_write=True)
    _check_memory(held, wanted, sources, targets)
    told = [_told(held, sources), _told(wanted, targets)]
    telling = all_gather(place, told, None)

    def program(on_lane: bool) -> Program:
        everybody = yield from telling.start(on_lane)
        holds, wants = _read(everybody, 0), _read(everybody, 1)
        transfers = _planned(place, holds, wants)
        xs = _views(place, held, sources, transfers, sends=True)
        outs = _views(place, wanted, targets, transfers, sends=False)
        yield from all_to_all(place, xs, outs, apart=True).start(on_lane)
        return out

    nbytes = sum(array.base.nbytes for array in sources.values())
    return Call("reshard", "reshard()", program, nbytes)


def _viewed(parts: Mapping[str, Shard], name: str, *, to_write: bool) -> dict[str, UserArray]:
    """Return the arrays of `parts`. Raises TypeError if one is not on the host, and as `view` and
    `writable` do."""
    found = {}
    for where, part in parts.items():
        if device_of(part.array) is not None:
            raise TypeError(
                f"{name}{where} is on a device: reshard takes arrays of the host, so copy it there "
                "first"
            )
        array = (writable if to_write else view)(part.array, f"{name}{where}")
        if array is None:
            raise TypeError(f"{name}{where} is no array: {type(part.array).__name__}")
        found[where] = array
    return found


def _check_memory(
    held: Mapping[str, Shard],
    wanted: Mapping[str, Shard],
    sources: Mapping[str, UserArray],
    targets: Mapping[str, UserArray],
) -> None:
    """Raise ValueError if a rank would write to memory that others have yet to read, or twice."""
    parts = [("out", *part) for part in wanted.items()] + [("x", *part) for part in held.items()]
    written, read = ([array.base for array in found.values()] for found in (targets, sources))
    memories = [*written, *read]
    for one, other in overlaps.meetings(written, read):
        (_, here, own), (name, where, part) = parts[one], parts[other]
        # A part of `x` that stays what it is does not change. One array may be wanted twice.
        stays = name == "out" or (here, own.box) == (where, part.box)
        if not (stays and overlaps.alike(memories[one], memories[other])):
            raise ValueError(
                f"out{here} shares memory with {name}{where}: give reshard other memory for out"
            )


def _told(parts: Mapping[str, Shard], found: Mapping[str, UserArray]) -> dict[str, tuple[Any, ...]]:
    return {
        where: (found[where].name, found[where].base.itemsize, part.shape, part.box)
        for where, part in parts.items()
    }


def _read(everybody: Sequence[Any], which: int) -> _Parts:
    """Return what all ranks have told. Other ranks may have sent anything, so check all of it."""
    try:
        return [
            {where: _checked(*part) for where, part in told[which].items()} for told in everybody
        ]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        text = f"the parts that a rank described make no sense: {error}"
        raise ProtocolError(text) from None


def _checked(dtype: str, item: int, shape: tuple[int, ...], box: Box) -> _PartWords:
    if type(dtype) is not str or type(item) is not int:
        raise TypeError(f"{dtype!r} of {item!r} bytes is no dtype")
    for (start, stop), length in zip(box, shape, strict=True):
        if not 0 <= start <= stop <= length:
            raise ValueError(f"{box} is no part of {shape}")
    return _PartWords(dtype, item, shape, box)


def _planned(place: Place, holds: _Parts, wants: _Parts) -> dict[str, list[BoxTransfer]]:
    """Plan the transfers of each wanted array. All ranks get the same plan or the same error."""
    layouts: dict[str, BoxLayout] = {}
    for where in dict.fromkeys(where for wanted in wants for where in wanted):
        known = _alike(place, where, holds, wants)
        layouts[where] = BoxLayout(_boxes(holds, where), _boxes(wants, where), known.item)
    hosts = _hosts(place.teams, place.size)
    try:
        return dict(zip(layouts, resharding.plan(layouts.values(), hosts), strict=True))
    except Unheld:
        for where, layout in layouts.items():
            try:
                resharding.plan([layout], hosts)
            except Unheld as error:
                note = f"no rank holds out{where}{resharding.text(error.box)}: "
                raise _mismatch(place, where, holds, wants, {error.rank: note}) from None
        raise


def _boxes(parts: _Parts, where: str) -> tuple[Box | None, ...]:
    return tuple(told[where].box if where in told else None for told in parts)


def _alike(place: Place, where: str, holds: _Parts, wants: _Parts) -> _PartWords:
    """Return what all ranks say about an array. Raises MismatchError if they differ."""
    told = [parts[where] for parts in (*holds, *wants) if where in parts]
    if any((one.dtype, one.shape) != (told[0].dtype, told[0].shape) for one in told):
        # Without boxes, which differ as a rule: only what is wrong is marked then.
        raise _mismatch(place, where, holds, wants, shown=lambda part: part.whole)
    return told[0]


def _mismatch(
    place: Place,
    where: str,
    holds: _Parts,
    wants: _Parts,
    notes: Mapping[int, str] = _NO_NOTES,
    shown: Callable[[_PartWords], str] = str,
) -> Exception:
    """Return an error with what all ranks said about the array at `where`.

    Everything, including `notes`, goes into its calls. So a rank that hears of the error from
    another rank gets the same text.
    """
    calls = {}
    for rank, (held, wanted) in enumerate(zip(holds, wants, strict=True)):
        has, asks = (
            f"{name}{where}={shown(parts[where])}" if where in parts else f"no {name}{where}"
            for name, parts in (("x", held), ("out", wanted))
        )
        calls[rank] = f"{notes.get(rank, '')}reshard({has}, {asks})"
    return place.error(MismatchError, failures.mismatch_text(calls), calls=calls)


def _hosts(teams: Teams, size: int) -> list[int]:
    hosts = [0] * size
    for host, team in enumerate(teams):
        for rank in team:
            hosts[rank] = host
    return hosts


def _views(
    place: Place,
    parts: Mapping[str, Shard],
    found: Mapping[str, UserArray],
    transfers: Mapping[str, list[BoxTransfer]],
    sends: bool,
) -> list[list[Any]]:
    """Return the views that this rank sends to each rank, or receives from it.

    They are in the order of the plan, which both ends use.
    """
    views: list[list[Any]] = [[] for _ in range(place.size)]
    for where, planned in transfers.items():
        for one in planned:
            here, other = (one.src, one.dst) if sends else (one.dst, one.src)
            if here == place.rank:
                views[other].append(_view(found[where], parts[where].box, one.box))
    return views


def _view(array: UserArray, own: Box, box: Box) -> Any:
    """Return the view of `array`, which is `own` of the whole array, that is `box` of it."""
    # Tensors stay tensors, because numpy lacks some of their dtypes. All else is seen as a numpy
    # array: memoryviews have no slices of several dimensions, and numpy's scalars are no arrays.
    memory = array.value if array.kind == "torch" else array.base
    if box == own:
        return memory
    return memory[
        tuple(
            slice(start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(box, own, strict=True)
        )
    ]
