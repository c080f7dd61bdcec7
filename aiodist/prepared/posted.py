"""The kinds of calls that are posted, and what becomes of the posts of all ranks.

Three kinds of calls begin by showing one value of each rank to all, and need nothing else of the
others:

* *Reductions* of small arrays.
* *Values* of known shapes (see `posted_values`).
* Other *programs* that begin so (`base.share`, its `first`). These are calls that come for the
  first time, or that look different each time. If there are phases after the first one, an
  operation does them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.vector import Vector
from aiodist.engine.early import Key
from aiodist.engine.executor import Executor
from aiodist.engine.operation import NoResult, Operation, Program
from aiodist.engine.phase import Phase
from aiodist.errors import ProtocolError
from aiodist.links.moved import Moved
from aiodist.phases.base import Call
from aiodist.phases.memories import Blobs, SmallReductions
from aiodist.prepared.express import (
    ExpressGroup,
    Flat,
    Recipe,
    before,
    rest_of,
    returning,
)
from aiodist.schedules import direct_exchange
from aiodist.schedules.plan import OUT, Copy, Span
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import CHEAP_COPY, HEAD, LAP, Posts, Reader, padded, prefixes
from aiodist.wire.frames import pack_fields
from aiodist.work import Work

KEPT_TAGS = 2048
"""The most tags for which one recipe keeps something."""

Data = bytes | memoryview
Begin = Callable[[int], bytes]
"""Makes what precedes the data in a post, from the number of the call."""


T = TypeVar("T")


class ByTag(dict[object, T]):
    """Keeps what `make` makes once for each tag, for `KEPT_TAGS` tags.

    What precedes the data in a post is the same each time but for the number of the call.
    """

    def __init__(self, make: Callable[[object], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, tag: object) -> T:
        if len(self) == KEPT_TAGS:
            self.clear()
        made = self[tag] = self._make(tag)
        return made


class Otherwise(NamedTuple):
    """Stands for the result of a call that becomes an operation.

    `executor` has its first phase, for which the posts count as frames; None: it has none. If the
    call is on a `lane` by now, that phase is on the lane as well.
    """

    executor: Executor | None
    rest: Program
    lane: Lane | None = None


InOneGo = Callable[..., bool | None]
"""See `in_one_go`."""


class Posted(ABC):
    """One kind of calls, or one call.

    `op`, `call` and `nbytes`: see `Recipe`. `lengths` says how many bytes each rank posts; -1: not
    known. `in_one_go` does a whole call in one function, if there is such a function.
    """

    __slots__ = ()
    in_one_go: InOneGo | None = None
    tapes: tuple[Any, Any] = (None, None)
    op: str
    call: bytes
    nbytes: int
    lengths: list[int]

    def for_call(self, number: int, given: Any) -> Posted:
        """Return what stands for the call with this number. This is asked at most once a call."""
        return self

    @abstractmethod
    def shown(self, given: Any) -> Data:
        """Return the data to post for a call with `given`."""

    @abstractmethod
    def prefixes(self, tag: object, number: int) -> Sequence[bytes | None]:
        """Return what precedes the data in the post of each rank. None: its length is not known."""

    @abstractmethod
    def fits(self, nbytes: int) -> bool:
        """Say whether a post for it may have so many bytes."""

    @abstractmethod
    def result(self, values: Sequence[Data], x: Any, given: Any) -> Any:
        """Return the result that follows from the posts of all ranks, or `Otherwise`.

        `x`: see `Express._run`.
        """

    def made(self, x: Any) -> Any:
        """Return the result of a call that was done in one go. `x`: see `Express._run`."""
        return x

    @abstractmethod
    def begun(self, x: Any, given: Any) -> Otherwise:
        """Return how an operation continues a call that has posted.

        To its plan, the post counts as a frame that was sent to all other ranks.
        """

    def keep(self, given: Any) -> Any:
        """Return what a waiting call keeps of `given`."""
        return given


class PostRecipe(Recipe, Posted):
    """A recipe of an all_reduce or a reduce that is posted.

    No call uses the memory of its phase, because that serves one call at a time, and many may wait.
    """

    __slots__ = (
        "_kernel", "_plain", "_quietly", "_rank", "_size", "begins", "dtype", "heads", "in_one_go",
        "lengths",
    )  # fmt: skip

    def __init__(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object, kernel: Kernel
    ) -> None:
        super().__init__(op, call, phase, vector, keeps)
        self.dtype = vector.dtype
        self._kernel = kernel
        # Reduces two arrays; None: no function does.
        self._plain = kernel.plain(vector.length)
        self._rank = phase.prepared.plan.rank
        self._size = phase.prepared.plan.size
        self.lengths = [self.nbytes] * self._size
        self.begins = ByTag(self._begin)
        # With 0 as the number: the compiled part puts the right one in.
        self.heads = ByTag(lambda tag: (self.begins[tag](0),) * self._size)
        self._quietly = quietly()
        self.in_one_go: InOneGo | None = None

    @property
    def compiled(self) -> int | None:
        """The number of the kernel in the compiled part; None: it has none."""
        return self._kernel.compiled

    def shown(self, given: Any) -> Data:
        shown: Data = given.tobytes() if self.nbytes <= CHEAP_COPY else given.view(np.uint8).data
        return shown

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        return (self.begins[tag](number),) * self._size

    def _begin(self, tag: object) -> Begin:
        return prefixes(pack_fields(tag, self.call), self.lengths[0])

    def fits(self, nbytes: int) -> bool:
        return nbytes == self.lengths[0]

    def result(self, values: Sequence[Data], x: Any, given: Any) -> Any:
        if not self.returns:
            return None
        arrays = [np.frombuffer(value, self.dtype) for value in values]
        arrays[self._rank] = given
        self.reduce(arrays, given)
        return x if self.finish is None else self.finish(x)

    def made(self, x: Any) -> Any:
        return x if x is None or self.joined is None else x[0]  # `finish` has copied it there

    def release(self) -> None:
        self.in_one_go = None

    def reduce(self, values: Sequence[Any], out: Flat) -> None:
        """Reduce `values`, in the order of ranks, into ``out``, which is one of them."""
        plain, quietly = self._plain, self._quietly
        if plain is None:
            quietly(self._kernel.reduce_loudly, values, out, self._size)
            return
        total = values[0]
        if self._size > 2:
            partial = np.empty_like(out)
            for value in values[1:-1]:
                quietly(plain, total, value, out=partial)
                total = partial
        quietly(plain, total, values[-1], out=out)

    def begun(self, x: Any, given: Any) -> Otherwise:
        vector = Vector.of(given)
        out = vector if self.returns else Vector.of(np.empty_like(given))
        memory = SmallReductions([(self._kernel, vector, out)], self._size)
        first, *_ = self.phase.prepared.plan.steps
        assert isinstance(first, Copy)
        memory.copy(first)
        phase = Phase(self.phase.prepared, memory)
        return Otherwise(Executor(phase, None, done=self._size), rest_of(self, x))


def in_one_go(
    recipe: PostRecipe,
    posts: Posts,
    wake: Callable[[list[int]], bool],
    comes: Callable[[Reader], bool],
    moved: Moved,
) -> InOneGo:
    """Return a function that does a whole reduction within its call.

    It takes the tag, the number, the result and the array of the call. It returns True if the call
    is done, False if it has only posted, and None if the ring has no room. `wake` wakes ranks, and
    says whether the call may go on. `comes` says whether a rank posts anything within a moment.

    This exists for speed alone: it leaves the same in memory as the general way in `post_express`.
    It looks up nothing that is the same in all calls, and reduces posts in their rings.
    """
    dtype, nbytes, size = recipe.dtype, recipe.nbytes, len(recipe.lengths)
    length, itemsize, room = nbytes // dtype.itemsize, dtype.itemsize, padded(nbytes)
    put, tell, reduce, finish = posts.put_parts, posts.tell, recipe.reduce, recipe.finish
    begins, returns = recipe.begins, recipe.returns
    shown = [(reader, np.frombuffer(reader.ring, dtype)) for reader in posts.readers]
    end = len(posts.ring)

    def run(tag: object, number: int, x: Any, flat: Flat) -> bool | None:
        prefix = begins[tag](number)
        before = len(prefix)
        data = flat.tobytes() if nbytes <= CHEAP_COPY else flat.view(np.uint8).data
        if put(prefix, (data,), before + room) < 0:
            return None
        woken = tell()
        if woken and not wake(woken):
            return False
        values = [flat] * size
        for reader, numbers in shown:
            if reader.words[HEAD] == reader.taken and not comes(reader):
                return False
            if reader.words[LAP] == reader.taken:
                reader.at = 0
            at = reader.at
            start = at + before
            if reader.ring[at:start].tobytes() != prefix or start + nbytes > end:
                return False
            first = start // itemsize
            values[reader.rank] = numbers[first : first + length]
        try:
            if returns:
                reduce(values, flat)
                if finish is not None:
                    finish(x)
        finally:
            for reader, _ in shown:
                reader.move(before + room)
        moved.sent += nbytes
        moved.received += nbytes * (size - 1)
        return True

    return run


class PostedProgram(Posted):
    """A call of an unknown kind, whose first phase is posted."""

    __slots__ = (
        "_memory", "_phase", "_program", "_rank", "_shown", "call", "lengths", "nbytes", "op",
    )  # fmt: skip

    def __init__(self, context: ExpressGroup, call: Call, phase: Phase, program: Program) -> None:
        self.op = call.op
        self.call = call.text.encode()
        self.nbytes = call.nbytes
        self._rank = context.rank
        self._phase = phase
        self._memory = cast(Blobs, phase.memory)
        self._program = program  # the rest, after that phase
        (self._shown,) = self._memory.outgoing((Span(OUT, context.rank, context.rank + 1),))
        self.lengths = [-1] * context.size
        self.lengths[context.rank] = len(self._shown)

    def shown(self, given: Any) -> Data:
        return self._shown

    def prefixes(self, tag: object, number: int) -> Sequence[bytes | None]:
        found: list[bytes | None] = [None] * len(self.lengths)
        found[self._rank] = prefixes(pack_fields(tag, self.call), len(self._shown))(number)
        return found

    def fits(self, nbytes: int) -> bool:
        return True

    def result(self, values: Sequence[Data], x: Any, given: Any) -> Any:
        memory = self._memory
        try:
            for rank, value in enumerate(values):
                if rank != self._rank:
                    # Copy it, because the result is needed longer than the post stays in its ring.
                    spans = (Span(OUT, rank, rank + 1),)
                    memory.incoming(spans, len(value))[:] = value
                    memory.arrived(spans)
        except ProtocolError:
            return self.begun(x, given)  # the operation finds the error, too, and names the rank
        try:
            phase = next(self._program)
        except StopIteration as stop:
            if isinstance(stop.value, NoResult):
                return Otherwise(None, returning(stop.value))
            return stop.value
        return self.begun(x, given)._replace(rest=before(phase, self._program))

    def begun(self, x: Any, given: Any) -> Otherwise:
        done = len(self._memory.blobs) - 1  # all its frames are sent
        return Otherwise(Executor(self._phase, None, done=done), self._program)


class TakingOver(Protocol):
    """The owner of calls, which makes operations of them."""

    def to_operation(self, call: PostedCall) -> Operation | None:
        """Make an operation of `call`."""
        ...


class PostedCall:
    """One call, from its post until it ends or becomes an operation."""

    __slots__ = (
        "express", "given", "key", "missing", "nbytes", "over", "prefixes", "seconds", "values",
        "what", "work", "x",
    )  # fmt: skip

    def __init__(
        self,
        express: TakingOver,
        what: Posted,
        key: Key,
        work: Work[Any],
        x: Any,
        given: Any,
        seconds: float,
        prefixes: Sequence[bytes | None],
        values: list[Any],
        nbytes: int,
    ) -> None:
        self.express = express
        self.what = what
        self.key = key
        self.work = work
        self.x = x  # what is known of the result
        self.given = given  # the memory or arguments: see `Express._run`
        self.seconds = seconds  # time limit at the call
        # What precedes the data in the post of each rank, if that is known.
        self.prefixes = prefixes
        self.values = values  # by rank; None: not here yet
        self.nbytes = nbytes  # bytes posted by this rank
        self.missing = len(values) - 1  # values that are not here yet
        self.over = False  # it no longer waits, for whatever reason

    @property
    def call(self) -> bytes:
        return self.what.call

    def to_operation(self) -> Operation | None:
        """Make an operation of this call."""
        return self.express.to_operation(self)

    def came(self, rank: int, data: Data) -> None:
        """Take the value of `rank`."""
        self.values[rank] = data
        self.missing -= 1

    def keep(self, rank: int) -> None:
        """Copy the value of `rank`, because its post is about to leave the ring."""
        self.values[rank] = bytes(self.values[rank])


class Shows:
    """A context in which programs are made whose first phase is certain to be posted."""

    def __init__(self, context: ExpressGroup) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.shows = True

    def __exit__(self, *_: object) -> None:
        self._context.shows = False


def is_shown(phase: object) -> bool:
    """Say whether `phase` is the first one of a `PostedProgram`."""
    return isinstance(phase, Phase) and phase.prepared.plan.name == direct_exchange.SHARE
