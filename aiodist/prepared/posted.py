"""What is posted, and what is done once the posts of all ranks are there.

Three kinds of calls begin by showing one value to all others, and need nothing else of them:
*reductions* of small arrays, *values* of known shapes (see `posted_values`), and all other
*programs* that begin so (`base.share`, its `first`): what is called for the first time, or looks
otherwise each time. Of these, whatever comes after that first phase is for an operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.vector import Vector
from aiodist.collectives.templates import native
from aiodist.engine.early import Key
from aiodist.engine.executor import Executor
from aiodist.engine.operation import Failure, Operation, Program
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
"""Most tags of one recipe for which something is kept."""

Data = bytes | memoryview
Begin = Callable[[int], bytes]
"""Makes of the number of a call what comes before the data in a post."""


T = TypeVar("T")


class ByTag(dict[object, T]):
    """What is made once for each tag: of what comes before the data in posts, all but the number
    is the same. What `make` makes is kept for `KEPT_TAGS` of them."""

    def __init__(self, make: Callable[[object], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, tag: object) -> T:
        if len(self) == KEPT_TAGS:
            self.clear()
        made = self[tag] = self._make(tag)
        return made


class Otherwise(NamedTuple):
    """In place of a result: it goes on as an operation, with a first phase for which the posts are
    frames, or without one. Or it is on a `lane` by now, and so is that phase, if there is one."""

    executor: Executor | None
    rest: Program
    lane: Lane | None = None


InOneGo = Callable[[object, int, Any, Any], bool | None]
"""See `in_one_go`."""


class Posted(ABC):
    """One kind of calls, or one call. `op`, `call` and `nbytes` are those of `Recipe`; `lengths`
    says by rank how many bytes each posts, as far as known (-1). `in_one_go` is what does it in one
    go, if anything does."""

    __slots__ = ()
    in_one_go: InOneGo | None = None
    tapes: tuple[Any, Any] = (None, None)
    op: str
    call: bytes
    nbytes: int
    lengths: list[int]

    @abstractmethod
    def shown(self, given: Any) -> Data:
        """The data to post, of a call with that."""

    @abstractmethod
    def prefixes(self, tag: object, number: int) -> Sequence[bytes | None]:
        """By rank, what comes before the data in its post, as far as `lengths` are known."""

    @abstractmethod
    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes may be a post for it."""

    @abstractmethod
    def result(self, values: Sequence[Data], x: Any, given: Any) -> Any:
        """The result, of what all have posted, by rank; or `Otherwise`. `x`: see
        `Express._run`."""

    def made(self, x: Any) -> Any:
        """The result of a call that was done in one go. `x`: see `Express._run`."""
        return x

    @abstractmethod
    def begun(self, x: Any, given: Any) -> Otherwise:
        """What goes on with a call that has posted: to the plan, as if that had been sent to
        everyone."""

    def keep(self, given: Any) -> Any:
        """What is kept of `given` by a call that waits."""
        return given


