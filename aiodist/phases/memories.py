"""What the spans of plans mean: small blobs, regions of users' arrays, and accumulators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.copying import copy_in, copy_out
from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.vector import Vector, align
from aiodist.errors import ProtocolError
from aiodist.schedules.plan import OUT, SHARED, TMP, Copy, Reduce, Span, Step, X
from aiodist.shared_memory.lane import Lane

Array = NDArray[Any]
AnyKernel = Kernel | CustomKernel
Spans = tuple[Span, ...]
Moves = Callable[[Sequence[Array]], None]
"""A step of a plan that is bound to shared memory. It takes slices of the user's array."""
_TOTAL = -1
"""A cell that no plan uses: it holds the result before that is stored."""
_RESULT = -2
"""A cell that no plan uses: a frame with the result comes there."""


class Blobs:
    """One blob of bytes for each rank: OUT[r] is the blob of rank r.

    For `dissemination.all_gather` and `team_whole.share`, and for `pull_whole.share` with cells of
    one unit. Shared memory holds the same bytes as the payload of a frame, from the start of the
    area.
    """

    def __init__(self, rank: int, size: int, own: bytes) -> None:
        self.blobs: list[bytes] = [b""] * size
        self.blobs[rank] = own
        self._rank = rank
        self._inbox: dict[Spans, bytearray] = {}
        self._expected: Sequence[int] = ()
        self._areas: dict[int, memoryview] = {}
        self._wrong: list[int] = []

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        parts: list[bytes] = []
        for span in spans:
            for blob in self.blobs[span.start : span.stop]:
                parts += (len(blob).to_bytes(4, "big"), blob)
        return (memoryview(b"".join(parts)),)

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        data = self._inbox[spans] = bytearray(nbytes)
        return memoryview(data)

    def expect(self, lengths: Sequence[int]) -> None:
        """Say how long the blobs probably are, by rank. Empty: that is not known."""
        self._expected = lengths

    def due(self, spans: Spans) -> memoryview | None:
        """Return the place of the frame for `spans`, if its length is the expected one."""
        if not self._expected:
            return None
        lengths = [length for s in spans for length in self._expected[s.start : s.stop]]
        return self.incoming(spans, 4 * len(lengths) + sum(lengths))

    def arrived(self, spans: Spans) -> None:
        self.read(spans, memoryview(self._inbox.pop(spans)))

    def read(self, spans: Spans, data: memoryview) -> None:
        """Take the blobs of `spans` from a frame. Raises ProtocolError."""
        at = 0
        for span in spans:
            for index in range(span.start, span.stop):
                stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
                if stop > len(data):
                    raise ProtocolError("a frame of blobs ends too early")
                self.blobs[index] = bytes(data[at + 4 : stop])
                at = stop
        if at != len(data):
            raise ProtocolError("a frame of blobs has more bytes than its blobs")

    def bind(self, lane: Lane, area: int) -> None:
        self._areas = {rank: lane.board.area(rank, area) for rank in (self._rank, *lane.others)}

    def unbind(self) -> None:
        self._areas.clear()

    def copy(self, step: Copy) -> None:
        if step.into.buffer >= SHARED:
            # X is the blob of this rank.
            own = Span(OUT, self._rank, self._rank + 1)
            (data,) = self.outgoing((own if step.source.buffer == X else step.source,))
            area = self._areas[self._rank]
            if len(data) > len(area):
                raise ValueError(f"small values take {len(data)} bytes, at most {len(area)} fit")
            area[: len(data)] = data
            return
        # Do not raise yet: the memory of a rank that gave up may hold anything. `check` raises once
        # it is known that no rank gave up.
        source = step.source.buffer - SHARED
        area, at = self._areas[source], 0
        for rank in range(step.into.start, step.into.stop):
            stop = at + 4 + int.from_bytes(area[at : at + 4], "big")
            if stop > len(area):
                self._wrong.append(source)
            self.blobs[rank] = bytes(area[at + 4 : stop])
            at = stop

    def check(self) -> None:
        """Raise ProtocolError if something that was read makes no sense."""
        if self._wrong:
            raise ProtocolError(f"blobs of ranks {self._wrong} do not fit in shared memory")


