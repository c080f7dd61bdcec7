"""all_reduce with a codec: fewer bytes between hosts, exact values within them.

Each rank owns a slice. On each host one rank is the agent of each owner: it reduces the owner's
slice for its host (`aiodist.schedules.teams`). Then, with two hosts, ``a`` and ``b``::

    within a host          each agent gets its slices of the others, and sums them, in float32
    between hosts          agent: encode ──> owner: decode, sum over hosts, encode ──> agent
    within a host          agent ──> the others, which decode

The owner also codes the sum of its own host, so that the result does not depend on which rank owns
a slice. All ranks decode the same bytes, so all get the same bits. A coded piece has room for the
most bytes that its codec may need. So all ranks know all sizes, and need no round trip for them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aiodist.buffers.kernels import round_to_bfloat16
from aiodist.buffers.reductions import DtypeGroup, Operand
from aiodist.codecs.base import Bytes, Codec, Floats, codec_of
from aiodist.codecs.feedback import ErrorFeedback, Residuals
from aiodist.collectives.exchange import exchange
from aiodist.collectives.operators import operator
from aiodist.collectives.reductions import all_reduce as uncoded
from aiodist.devices.values import device_among
from aiodist.engine.operation import Pause, Program
from aiodist.errors import ProtocolError
from aiodist.phases.base import Call, Part, Place, share
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.teams import TeamView, spans_hosts, team_view
from aiodist.types import Op, Tag

PIECE = 1 << 20
"""The number of values that are coded at once, which takes milliseconds. The event loop then gets a
turn."""
HEAD = 8
"""The bytes before each coded piece, which say how many bytes it has."""
FLOATS = frozenset({"float16", "bfloat16", "float32"})

Views = Mapping[int, Sequence[memoryview]]
"""Memory to send or to receive, by rank."""


def all_reduce(place: Place, x: Any, op: Op, codec: Any, tag: Tag, out: Any) -> Call:
    """Make the call that reduces `x` on every rank."""
    codec, op = codec_of(codec), operator(op)
    if op.name not in ("SUM", "AVG") or op.function is not None:
        raise TypeError(f"codec= is for SUM and AVG, not {op}: leave codec= out")
    if codec.error_feedback and tag is None:
        raise ValueError(
            f"codec={codec.name} has error feedback, which belongs to a tag: give tag=, the same "
            "for the same array in each call"
        )
    if device_among(x, out) is not None:
        raise TypeError("codec= is for arrays of the host: copy it there first")
    operand = Operand.of(x, op, out=out, in_place=True)
    if operand.kind != "arrays" or any(group.name not in FLOATS for group in operand.groups):
        raise TypeError(
            f"codec= is for arrays of float32, float16 and bfloat16, not {operand.signature}"
        )
    text = f"all_reduce({op}, codec={codec.name}, {operand.signature})"
    nbytes = sum([group.x.nbytes for group in operand.groups])
    if not spans_hosts(place.hosts):
        return uncoded(place, x, op, out)._replace(text=text)
    count = sum([group.x.length for group in operand.groups])
    divisor = place.size if op.name == "AVG" else 1

    def program(on_lane: bool) -> Program:
        users = _of_user(operand.groups)
        values, result = users or [_loaded(operand.groups, count)] * 2
        residuals = Residuals()
        if codec.error_feedback:
            residuals = place.residuals.setdefault(tag, residuals)
        with residuals.trial(text) as kept:
            yield from _Coded(place, codec, values, result, divisor, kept, on_lane).run()
        if users is None:
            _store(result, operand.groups)
        return operand.finish()

    return Call("all_reduce", text, program, nbytes)


class _Turn(Pause):
    """Give the event loop one turn, because coding must not hold up other work."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_over = False
        self._next = loop.call_soon(self._turned)

    def _turned(self) -> None:
        self._is_over = True
        self.resume()

    def run(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self._next.cancel()


class _Coded:
    """One call on one rank, from `values` to `result`. Both may be the same memory."""

    def __init__(
        self,
        place: Place,
        codec: Codec,
        values: Floats,
        result: Floats,
        divisor: int,
        kept: dict[object, ErrorFeedback],
        on_lane: bool,
    ) -> None:
        self._place = place
        self._view: TeamView = team_view(place.hosts, place.rank)
        self._codec = codec
        self._of_sum = codec.of_sum(len(place.hosts))
        self._kept = kept
        self._values = values
        self._result = result
        self._divisor = divisor
        self._on_lane = on_lane
        bounds = even_bounds(values.size, place.size)
        self._slices = [slice(*cut) for cut in itertools.pairwise(bounds)]

    def run(self) -> Part[None]:
        """Compute the result from the values of all ranks."""
        place, view = self._place, self._view
        # If each rank is alone on its host and owns a slice, all hear from all others below.
        if self._on_lane or view.mates or len(place.hosts) < place.size or not self._is_cut:
            yield from share(place, b"", self._on_lane, first=True)
        sums = yield from self._of_host()
        coded: dict[int, Bytes] = {}
        for owner, total in sums.items():
            coded[owner] = yield from self._encoded(self._codec, total, owner)
        own = yield from self._total((yield from self._gathered(coded)))
        results = yield from self._shared(own)
        for owner, data in results.items():
            yield from self._decode(self._of_sum, data, self._result[self._slices[owner]], owner)

    @property
    def _is_cut(self) -> bool:
        return self._values.size >= self._place.size

    def _of_host(self) -> Part[dict[int, Floats]]:
        """Return the sums over this host of the slices for which this rank is the agent."""
        view, values = self._view, self._values
        duties = view.duties(view.rank)
        if not view.mates:
            return {owner: values[self._slices[owner]] for owner in duties}
        room = sum([values[self._slices[owner]].size for owner in duties])
        parts = {mate: np.empty(room, np.float32) for mate in view.mates}
        sends = {
            mate: [_bytes(values[self._slices[owner]]) for owner in view.duties(mate)]
            for mate in view.mates
        }
        yield from self._exchange(sends, {mate: [_bytes(part)] for mate, part in parts.items()})
        parts[view.rank] = np.concatenate([values[self._slices[owner]] for owner in duties])
        total = parts[view.team[0]]
        with np.errstate(all="ignore"):
            for mate in view.team[1:]:
                total += parts[mate]
        sums, at = {}, 0
        for owner in duties:
            length = values[self._slices[owner]].size
            sums[owner] = total[at : at + length]
            at += length
        return sums

    def _gathered(self, coded: Mapping[int, Bytes]) -> Part[list[tuple[int, Bytes]]]:
        """Return the coded sums of all hosts for this rank's slice, each with its sender."""
        place, view = self._place, self._view
        own = coded[view.rank]
        parts = {view.agent(host, view.rank): np.empty_like(own) for host in view.abroad()}
        sends = {owner: [data.data] for owner, data in coded.items() if owner not in view.team}
        yield from self._exchange(sends, {agent: [part.data] for agent, part in parts.items()})
        parts[view.rank] = own
        agents = [view.agent(host, view.rank) for host in range(len(place.hosts))]
        return [(agent, parts[agent]) for agent in agents]

    def _total(self, parts: Iterable[tuple[int, Bytes]]) -> Part[Bytes]:
        """Return the coded result for the slice of this rank."""
        length = self._values[self._slices[self._view.rank]].size
        total, part = np.empty(length, np.float32), np.empty(length, np.float32)
        for index, (agent, data) in enumerate(parts):
            yield from self._decode(self._codec, data, part if index else total, agent)
            if index:
                with np.errstate(all="ignore"):
                    total += part
        if self._divisor != 1:
            total /= np.float32(self._divisor)
        return (yield from self._encoded(self._of_sum, total, "result"))

    def _shared(self, own: Bytes) -> Part[dict[int, Bytes]]:
        """Return the coded results of all slices, by owner."""
        view = self._view
        there = {owner: self._room(owner) for owner in range(self._place.size)}
        there[view.rank] = own
        duties = view.duties(view.rank)
        yield from self._exchange(
            {view.agent(host, view.rank): [own.data] for host in view.abroad()},
            {owner: [there[owner].data] for owner in duties if owner not in view.team},
        )
        mine = [there[owner].data for owner in duties]
        others = {mate: [there[owner].data for owner in view.duties(mate)] for mate in view.mates}
        yield from self._exchange(dict.fromkeys(view.mates, mine), others)
        return there

    def _exchange(self, sends: Views, receives: Views) -> Part[None]:
        yield from exchange(self._place, sends, receives, 0, self._on_lane)

    # -- coding -----------------------------------------------------------------------------------

    def _room(self, owner: int) -> Bytes:
        """Return memory for the coded result of the slice of `owner`."""
        size = self._values[self._slices[owner]].size
        return np.empty(_nbytes(self._of_sum, size), np.uint8)

    def _encoded(self, codec: Codec, values: Floats, key: object) -> Part[Bytes]:
        """Return `values`, coded piece by piece. `key` says which residual is added and updated."""
        out = np.zeros(_nbytes(codec, values.size), np.uint8)
        at = 0
        for start, stop in pieces(0, values.size, PIECE):
            part, most = values[start:stop], codec.nbytes(stop - start)
            into = out[at + HEAD : at + HEAD + most]
            if self._codec.error_feedback:
                feedback = self._kept.get((key, start))
                if feedback is None:
                    feedback = self._kept[key, start] = ErrorFeedback(part.size)
                size = feedback.encode(codec, part, into, np.empty_like(part))
            else:
                size = codec.encode(part, into)
            if not 0 <= size <= most:
                raise ValueError(f"{codec.name} has written {size} bytes, at most {most} fit")
            out[at : at + HEAD].view("<u8")[0] = size
            at += HEAD + most
            if part.size == PIECE:
                yield _Turn(self._place.loop)
        return out

    def _decode(self, codec: Codec, data: Bytes, out: Floats, src: int) -> Part[None]:
        """Decode `data`, which `src` has coded, into `out`."""
        at = 0
        for start, stop in pieces(0, out.size, PIECE):
            most, size = codec.nbytes(stop - start), int(data[at : at + HEAD].view("<u8")[0])
            if size > most:
                raise ProtocolError(f"rank {src} sent {size} coded bytes, at most {most} were due")
            try:
                codec.decode(data[at + HEAD : at + HEAD + size], out[start:stop])
            except ValueError as error:
                raise ProtocolError(
                    f"rank {src} sent data that {codec.name} cannot decode: {error}"
                ) from None
            at += HEAD + most
            if stop - start == PIECE:
                yield _Turn(self._place.loop)


def _nbytes(codec: Codec, count: int) -> int:
    return sum([HEAD + codec.nbytes(stop - start) for start, stop in pieces(0, count, PIECE)])


def _bytes(values: Floats) -> memoryview:
    return values.view(np.uint8).data


def _of_user(groups: Sequence[DtypeGroup]) -> tuple[Floats, Floats] | None:
    """Return the memory of the values and the result if each is one array of float32, else None."""
    if len(groups) != 1 or groups[0].name != "float32":
        return None
    (group,) = groups
    values, result = group.x.piece(0, group.x.length), group.out.piece(0, group.out.length)
    return None if values is None or result is None else (values, result)


def _loaded(groups: Sequence[DtypeGroup], count: int) -> Floats:
    """Return the elements of all arrays, one after the other."""
    values, at = np.empty(count, np.float32), 0
    for group in groups:
        for piece in group.x.pieces(0, group.x.length):
            into = values[at : at + piece.size]
            if group.name == "bfloat16":
                np.copyto(into.view("<u4"), piece)
                into.view("<u4")[:] <<= 16
            else:
                np.copyto(into, piece)
            at += piece.size
    return values


def _store(values: Floats, groups: Sequence[DtypeGroup]) -> None:
    """Write the result to all arrays. Each value is rounded once."""
    at = 0
    with np.errstate(all="ignore"):
        for group in groups:
            for piece in group.out.pieces(0, group.out.length):
                source = values[at : at + piece.size]
                if group.name == "bfloat16":
                    round_to_bfloat16(source, piece)
                else:
                    np.copyto(piece, source, casting="same_kind")
                at += piece.size
