"""What the spans of plans mean: small blobs, regions of users' arrays, and accumulators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.copying import copy_out
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
"""A step of a plan that is bound to shared memory: it is given slices of the user's array."""
_TOTAL = -1
"""A cell that is none of the plan's: where the result is before it is stored."""


class Blobs:
    """One blob of bytes a rank: OUT[r] is the blob of rank r. For `dissemination.all_gather`,
    `team_whole.share`, and for `pull_whole.share` with cells of one unit. What lies in shared
    memory looks like the payload of a frame, and begins where the area does."""

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
        """The blobs are as long as that, by rank, in all likelihood. Empty: nobody knows."""
        self._expected = lengths

    def due(self, spans: Spans) -> memoryview | None:
        """Where the frame for `spans` goes, if it is as long as expected."""
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
                    raise ProtocolError("a frame of blobs is cut off")
                self.blobs[index] = bytes(data[at + 4 : stop])
                at = stop
        if at != len(data):
            raise ProtocolError("a frame of blobs has bytes to spare")

    def bind(self, lane: Lane, area: int) -> None:
        self._areas = {rank: lane.area(rank, area) for rank in (self._rank, *lane.others)}

    def unbind(self) -> None:
        self._areas.clear()

    def copy(self, step: Copy) -> None:
        if step.into.buffer >= SHARED:
            # X is the own blob.
            own = Span(OUT, self._rank, self._rank + 1)
            (data,) = self.outgoing((own if step.source.buffer == X else step.source,))
            area = self._areas[self._rank]
            if len(data) > len(area):
                raise ValueError(f"small values of {len(data)} bytes, over {len(area)}")
            area[: len(data)] = data
            return
        # Do not raise yet: the memory of a rank that gave up may hold anything. `check` raises once
        # it is known that nobody did.
        source = step.source.buffer - SHARED
        area, at = self._areas[source], 0
        for rank in range(step.into.start, step.into.stop):
            stop = at + 4 + int.from_bytes(area[at : at + 4], "big")
            if stop > len(area):
                self._wrong.append(source)
            self.blobs[rank] = bytes(area[at + 4 : stop])
            at = stop

    def check(self) -> None:
        """Raise ProtocolError for what was read and makes no sense."""
        if self._wrong:
            raise ProtocolError(f"blobs of ranks {self._wrong} over the size of shared memory")


class Regions:
    """Regions of arrays. X and OUT are vectors of one dtype; TMP is scratch of the same dtype, and
    so is shared memory. ``SHARED + r`` stands for the staging memory of rank r, unless all ranks
    see the arrays themselves (`show`)."""

    def __init__(self, x: Vector, out: Vector, scratch: int = 0) -> None:
        self._vectors = [x, out, Vector([np.empty(scratch, x.dtype)], x.dtype)]
        self._shown: Sequence[Vector] = ()
        self._inbox: dict[Spans, bytearray] = {}

    def show(self, arrays: Sequence[Vector]) -> None:
        """Until `unbind`, all ranks see `arrays`, by rank."""
        self._shown = arrays

    def bind(self, lane: Lane, area: int) -> None:
        self._vectors[SHARED:] = self._shown or lane.vectors(area, self._vectors[0].dtype)

    def unbind(self) -> None:
        del self._vectors[SHARED:]
        self._shown = ()

    @classmethod
    def of_bytes(
        cls, x: Sequence[memoryview], out: Sequence[memoryview], scratch: int = 0
    ) -> Regions:
        """Plain bytes, for exchanges that reduce nothing."""
        return cls(Vector(x, np.uint8), Vector(out, np.uint8), scratch)

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        if len(spans) == 1:
            buffer, start, stop = spans[0]
            return self._vectors[buffer].views(start, stop)
        return [view for span in spans for view in self._vectors[span.buffer].views(*span[1:])]

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        due = self._due(spans)
        if nbytes != due:
            raise ProtocolError(f"a frame of {nbytes} bytes where {due} were due")
        views = self.outgoing(spans)
        if len(views) == 1:
            return views[0]
        # A frame is received in one piece of memory. Where its spans lie apart, it is cut when it
        # is complete (`arrived`).
        data = self._inbox[spans] = bytearray(nbytes)
        return memoryview(data)

    def due(self, spans: Spans) -> memoryview:
        """Where a frame goes, which is always of this size."""
        return self.incoming(spans, self._due(spans))

    def _due(self, spans: Spans) -> int:
        vectors = self._vectors
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
        one, two = self._vectors[into.buffer].arrays, self._vectors[source.buffer].arrays
        if len(one) == 1 == len(two):  # most are, and large arrays take many steps
            pairs: Iterable[Sequence[Array]] = (
                (one[0][into.start : into.stop], two[0][source.start : source.stop]),
            )
        else:
            pairs = self._aligned(step.into, step.source)
        for part, other in pairs:
            if into.buffer < SHARED:
                copy_out(part, other)
            else:
                part[:] = other

    def _aligned(self, *spans: Span) -> Iterator[list[Array]]:
        """The arrays of equally long spans, cut so that each row has one length."""
        return align([self._vectors[span.buffer].pieces(span.start, span.stop) for span in spans])