class Regions:
    """Regions of arrays.

    X and OUT are vectors of one dtype. TMP is scratch of the same dtype, and so is shared memory.
    ``SHARED + r`` is the staging memory of rank r, or its array itself after `show`.
    """

    def __init__(self, x: Vector, out: Vector, scratch: int = 0) -> None:
        self.vectors = [x, out, Vector.of(np.empty(scratch, x.dtype))]
        self._shown: Sequence[Vector] = ()
        self._inbox: dict[Spans, bytearray] = {}

    def show(self, arrays: Sequence[Vector]) -> None:
        """Use `arrays` (by rank), which all ranks see, until `unbind`."""
        self._shown = arrays

    def bind(self, lane: Lane, area: int) -> None:
        self.vectors[SHARED:] = self._shown or lane.areas.vectors(area, self.vectors[0].dtype)

    def unbind(self) -> None:
        del self.vectors[SHARED:]
        self._shown = ()

    @classmethod
    def of_bytes(
        cls, x: Sequence[memoryview], out: Sequence[memoryview], scratch: int = 0
    ) -> Regions:
        """Regions of plain bytes, for exchanges without reductions."""
        return cls(Vector(x, np.uint8), Vector(out, np.uint8), scratch)

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        if len(spans) == 1:
            buffer, start, stop = spans[0]
            return self.vectors[buffer].views(start, stop)
        return [view for span in spans for view in self.vectors[span.buffer].views(*span[1:])]

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        due = self._due(spans)
        if nbytes != due:
            raise ProtocolError(f"a frame has {nbytes} bytes, expected {due}")
        views = self.outgoing(spans)
        if len(views) == 1:
            return views[0]
        # A frame is received in one piece of memory. If its spans are apart, `arrived` cuts it.
        data = self._inbox[spans] = bytearray(nbytes)
        return memoryview(data)

    def due(self, spans: Spans) -> memoryview:
        """Return the place of a frame, because its size is always known."""
        return self.incoming(spans, self._due(spans))

    def _due(self, spans: Spans) -> int:
        vectors = self.vectors
        return sum([(stop - start) * vectors[buffer].itemsize for buffer, start, stop in spans])

    def arrived(self, spans: Spans) -> None:
        data = self._inbox.pop(spans, None)
        if data is not None:
            at = 0
            for view in self.outgoing(spans):
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

    def copy(self, step: Copy) -> None:
        into, source = step
        one, two = self.vectors[into.buffer].arrays, self.vectors[source.buffer].arrays
        if len(one) == 1 == len(two):  # true for most, and large arrays take many steps
            pairs: Iterable[Sequence[Array]] = (
                (one[0][into.start : into.stop], two[0][source.start : source.stop]),
            )
        else:
            pairs = self._aligned(step.into, step.source)
        for part, other in pairs:
            if into.buffer < SHARED:
                copy_out(part, other)
            else:
                copy_in(part, other)

    def _aligned(self, *spans: Span) -> Iterator[list[Array]]:
        """Yield arrays of spans of equal length, cut so that all arrays of a row have one
        length."""
        return align([self.vectors[span.buffer].pieces(span.start, span.stop) for span in spans])


def _copying(into: Array | int, source: Array | int) -> Moves:
    """Return a function that copies one view to another. A number stands for a slice of X."""
    if type(source) is int:
        view, index = into, source
        assert not isinstance(view, int)

        def show(x: Sequence[Array]) -> None:
            view[...] = x[index]  # takes 60% of the time of [:]

        return show
    assert isinstance(into, int) and not isinstance(source, int)
    place, shown = into, source

    def take(x: Sequence[Array]) -> None:
        copy_out(x[place], shown)

    return take


