"""What the spans of plans mean: small blobs, regions of users' arrays, and accumulators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.vector import Vector, align
from aiodist.errors import ProtocolError
from aiodist.schedules.plan import OUT, SHARED, TMP, Copy, Reduce, Span, X
from aiodist.shared_memory.lane import Lane

Array = NDArray[Any]
AnyKernel = Kernel | CustomKernel
Spans = tuple[Span, ...]


class Blobs:
    """One blob of bytes a rank: OUT[r] is the blob of rank r. For `dissemination.all_gather`,
    `team_whole.share`, and for `pull_whole.share` with cells of one unit. What lies in shared
    memory looks like the payload of a frame, and begins where the area does."""

    def __init__(self, rank: int, size: int, own: bytes) -> None:
        self.blobs: list[bytes] = [b""] * size
        self.blobs[rank] = own
        self._rank = rank
        self._inbox: dict[Spans, bytearray] = {}
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

    def arrived(self, spans: Spans) -> None:
        data = bytes(self._inbox.pop(spans))
        at = 0
        for span in spans:
            for index in range(span.start, span.stop):
                stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
                if stop > len(data):
                    raise ProtocolError("a frame of blobs is cut off")
                self.blobs[index] = data[at + 4 : stop]
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
    so is shared memory. `shown`: where all ranks see the arrays, these are what ``SHARED + r``
    stands for; else it is their areas of staging memory."""

    def __init__(
        self, x: Vector, out: Vector, scratch: int = 0, shown: Sequence[Vector] = ()
    ) -> None:
        self._vectors = [x, out, Vector([np.empty(scratch, x.dtype)], x.dtype)]
        self._shown = shown
        self._inbox: dict[Spans, bytearray] = {}

    def bind(self, lane: Lane, area: int) -> None:
        self._vectors[SHARED:] = self._shown or lane.vectors(area, self._vectors[0].dtype)

    def unbind(self) -> None:
        del self._vectors[SHARED:]

    @classmethod
    def of_bytes(
        cls,
        x: Sequence[memoryview],
        out: Sequence[memoryview],
        shown: Sequence[Vector] = (),
        scratch: int = 0,
    ) -> Regions:
        """Plain bytes, for exchanges that reduce nothing."""
        return cls(Vector(x, np.uint8), Vector(out, np.uint8), scratch, shown)

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        if len(spans) == 1:
            buffer, start, stop = spans[0]
            return self._vectors[buffer].views(start, stop)
        return [view for span in spans for view in self._vectors[span.buffer].views(*span[1:])]

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        vectors = self._vectors
        due = sum([(stop - start) * vectors[buffer].itemsize for buffer, start, stop in spans])
        if nbytes != due:
            raise ProtocolError(f"a frame of {nbytes} bytes where {due} were due")
        views = self.outgoing(spans)
        if len(views) == 1:
            return views[0]
        data = self._inbox[spans] = bytearray(nbytes)
        return memoryview(data)

    def arrived(self, spans: Spans) -> None:
        data = self._inbox.pop(spans, None)
        if data is not None:
            at = 0
            for view in self.outgoing(spans):
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

    def copy(self, step: Copy) -> None:
        into, source = self._piece(step.into), self._piece(step.source)
        if into is not None and source is not None:
            into[:] = source
            return
        for part, other in self._aligned(step.into, step.source):
            part[:] = other

    def _piece(self, span: Span) -> Array | None:
        buffer, start, stop = span
        vector = self._vectors[buffer]
        if len(vector.arrays) == 1:
            return vector.arrays[0][start:stop]
        return vector.piece(start, stop)

    def _aligned(self, *spans: Span) -> Iterator[list[Array]]:
        """The arrays of equally long spans, cut so that each row has one length."""
        return align([self._vectors[span.buffer].pieces(span.start, span.stop) for span in spans])


class Reductions(Regions):
    """Regions that are reduced by a kernel, all operands being of the arrays' own dtype."""

    def __init__(
        self,
        x: Vector,
        out: Vector,
        scratch: int,
        kernel: AnyKernel,
        size: int,
        shown: Sequence[Vector] = (),
    ) -> None:
        super().__init__(x, out, scratch, shown)
        self._reduce: Callable[..., Any]
        if isinstance(kernel, Kernel):
            self._reduce = functools.partial(quietly(), kernel.reduce_loudly)
        else:
            self._reduce = kernel.reduce  # by a function of the user, who hears of everything
        self._size = size

    def reduce(self, step: Reduce) -> None:
        into = self._piece(step.into)
        operands = [self._piece(span) for span in step.operands]
        if into is not None and all(operand is not None for operand in operands):
            self._reduce(operands, into, self._size)
            return
        for part, *others in self._aligned(step.into, *step.operands):
            self._reduce(others, part, self._size)