def _copying(into: Array | int, source: Array | int) -> Moves:
    """Copies one view to another; a number is a slice of X."""
    if type(source) is int:
        view, index = into, source
        assert not isinstance(view, int)

        def show(x: Sequence[Array]) -> None:
            view[...] = x[index]  # in three fifths of the time of [:]

        return show
    assert isinstance(into, int) and not isinstance(source, int)
    place, shown = into, source

    def take(x: Sequence[Array]) -> None:
        copy_out(x[place], shown)

    return take


class Reductions(Regions):
    """Regions that are reduced by a kernel, all operands being of the arrays' own dtype."""

    def __init__(self, x: Vector, out: Vector, scratch: int, kernel: AnyKernel, size: int) -> None:
        super().__init__(x, out, scratch)
        self._reduce: Callable[..., Any]
        self._quietly = quietly()
        if isinstance(kernel, Kernel):
            self._reduce = functools.partial(self._quietly, kernel.reduce_loudly)
        else:
            self._reduce = kernel.reduce  # by a function of the user, who hears of everything
        # Reduces two operands of two elements or more by one function, where there is one.
        self._plain = kernel.plain(2) if isinstance(kernel, Kernel) else None
        self._kernel = kernel
        self._size = size

    @property
    def parts(self) -> tuple[Vector, Vector, AnyKernel, int]:
        """The input, the result, what reduces, and of how many ranks."""
        return self._vectors[X], self._vectors[OUT], self._kernel, self._size

    def everyone(
        self, lane: Lane, area: int, start: int, stop: int
    ) -> tuple[Array, Callable[..., Any]]:
        """For `executor.all_at_once`: where this rank shows X in its area, and what reduces these
        elements of what all ranks show there, ``reduce(out=array)``."""
        x, kernel = self._vectors[X], self._kernel
        assert isinstance(kernel, Kernel)
        every = [shown.arrays[0] for shown in lane.vectors(area, x.dtype)]
        function, operands, more = kernel.reduction_of([shown[start:stop] for shown in every])
        reduce = functools.partial(self._quietly, function, *operands, **more)
        return every[lane.board.rank][: x.length], reduce

    def in_views(
        self, steps: Sequence[Step], lane: Lane, area: int
    ) -> tuple[Callable[[Any], list[Array]], list[Moves | None]]:
        """For `executor.in_steps`: what the Copy and Reduce steps do, with the views that they need
        of `area` cut once. Each is to be given what the first function makes of the user's array
        (of X and OUT, where these are two): its slices. Of other steps, None."""
        x, out = self._vectors[X], self._vectors[OUT]
        shown = lane.vectors(area, x.dtype)
        cuts: dict[tuple[int, int, int], int] = {}

        def find(span: Span) -> Array | int:
            """The part of shared memory; or which slice of the user's arrays."""
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
        # All of an array needs no cut: of small ones, that takes as long as to copy them.
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
        size, kernel = self._size, self._kernel
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
        vectors = self._vectors
        buffer, start, stop = step.into
        if self._plain is not None and len(step.operands) == 2 and stop - start > 1:
            # Two ranks, each with one array: most steps of large arrays are of this kind.
            (one, a, b), (two, c, d) = step.operands
            x, y, z = vectors[one].arrays, vectors[two].arrays, vectors[buffer].arrays
            if len(x) == len(y) == len(z) == 1:
                self._quietly(self._plain, x[0][a:b], y[0][c:d], out=z[0][start:stop])
                return
        into = vectors[buffer].piece(start, stop)
        operands = [vectors[buffer].piece(start, stop) for buffer, start, stop in step.operands]
        # Where each of them lies in one array, one call reduces them. Else they are cut wherever an
        # array of any of them ends.
        for piece in (into, *operands):
            if piece is None:
                break
        else:
            self._reduce(operands, into, self._size)
            return
        for part, *others in self._aligned(step.into, *step.operands):
            self._reduce(others, part, self._size)