class Reductions(Regions):
    """Regions that a kernel reduces. All operands have the arrays' own dtype."""

    def __init__(self, x: Vector, out: Vector, scratch: int, kernel: AnyKernel, size: int) -> None:
        super().__init__(x, out, scratch)
        self._reduce: Callable[..., Any]
        self._quietly = quietly()
        if isinstance(kernel, Kernel):
            self._reduce = functools.partial(self._quietly, kernel.reduce_loudly)
        else:
            # a function of the user, whose warnings the user should see
            self._reduce = kernel.reduce
        # One numpy function that reduces two operands of two or more elements, if there is one.
        self._plain = kernel.plain(2) if isinstance(kernel, Kernel) else None
        self.kernel = kernel
        self.size = size

    def everyone(
        self, lane: Lane, area: int, start: int, stop: int
    ) -> tuple[Array, Callable[..., Any]]:
        """Return this rank's place for X in its area, and a function ``reduce(out=array)``.

        For `executor.all_at_once`. The function reduces elements `start` to `stop` of what all
        ranks show.
        """
        x, kernel = self.vectors[X], self.kernel
        assert isinstance(kernel, Kernel)
        every = lane.areas.vectors(area, x.dtype)
        shown = [vector.arrays[0][start:stop] for vector in every]
        function, operands, more = kernel.reduction_of(shown)
        reduce = functools.partial(self._quietly, function, *operands, **more)
        return every[lane.board.rank].arrays[0][: x.length], reduce

    def in_views(
        self, steps: Sequence[Step], lane: Lane, area: int
    ) -> tuple[Callable[[Any], list[Array]], list[Moves | None]]:
        """Bind the steps of a plan to `area`, for `executor.in_steps`.

        Returns a function and a list. The function cuts the user's array into slices (it takes X
        and OUT as a pair, if these are two). The list has a function for each Copy and Reduce step,
        which takes these slices, and None for each other step.
        """
        x, out = self.vectors[X], self.vectors[OUT]
        shown = lane.areas.vectors(area, x.dtype)
        cuts: dict[tuple[int, int, int], int] = {}

        def find(span: Span) -> Array | int:
            """Return the part of shared memory, or the index of the slice of the user's arrays."""
            buffer, start, stop = span
            if buffer >= SHARED:
                return shown[buffer - SHARED].arrays[0][start:stop]
            which = 0 if buffer == X or out is x else 1
            return cuts.setdefault((which, start, stop), len(cuts))

        moves: list[Moves | None] = []
        for step in steps:
            if isinstance(step, Copy):
                moves.append(_copying(find(step.into), find(step.source)))
            elif isinstance(step, Reduce):
                _, start, stop = step.into
                operands = [*map(find, step.operands)]
                moves.append(self._reducing(find(step.into), operands, stop - start))
            else:
                moves.append(None)
        # A whole array needs no cut. For a small one, a cut takes as long as a copy.
        lengths = x.length, out.length
        slices = [
            (which, None if cut == [0, lengths[which]] else slice(*cut)) for which, *cut in cuts
        ]
        if out is x:
            return lambda x: [x if cut is None else x[cut] for _, cut in slices], moves
        return (
            lambda both: [both[which] if cut is None else both[which][cut] for which, cut in slices]
        ), moves

    def _reducing(self, into: Array | int, operands: Sequence[Array | int], length: int) -> Moves:
        size, kernel = self.size, self.kernel
        plain = kernel.plain(length) if isinstance(kernel, Kernel) else None
        if plain is not None and len(operands) == 2:
            quietly = self._quietly
            one, two = operands

            def reduce_two(x: Sequence[Array]) -> None:
                a = x[one] if type(one) is int else one
                b = x[two] if type(two) is int else two
                quietly(plain, a, b, out=x[into] if type(into) is int else into)

            return reduce_two

        def reduce(x: Sequence[Array]) -> None:
            views = [x[view] if type(view) is int else view for view in operands]
            self._reduce(views, x[into] if type(into) is int else into, size)

        return reduce

    def reduce(self, step: Reduce) -> None:
        vectors = self.vectors
        buffer, start, stop = step.into
        if self._plain is not None and len(step.operands) == 2 and stop - start > 1:
            # Two operands in one array each: most steps of large arrays are like this.
            (one, a, b), (two, c, d) = step.operands
            x, y, z = vectors[one].arrays, vectors[two].arrays, vectors[buffer].arrays
            if len(x) == len(y) == len(z) == 1:
                self._quietly(self._plain, x[0][a:b], y[0][c:d], out=z[0][start:stop])
                return
        into = vectors[buffer].piece(start, stop)
        operands = [vectors[buffer].piece(start, stop) for buffer, start, stop in step.operands]
        # If each operand is within one array, one call reduces them. Otherwise they are cut at
        # every end of an array.
        for piece in (into, *operands):
            if piece is None:
                break
        else:
            self._reduce(operands, into, self.size)
            return
        for part, *others in self._aligned(step.into, *step.operands):
            self._reduce(others, part, self.size)


