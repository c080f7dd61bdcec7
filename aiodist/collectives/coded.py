"""all_reduce with a codec: fewer bytes between hosts, exact values within them.

Each rank owns a slice. On each host one rank is the agent of each owner: it reduces the owner's
slice for its host (`aiodist.schedules.teams`). Then, with two hosts, ``a`` and ``b``::

    within a host          each agent gets its slices of the others, and sums them, in float32
    between hosts          agent: encode ──> owner: decode, sum over hosts, encode ──> agent
    within a host          agent ──> the others, which decode

The owner also codes the sum of its own host, so that the result does not depend on which rank owns
a slice. All ranks decode the same bytes, so all get the same bits. A coded piece has room for the
most bytes that its codec may need. So all ranks know all sizes, and need no round trip for them.

Coding goes on while bytes are on their way. A piece is sent as soon as it is coded, and is summed
when all hosts' pieces are there. Results are decoded as they come::

    event loop   encode 0 │ encode 1 │ encode 2 │ sum 0, encode │ sum 1, encode │ decode …
    line                    0 ───────> 1 ───────> 2 ───────>      results 0, 1, 2 ────────>
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiodist.buffers.kernels import round_to_bfloat16
from aiodist.buffers.reductions import DtypeGroup, Operand
from aiodist.codecs.base import NOT_DECODED, Bytes, Codec, Floats, codec_of
from aiodist.codecs.feedback import ErrorFeedback, Residuals
from aiodist.collectives.exchange import exchange
from aiodist.collectives.operators import operator
from aiodist.collectives.reductions import all_reduce as uncoded
from aiodist.devices.values import device_among
from aiodist.engine.failures import OperatorError
from aiodist.engine.operation import Pause, Program
from aiodist.engine.phase import Phase, Spans, prepared
from aiodist.errors import ProtocolError, in_words
from aiodist.phases.base import Call, Part, Place, share
from aiodist.phases.memories import Regions
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.direct_exchange import all_to_all
from aiodist.schedules.plan import X
from aiodist.schedules.selection import ahead_for
from aiodist.schedules.teams import TeamView, spans_hosts, team_view
from aiodist.types import Op, Tag
from aiodist.wire.frames import MAX_PAYLOAD

PIECE = 1 << 17
"""Values that are coded at once. The event loop turns after each, which takes about 1 ms."""
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
    of_sum = codec.of_sum(len(place.hosts))
    piece = _piece_of(codec, of_sum)
    # Codecs of one name may still have other sizes, and frames of another size end a link. So the
    # text, which ranks compare before anything else, has the sizes of a slice.
    whole, rest = divmod(-(-count // place.size), piece)
    sizes = [whole * each.nbytes(piece) + each.nbytes(rest) for each in (codec, of_sum)]
    text += " coded in {} bytes, sums in {}".format(*sizes)
    divisor = place.size if op.name == "AVG" else 1

    def program(on_lane: bool) -> Program:
        users = _of_user(operand.groups)
        values, result = users or [_loaded(operand.groups, count)] * 2
        residuals = Residuals()
        if codec.error_feedback:
            residuals = place.residuals.setdefault(tag, residuals)
        with residuals.trial(text) as kept:
            yield from _Coded(
                place, codec, of_sum, piece, values, result, divisor, kept, on_lane
            ).run()
        if users is None:
            _store(result, operand.groups)
        return operand.finish()

    return Call("all_reduce", text, program, nbytes)


class _Jobs(Pause):
    """Coding that goes on beside the phases of an operation: one job in each turn of the event
    loop, in order. So neither what others have to do nor the links wait for more than one piece.

    As a phase, it waits until all jobs are done. It has to be one before the first job, too, so
    that it knows the operation, which it resumes after each job.
    """

    alone = True

    def __init__(self, loop: asyncio.AbstractEventLoop, piece: int) -> None:
        self._loop = loop
        self._piece = piece
        self._jobs: deque[Callable[[], None]] = deque()
        self._next: asyncio.Handle | None = None
        self._error: Exception | None = None

    def add(self, job: Callable[[], None], count: int) -> None:
        """Do this later, or at once if it is about less than a piece, and nothing comes before."""
        if count < self._piece and not self._jobs:
            self._do(job)
            return
        self._jobs.append(job)
        if self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._next = None
        self._do(self._jobs.popleft())
        if self._jobs and self._next is None:
            self._next = self._loop.call_soon(self._turn)
        self.resume()

    def _do(self, job: Callable[[], None]) -> None:
        # Not raised here, because a link, or the loop, would hear of it in place of the operation.
        if self._error is None:
            try:
                job()
            except Exception as error:
                self._error = error

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def run(self) -> bool:
        self.check()
        return not self._jobs

    def close(self) -> None:
        """There are more phases."""

    def end(self) -> None:
        """Do no more jobs."""
        self._jobs.clear()
        if self._next is not None:
            self._next.cancel()


class _Pieces:
    """The memory of a phase in which each frame is a coded piece: it is sent when it is coded, and
    `came` is called when it is here."""

    def __init__(
        self,
        x: Sequence[memoryview],
        out: Sequence[memoryview],
        is_coded: Callable[[int], bool],
        came: Callable[[int], None],
    ) -> None:
        self._regions = Regions.of_bytes(x, out)
        self.incoming, self.due = self._regions.incoming, self._regions.due
        self._is_coded = is_coded
        self._came = came

    def outgoing(self, spans: Spans) -> Sequence[memoryview] | None:
        if spans[0].buffer == X and not self._is_coded(spans[0].start):
            return None
        return self._regions.outgoing(spans)

    def arrived(self, spans: Spans) -> None:
        self._regions.arrived(spans)
        self._came(spans[0].start)


class _Coded:
    """One call on one rank, from `values` to `result`. Both may be the same memory."""

    def __init__(
        self,
        place: Place,
        codec: Codec,
        of_sum: Codec,
        piece: int,
        values: Floats,
        result: Floats,
        divisor: int,
        kept: dict[object, ErrorFeedback],
        on_lane: bool,
    ) -> None:
        self._place = place
        self._view: TeamView = team_view(place.hosts, place.rank)
        self._codec = codec
        self._of_sum = of_sum
        self._piece = piece
        self._kept = kept
        self._values = values
        self._result = result
        self._divisor = divisor
        self._on_lane = on_lane
        self._jobs = _Jobs(place.loop, piece)
        bounds = even_bounds(values.size, place.size)
        self._slices = [slice(*cut) for cut in itertools.pairwise(bounds)]

    def run(self) -> Part[None]:
        """Compute the result from the values of all ranks."""
        place, view = self._place, self._view
        # If each rank is alone on its host and owns a slice, all hear from all others below.
        if self._on_lane or view.mates or len(place.hosts) < place.size or not self._is_cut:
            yield from share(place, b"", self._on_lane, first=True)
        sums = yield from self._of_host()
        try:
            yield self._jobs
            own = yield from self._reduced(sums)
            yield from self._shared(own)
        finally:
            self._jobs.end()

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

    def _reduced(self, sums: Mapping[int, Floats]) -> Part[Bytes]:
        """The coded result of the slice of this rank. All hosts send their coded sums of it."""
        place, view, jobs = self._place, self._view, self._jobs
        coded = {owner: self._room(self._codec, owner) for owner in sums}
        agents = [view.agent(host, view.rank) for host in range(len(place.hosts))]
        parts = {agent: self._room(self._codec, view.rank) for agent in agents}
        parts[view.rank] = coded[view.rank]
        cuts = self._cuts(view.rank)
        lacking = dict.fromkeys(cuts, len(agents))
        own = self._room(self._of_sum, view.rank)
        total, part = np.empty(self._piece, np.float32), np.empty(self._piece, np.float32)
        done: set[tuple[int, int]] = set()

        def encode(owner: int, cut: tuple[int, int]) -> None:
            self._encode(self._codec, sums[owner][slice(*cut)], coded[owner], cut, owner)
            done.add((owner, cut[0]))
            if owner == view.rank:
                came(owner, cut)

        def came(_: int, cut: tuple[int, int]) -> None:
            lacking[cut] -= 1
            if not lacking[cut]:
                for agent in agents:
                    jobs.add(partial(add, agent, cut), cut[1] - cut[0])
                jobs.add(partial(finish, cut), cut[1] - cut[0])

        def add(agent: int, cut: tuple[int, int]) -> None:
            length = cut[1] - cut[0]
            first = agent == agents[0]
            self._decode(self._codec, parts[agent], cut, (total if first else part)[:length], agent)
            if not first:
                with np.errstate(all="ignore"):
                    total[:length] += part[:length]

        def finish(cut: tuple[int, int]) -> None:
            values = total[: cut[1] - cut[0]]
            if self._divisor != 1:
                values /= np.float32(self._divisor)
            self._encode(self._of_sum, values, own, cut, "result")

        owners = sorted(sums, key=lambda owner: (owner - view.rank) % place.size)
        every = {owner: self._cuts(owner) for owner in owners}
        for cuts_of_one in itertools.zip_longest(*every.values()):
            for owner, cut in zip(every, cuts_of_one, strict=True):
                if cut is not None:
                    jobs.add(partial(encode, owner, cut), cut[1] - cut[0])
        sends = {owner: data for owner, data in coded.items() if owner not in view.team}
        receives = {agent: parts[agent] for agent in agents if agent != view.rank}
        for owner, data in sends.items():
            place.saved(self._values[self._slices[owner]].nbytes - data.nbytes)
        yield self._moved(self._codec, sends, receives, done, came, lambda _: view.rank)
        yield jobs
        return own

    def _shared(self, own: Bytes) -> Part[None]:
        """The results of all slices, which come coded of their owners."""
        view, jobs = self._view, self._jobs
        there = {owner: self._room(self._of_sum, owner) for owner in range(self._place.size)}
        there[view.rank] = own

        def came(owner: int, cut: tuple[int, int]) -> None:
            jobs.add(partial(decode, owner, cut), cut[1] - cut[0])

        def decode(owner: int, cut: tuple[int, int]) -> None:
            out = self._result[self._slices[owner]][slice(*cut)]
            self._decode(self._of_sum, there[owner], cut, out, owner)

        duties = view.duties(view.rank)
        sends = {view.agent(host, view.rank): own for host in view.abroad()}
        receives = {owner: there[owner] for owner in duties if owner not in view.team}
        less = self._values[self._slices[view.rank]].nbytes - own.nbytes
        self._place.saved(less * len(sends))
        for cut in self._cuts(view.rank):
            came(view.rank, cut)
        yield self._moved(self._of_sum, sends, receives, None, came, lambda owner: owner)
        mine = [there[owner].data for owner in duties]
        others = {mate: [there[owner].data for owner in view.duties(mate)] for mate in view.mates}
        yield from self._exchange(dict.fromkeys(view.mates, mine), others)
        for owner in range(self._place.size):
            if owner not in duties:
                for cut in self._cuts(owner):
                    came(owner, cut)
        yield jobs

    def _moved(
        self,
        codec: Codec,
        sends: Mapping[int, Bytes],
        receives: Mapping[int, Bytes],
        done: Container[tuple[int, int]] | None,
        came: Callable[[int, tuple[int, int]], None],
        slice_of: Callable[[int], int],
    ) -> Phase:
        """The phase that sends coded slices, and receives others, between hosts.

        `done`: the pieces that are coded, by the rank that they go to; None: all are. `came` is
        called with each piece that is here, and the rank that it is of, whose piece it is of the
        slice `slice_of(rank)`.
        """
        segment = HEAD + codec.nbytes(self._piece)
        size = range(self._place.size)
        outgoing, incoming = [
            tuple(itertools.accumulate([len(of.get(rank, ())) for rank in size], initial=0))
            for of in (sends, receives)
        ]

        def is_coded(at: int) -> bool:
            if done is None:
                return True
            self._jobs.check()
            rank = bisect_right(outgoing, at) - 1
            return (rank, (at - outgoing[rank]) // segment * self._piece) in done

        def arrived(at: int) -> None:
            rank = bisect_right(incoming, at) - 1
            came(rank, self._cuts(slice_of(rank))[(at - incoming[rank]) // segment])

        width = min(segment, MAX_PAYLOAD)
        args = (outgoing, incoming, segment, ahead_for(width, self._place.costs))
        return Phase(
            prepared(all_to_all, self._place.rank, self._place.size, *args),
            _Pieces(
                [sends[rank].data for rank in sorted(sends)],
                [receives[rank].data for rank in sorted(receives)],
                is_coded,
                arrived,
            ),
        )

    def _exchange(self, sends: Views, receives: Views) -> Part[None]:
        yield from exchange(self._place, sends, receives, 0, self._on_lane)

    # -- coding -----------------------------------------------------------------------------------

    def _cuts(self, owner: int) -> Sequence[tuple[int, int]]:
        """The pieces of the slice of `owner`, from its start."""
        cut = self._slices[owner]
        return pieces(0, cut.stop - cut.start, self._piece)

    def _room(self, codec: Codec, owner: int) -> Bytes:
        """Memory for the coded slice of `owner`."""
        # Zeros, because codecs may write less than that.
        nbytes = sum([HEAD + codec.nbytes(stop - start) for start, stop in self._cuts(owner)])
        return np.zeros(nbytes, np.uint8)

    def _at(self, codec: Codec, cut: tuple[int, int]) -> tuple[int, int]:
        """Where the coded piece is, behind its head, and the most bytes that it has."""
        start, stop = cut
        before = start // self._piece * (HEAD + codec.nbytes(self._piece))
        return before + HEAD, codec.nbytes(stop - start)

    def _encode(
        self, codec: Codec, values: Floats, out: Bytes, cut: tuple[int, int], key: object
    ) -> None:
        """Write `values`, the piece `cut` of a slice, to its place in `out`. `key`: whose residual
        it is that is added, and kept."""
        at, most = self._at(codec, cut)
        into = out[at : at + most]
        try:
            if self._codec.error_feedback:
                feedback = self._kept.get((key, cut[0]))
                if feedback is None:
                    feedback = self._kept[key, cut[0]] = ErrorFeedback(values.size)
                size = feedback.encode(codec, values, into, np.empty_like(values))
            else:
                size = codec.encode(values, into)
        except BaseException as error:
            raise OperatorError(error, "codec") from error
        out[at - HEAD : at].view("<u8")[0] = size

    def _decode(
        self, codec: Codec, data: Bytes, cut: tuple[int, int], out: Floats, src: int
    ) -> None:
        """Write the values of the piece `cut` of `data`, which `src` has coded, to `out`."""
        at, most = self._at(codec, cut)
        size = int(data[at - HEAD : at].view("<u8")[0])
        if size > most:
            raise ProtocolError(f"rank {src} sent {size} coded bytes, at most {most} were due")
        try:
            codec.decode(data[at : at + size], out)
        except NOT_DECODED as error:
            text = f"rank {src} sent data that {codec.name} cannot decode: {in_words(error)}"
            raise ProtocolError(text) from error
        except BaseException as error:
            raise OperatorError(error, "codec") from error


def _piece_of(*codecs: Codec) -> int:
    """How many values are coded at once: as many as fit into a frame, at most `PIECE`."""
    piece = PIECE
    while piece > 1 and max(HEAD + codec.nbytes(piece) for codec in codecs) > MAX_PAYLOAD:
        piece //= 2
    return piece


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