class PostRecipe(Recipe, Posted):
    """A recipe of an all_reduce, or a reduce, that is posted. The memory of its phase is used by
    nobody: it is for one call at a time, and of these there are many."""

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
        self._plain = kernel.plain(vector.length)  # reduces two arrays; None: no one function does
        self._rank = phase.prepared.plan.rank
        self._size = phase.prepared.plan.size
        self.lengths = [self.nbytes] * self._size
        self.begins = ByTag(self._begin)
        self.heads = ByTag(lambda tag: self.begins[tag](0))  # for the compiled part
        self._quietly = quietly()
        self.in_one_go: InOneGo | None = None

    @property
    def compiled(self) -> int | None:
        """The number of the kernel of the compiled part; None: there is none."""
        return self._kernel.compiled

    def shown(self, given: Any) -> Data:
        if not given.dtype.isnative:
            given = native(given)
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

    def release(self) -> None:
        self.in_one_go = None

    def reduce(self, values: Sequence[Any], out: Flat) -> None:
        """``out`` = the reduction of `values`, by rank, of which it is one: as the plan does it."""
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
    """What carries out a reduction within a call, given its tag and number, its result and the
    array. It returns whether it is done. False: it is posted, and that is all; None: there is no
    room for it.

    It leaves in memory what is left by the ordinary way (see `post_express`), and is here for its
    speed alone: nothing is looked up that is the same in all calls, and the posts of the others are
    reduced where they lie. `wake` wakes ranks, and says whether it may go on within the call;
    `comes` says whether a rank posts anything within a moment.
    """
    dtype, nbytes, size = recipe.dtype, recipe.nbytes, len(recipe.lengths)
    length, itemsize, room = nbytes // dtype.itemsize, dtype.itemsize, padded(nbytes)
    put, tell, reduce, finish = posts.put, posts.tell, recipe.reduce, recipe.finish
    begins, returns = recipe.begins, recipe.returns
    shown = [(reader, np.frombuffer(reader.ring, dtype)) for reader in posts.readers]

    def run(tag: object, number: int, x: Any, flat: Flat) -> bool | None:
        prefix = begins[tag](number)
        if not put(prefix, flat.tobytes() if nbytes <= CHEAP_COPY else flat.view(np.uint8).data):
            return None
        woken = tell()
        if woken and not wake(woken):
            return False
        before = len(prefix)
        values = [flat] * size
        for reader, numbers in shown:
            if reader.words[HEAD] == reader.taken and not comes(reader):
                return False
            if reader.words[LAP] == reader.taken:
                reader.at = 0
            at = reader.at
            data = at + before
            if reader.ring[at:data].tobytes() != prefix:
                return False
            first = data // itemsize
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
    """One call whose first phase is posted, of no kind that is known."""

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
        self._program = program  # what comes after that phase
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
                    # A copy, as what is made of it is needed for longer than the post is there.
                    spans = (Span(OUT, rank, rank + 1),)
                    memory.incoming(spans, len(value))[:] = value
                    memory.arrived(spans)
        except ProtocolError:
            return self.begun(x, given)  # which finds it, too, and says whose it is
        try:
            phase = next(self._program)
        except StopIteration as stop:
            if isinstance(stop.value, Failure):
                return Otherwise(None, returning(stop.value))
            return stop.value
        return self.begun(x, given)._replace(rest=before(phase, self._program))

    def begun(self, x: Any, given: Any) -> Otherwise:
        done = len(self._memory.blobs) - 1  # all that it sends
        return Otherwise(Executor(self._phase, None, done=done), self._program)


class TakingOver(Protocol):
    """Whose calls they are."""

    def to_operation(self, call: PostedCall) -> Operation | None:
        """`call` is an operation from here on."""
        ...


class PostedCall:
    """One call, from its post to its end, or until it is an operation."""

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
        self.x = x  # what is known of its result
        self.given = given  # what it is done with: see `Express._run`
        self.seconds = seconds  # that it had when it was called
        # By rank, what comes before the data in its post, where that is known.
        self.prefixes = prefixes
        self.values = values  # by rank; None: it has not come
        self.nbytes = nbytes  # that this rank has posted
        self.missing = len(values) - 1  # values that have not come
        self.over = False  # it waits no more, whatever became of it

    @property
    def call(self) -> bytes:
        return self.what.call

    def to_operation(self) -> Operation | None:
        """Go on as an operation."""
        return self.express.to_operation(self)

    def came(self, rank: int, data: Data) -> None:
        """The value of `rank` is here."""
        self.values[rank] = data
        self.missing -= 1

    def keep(self, rank: int) -> None:
        """The value of `rank` does not stay where it lies."""
        self.values[rank] = bytes(self.values[rank])


class Shows:
    """Programs are made within this of which the first phase is posted for certain."""

    def __init__(self, context: ExpressGroup) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.shows = True

    def __exit__(self, *_: object) -> None:
        self._context.shows = False


def is_shown(phase: object) -> bool:
    """Whether it is the first phase of a `PostedProgram`."""
    return isinstance(phase, Phase) and phase.prepared.plan.name == direct_exchange.SHARE