class Scratch:
    """Memory for partial results that phases share, because only one of them runs at a time.

    It has pieces, by number, each as large as the largest that was asked for.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, NDArray[np.uint8]] = {}

    def piece(self, number: int, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` bytes of the piece with this number."""
        piece = self._pieces.get(number)
        if piece is None or len(piece) < nbytes:
            # Phases keep what they got. A new piece is at least twice as large as the one before,
            # so all earlier ones together take no more than the newest.
            room = nbytes if piece is None else max(nbytes, 2 * len(piece))
            piece = self._pieces[number] = np.empty(room, np.uint8)
        return piece[:nbytes]


class Partials(Reductions):
    """Regions for plans that keep partial results in TMP and send them from there. They have the
    kernel's accumulator dtype."""

    def __init__(self, x: Vector, out: Vector, scratch: int, kernel: AnyKernel, size: int) -> None:
        super().__init__(x, out, 0, kernel, size)
        # The accumulator dtype, so that a partial result is not rounded at each rank.
        self.vectors[TMP] = Vector.of(np.empty(scratch, kernel.wire_dtype))

    def share(self, scratch: Scratch) -> None:
        """Keep partial results in `scratch` from here on."""
        tmp = self.vectors[TMP]
        self.vectors[TMP] = Vector.of(scratch.piece(0, tmp.nbytes).view(tmp.dtype))

    def reduce(self, step: Reduce) -> None:
        if not (self.kernel.loads or self.kernel.stores):
            super().reduce(step)
            return
        spans = (step.into, *step.operands)
        for into, *operands in self._aligned(*spans):
            self._accumulate(into, operands, spans)

    def _accumulate(self, into: Array, operands: list[Array], spans: Spans) -> None:
        kernel = self.kernel
        partial, *others = [
            piece if span.buffer == TMP or not kernel.loads else kernel.load(piece)
            for piece, span in zip(operands, spans[1:], strict=True)
        ]
        for other in others:
            # Never in place: the first operand may be the user's array, or a partial result that is
            # sent from its place.
            result = np.empty_like(partial)
            kernel.combine(result, partial, other)
            partial = result
        if spans[0].buffer == TMP:
            np.copyto(into, partial)
        else:
            kernel.store(partial, into, self.size)

    def copy(self, step: Copy) -> None:
        if step.into.buffer != TMP or step.source.buffer == TMP:
            super().copy(step)
            return
        for into, source in self._aligned(step.into, step.source):
            np.copyto(into, self.kernel.load(source))


class _Cells(dict[int, tuple[memoryview, list[Array]]]):
    """The cells of `SmallReductions`: the bytes of each, and its arrays, one for each group. A cell
    is made at its first use."""

    def __init__(self, kernels: Sequence[AnyKernel], lengths: Sequence[int]) -> None:
        super().__init__()
        self.scratch = Scratch()
        self._dtypes = [kernel.wire_dtype for kernel in kernels]
        self._sizes = [
            dtype.itemsize * length for dtype, length in zip(self._dtypes, lengths, strict=True)
        ]

    def __missing__(self, index: int) -> tuple[memoryview, list[Array]]:
        data = self.scratch.piece(index, sum(self._sizes))
        parts = zip(self._dtypes, self._sizes, accumulate(self._sizes), strict=True)
        cell = self[index] = data.data, [data[end - n : end].view(dtype) for dtype, n, end in parts]
        return cell