class Partials(Reductions):
    """Regions for plans in which partial results stand in TMP, in the kernel's accumulator dtype,
    and travel from there."""

    def __init__(self, x: Vector, out: Vector, scratch: int, kernel: AnyKernel, size: int) -> None:
        super().__init__(x, out, 0, kernel, size)
        # In the dtype of the accumulator, so that a partial result is not rounded each time that it
        # is passed on.
        self._vectors[TMP] = Vector([np.empty(scratch, kernel.wire_dtype)], kernel.wire_dtype)

    def reduce(self, step: Reduce) -> None:
        if not (self._kernel.loads or self._kernel.stores):
            super().reduce(step)
            return
        spans = (step.into, *step.operands)
        for into, *operands in self._aligned(*spans):
            self._accumulate(into, operands, spans)

    def _accumulate(self, into: Array, operands: list[Array], spans: Spans) -> None:
        kernel = self._kernel
        partial, *others = [
            piece if span.buffer == TMP or not kernel.loads else kernel.load(piece)
            for piece, span in zip(operands, spans[1:], strict=True)
        ]
        for other in others:
            # Never in place: the first operand may be the array of the user, or a partial result
            # that is sent from where it lies.
            result = np.empty_like(partial)
            kernel.combine(result, partial, other)
            partial = result
        if spans[0].buffer == TMP:
            np.copyto(into, partial)
        else:
            kernel.store(partial, into, self._size)

    def copy(self, step: Copy) -> None:
        if step.into.buffer != TMP or step.source.buffer == TMP:
            super().copy(step)
            return
        for into, source in self._aligned(step.into, step.source):
            np.copyto(into, self._kernel.load(source))


class _Cells(dict[int, tuple[memoryview, list[Array]]]):
    """The cells of `SmallReductions`: the bytes of each, and the arrays in it, one a group. They
    are made when they are first asked for."""

    def __init__(self, kernels: Sequence[AnyKernel], lengths: Sequence[int]) -> None:
        super().__init__()
        self._dtypes = [kernel.wire_dtype for kernel in kernels]
        self._sizes = [
            dtype.itemsize * length for dtype, length in zip(self._dtypes, lengths, strict=True)
        ]

    def __missing__(self, index: int) -> tuple[memoryview, list[Array]]:
        data = np.empty(sum(self._sizes), np.uint8)
        parts = zip(self._dtypes, self._sizes, accumulate(self._sizes), strict=True)
        cell = self[index] = data.data, [data[end - n : end].view(dtype) for dtype, n, end in parts]
        return cell


class SmallReductions:
    """Small values, reduced whole by `recursive_doubling.all_reduce`, or in one round by
    `direct_exchange.all_reduce`.

    X and OUT are vectors of users' arrays, one a group. TMP are cells, each of one partial result
    of all groups, in the kernels' accumulator dtypes, one behind the other as they travel. Each
    cell is memory of its own, made once, and frames are sent from it and received in it.
    """

    def __init__(self, groups: Sequence[tuple[AnyKernel, Vector, Vector]], size: int) -> None:
        self.groups = groups  # kernel, input and result of each
        self._size = size
        # Partial results, by the number that the plan gives them.
        self._cells = _Cells([kernel for kernel, *_ in groups], [x.length for _, x, _ in groups])
        self._result: memoryview | None = None  # where OUT is received
        self._quietly = quietly()  # calls a function without warnings of numpy
        # One array, whose elements accumulators are, needs no look at what else there could be.
        self.plain: Callable[..., Any] | None = None
        if len(groups) == 1:
            kernel, x, out = groups[0]
            if isinstance(kernel, Kernel) and len(x.arrays) == len(out.arrays) == 1:
                self.plain = kernel.plain(x.length)  # None: no one function does it

    def cell(self, span: Span) -> tuple[memoryview, list[Array]]:
        """The bytes of a cell, and the arrays in it, one a group."""
        return self._cells[span.start]

    def hold(self, cell: int, partial: Array) -> None:
        """A cell, of one group, is `partial`, which was reduced elsewhere."""
        self._cells[cell][1][0][:] = partial

    def due(self, spans: Spans) -> memoryview:
        """Where a frame goes, which is always of this size."""
        (span,) = spans
        if span.buffer == TMP:
            return self._cells[span.start][0]
        if self._result is None:
            self._result = memoryview(bytearray(sum(out.nbytes for _, _, out in self.groups)))
        return self._result

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        (span,) = spans
        if span.buffer == TMP:
            return (self._cells[span.start][0],)
        # The result: small, and the user may alter it as soon as the operation is done.
        views = [view for group in self.groups for view in group[2].views(0, group[2].length)]
        return (memoryview(b"".join(views)),)

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        view = self.due(spans)
        if nbytes != len(view):
            raise ProtocolError(f"a frame of {nbytes} bytes where {len(view)} were due")
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
        """Of the input alone, or of two cells."""
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
            # Where accumulators are what is stored, there is no detour.
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
    """What is in `x`, as accumulators."""
    if len(x.arrays) == 1:
        kernel.load(x.arrays[0], partial)
        return
    at = 0
    for piece in x.pieces(0, x.length):
        kernel.load(piece, partial[at : at + len(piece)])
        at += len(piece)


def _store(kernel: AnyKernel, total: Array, out: Vector, size: int) -> None:
    """Accumulators of `size` ranks, as the result in `out`."""
    at = 0
    for piece in out.pieces(0, out.length):
        kernel.store(total[at : at + len(piece)], piece, size)
        at += len(piece)