class Partials(Reductions):
    """Regions for plans in which partial results stand in TMP, in the kernel's accumulator dtype,
    and travel from there."""

    def __init__(self, x: Vector, out: Vector, scratch: int, kernel: AnyKernel, size: int) -> None:
        super().__init__(x, out, 0, kernel, size)
        self._vectors[TMP] = Vector([np.empty(scratch, kernel.wire_dtype)], kernel.wire_dtype)
        self._kernel = kernel

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


class SmallReductions:
    """Small values, reduced whole by `recursive_doubling.all_reduce`: each cell holds one array a
    group.

    X and OUT are vectors of users' arrays, TMP cells hold partial results in the kernels'
    accumulator dtypes. Cells are replaced, never written to, so they may be on their way.
    """

    def __init__(self, groups: Sequence[tuple[AnyKernel, Vector, Vector]], size: int) -> None:
        self._groups = groups
        self._size = size
        self._partials: dict[int, list[Array]] = {}
        self._inbox: dict[Spans, bytearray] = {}

    def hold(self, cell: int, partial: list[Array]) -> None:
        """A partial result that was made elsewhere. It is not written to from here on, unless it is
        OUT itself."""
        self._partials[cell] = partial

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        (span,) = spans
        if span.buffer == TMP:
            return [_view(array) for array in self._partials[span.start] if array.nbytes]
        # The result: small, and the user may alter it as soon as the operation is done.
        views = [view for group in self._groups for view in group[2].views(0, group[2].length)]
        return [memoryview(b"".join(views))]

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        (span,) = spans
        if span.buffer == TMP:
            due = sum(kernel.wire_dtype.itemsize * x.length for kernel, x, _ in self._groups)
        else:
            due = sum(out.length * out.itemsize for _, _, out in self._groups)
        if nbytes != due:
            raise ProtocolError(f"a frame of {nbytes} bytes where {due} were due")
        data = self._inbox[spans] = bytearray(nbytes)
        return memoryview(data)

    def arrived(self, spans: Spans) -> None:
        (span,) = spans
        data = self._inbox.pop(spans)
        at = 0
        if span.buffer == TMP:
            cell: list[Array] = []
            for kernel, x, _ in self._groups:
                cell.append(np.frombuffer(data, kernel.wire_dtype, x.length, at))
                at += cell[-1].nbytes
            self._partials[span.start] = cell
            return
        for _, _, out in self._groups:
            for view in out.views(0, out.length):
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

    def copy(self, step: Copy) -> None:
        self._partials[step.into.start] = self._load(step.source)

    def reduce(self, step: Reduce) -> None:
        cells = [self._load(operand) for operand in step.operands]
        into_out = step.into.buffer != TMP
        results: list[Array] = []
        for index, (kernel, _, out) in enumerate(self._groups):
            partials = [cell[index] for cell in cells]
            total = partials[0]
            last = len(partials) - 1
            pieces = out.pieces(0, out.length) if into_out else []
            for number, partial in enumerate(partials[1:], 1):
                if number == last and len(pieces) == 1 and not kernel.stores:
                    # Accumulators are what is stored: no detour.
                    kernel.combine(pieces[0], total, partial)
                    pieces = []
                    break
                into = np.empty_like(total)
                kernel.combine(into, total, partial)
                total = into
            at = 0
            for piece in pieces:
                kernel.store(total[at : at + len(piece)], piece, self._size)
                at += len(piece)
            results.append(total)
        if not into_out:
            self._partials[step.into.start] = results

    def _load(self, span: Span) -> list[Array]:
        if span.buffer == TMP:
            return self._partials[span.start]
        cell: list[Array] = []
        for kernel, x, _ in self._groups:
            pieces = x.pieces(0, x.length)
            if len(pieces) == 1:
                cell.append(kernel.load(pieces[0]))
            else:
                loaded = [kernel.load(piece) for piece in pieces]
                cell.append(np.concatenate([np.empty(0, kernel.wire_dtype), *loaded]))
        return cell


def _view(array: Array) -> memoryview:
    return array.view(np.uint8).data