class SmallReductions:
    """Small values, reduced whole by `recursive_doubling.all_reduce`, or in one round by
    `direct_exchange.all_reduce`.

    X and OUT are vectors of users' arrays, one for each group. TMP has cells. A cell holds one
    partial result of all groups, one after the other as they travel, in the kernels' accumulator
    dtypes. Each cell is made once. Frames are sent from it and received in it.
    """

    def __init__(self, groups: Sequence[tuple[AnyKernel, Vector, Vector]], size: int) -> None:
        self.groups = groups  # the kernel, input and result of each
        self._size = size
        # Partial results, by their number in the plan.
        self._cells = _Cells([kernel for kernel, *_ in groups], [x.length for _, x, _ in groups])
        self._result: memoryview | None = None  # for a frame of OUT
        self._quietly = quietly()  # calls a function without numpy's warnings
        # A single array whose accumulators have its own dtype needs no further checks.
        self.plain: Callable[..., Any] | None = None
        if len(groups) == 1:
            kernel, x, out = groups[0]
            if isinstance(kernel, Kernel) and len(x.arrays) == len(out.arrays) == 1:
                self.plain = kernel.plain(x.length)  # None: no single function does it

    def share(self, scratch: Scratch) -> None:
        """Make all cells in `scratch`, of which none was used yet."""
        self._cells.scratch = scratch

    def cell(self, span: Span) -> tuple[memoryview, list[Array]]:
        """Return the bytes of a cell, and its arrays, one for each group."""
        return self._cells[span.start]

    def hold(self, cell: int, partial: Array) -> None:
        """Fill a cell, which has one group, with a `partial` that was reduced elsewhere."""
        self._cells[cell][1][0][:] = partial

    def due(self, spans: Spans) -> memoryview:
        """Return the place of a frame, because its size is always known."""
        (span,) = spans
        if span.buffer == TMP:
            return self._cells[span.start][0]
        if self._result is None:
            nbytes = sum(out.nbytes for _, _, out in self.groups)
            self._result = self._cells.scratch.piece(_RESULT, nbytes).data
        return self._result

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        (span,) = spans
        if span.buffer == TMP:
            return (self._cells[span.start][0],)
        # Copy the result. It is small, and the user may change it as soon as the operation is done.
        views = [view for group in self.groups for view in group[2].views(0, group[2].length)]
        return (memoryview(b"".join(views)),)

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        view = self.due(spans)
        if nbytes != len(view):
            raise ProtocolError(f"a frame has {nbytes} bytes, expected {len(view)}")
        return view

    def arrived(self, spans: Spans) -> None:
        if spans[0].buffer == TMP:
            return
        data, at = self.due(spans), 0
        for _, _, out in self.groups:
            for view in out.views(0, out.length):
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

    def copy(self, step: Copy) -> None:
        if self.plain is not None:
            self._cells[step.into.start][1][0][:] = self.groups[0][1].arrays[0]
            return
        for (kernel, x, _), partial in zip(
            self.groups, self._cells[step.into.start][1], strict=True
        ):
            _load(kernel, x, partial)

    def reduce(self, step: Reduce) -> None:
        """Reduce the input alone, or two cells."""
        into, operands = step.into, step.operands
        if self.plain is not None and len(operands) == 2:
            arrays = self._cells[into.start][1] if into.buffer == TMP else self.groups[0][2].arrays
            one, two = operands
            a, b = self._cells[one.start][1][0], self._cells[two.start][1][0]
            self._quietly(self.plain, a, b, out=arrays[0])
            return
        cells = [self._cells[span.start][1] for span in operands if span.buffer == TMP]
        for index, (kernel, x, out) in enumerate(self.groups):
            direct = into.buffer != TMP and len(out.arrays) == 1 and not kernel.stores
            # If accumulators are stored as they are, they go straight to the result.
            cell = into.start if into.buffer == TMP else _TOTAL
            total = out.arrays[0] if direct else self._cells[cell][1][index]
            if not cells:
                _load(kernel, x, total)
            elif isinstance(kernel, Kernel):
                self._quietly(kernel.combine_loudly, total, cells[0][index], cells[1][index])
            else:
                kernel.combine(total, cells[0][index], cells[1][index])
            if into.buffer != TMP and not direct:
                _store(kernel, total, out, self._size)


def _load(kernel: AnyKernel, x: Vector, partial: Array) -> None:
    """Copy `x` to `partial`, as accumulators."""
    if len(x.arrays) == 1:
        kernel.load(x.arrays[0], partial)
        return
    at = 0
    for piece in x.pieces(0, x.length):
        kernel.load(piece, partial[at : at + len(piece)])
        at += len(piece)


def _store(kernel: AnyKernel, total: Array, out: Vector, size: int) -> None:
    """Store the accumulators of `size` ranks in `out`."""
    at = 0
    for piece in out.pieces(0, out.length):
        kernel.store(total[at : at + len(piece)], piece, size)
        at += len(piece)
