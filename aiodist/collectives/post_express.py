"""Small all-reduces with a tag, of ranks that share memory: posted within the call.

Collectives with different tags have no common order, so they cannot use a lane. Here each rank
posts what it has (`aiodist.shared_memory.posts`), and takes what the others have posted, by tag and
number as in a mailbox. What is done then is the plan `direct_exchange.all_reduce`: everyone shows
its value to all, and all reduce in the order of the ranks.

**A frame that lies in memory.** A post is the one frame that a rank sends to all others in that
plan, but for the way it goes. Each rank decides for itself, by call, whether it posts or sends: a
program with hooks, an ``out=``, a full ring. What comes is handed to whatever waits for it here,
whichever way it came. So nothing has to be agreed upon beyond the plan, which follows from what was
called (`reductions.is_posted`); and of posts all holds that holds for frames: who gives up tells
the others over links, a rank may have a result where another failed, tags are forgotten as ever
(whoever has ended a collective has read all posts for it).

**Waiting calls are cheap**, as there may be a thousand of them::

    called ──> posts ──> all others have posted? ── yes ──> reduces: done within the call
                                │ no (it looks for a moment, unless others wait already)
                                └──> waits: a `PostedCall`, found by tag and number
                                        ├── the last post comes ──> reduces: done
                                        └── anything else ──> an `Operation` (`take_over`)

"Anything else" is whatever is not a post as expected: see `aiodist.engine.waiting_calls`. The
operation begins with what it has posted as sent, and with what has come as received.

**One wake-up for all.** A rank with calls that wait sleeps on the first post of anybody, is woken
once, and takes all that was posted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.vector import Vector
from aiodist.collectives.express import Express, ExpressGroup, Flat, Recipe, failing, rest_of
from aiodist.engine import waiting_calls
from aiodist.engine.early import Key, key_of
from aiodist.engine.executor import Executor
from aiodist.engine.operation import Operation
from aiodist.engine.phase import Phase
from aiodist.errors import ProtocolError
from aiodist.phases.memories import SmallReductions
from aiodist.schedules import direct_exchange
from aiodist.schedules.plan import Copy
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import Posts, Reader, has_news, prefixes
from aiodist.transports.base import deliver
from aiodist.transports.polling import cores
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, unpack_fields
from aiodist.work import Work

MOST = 4096
"""Most calls that wait: what each has posted may have to be kept by the others."""
MOST_BYTES = 4 << 20
"""Most bytes that these have posted."""
FEW = 1024
KEPT_TAGS = 2048
"""Most tags of one recipe of whose posts the beginning is kept."""


class PostingGroup(ExpressGroup, Protocol):
    """A group whose small all-reduces are posted."""

    id: bytes
    ranks: tuple[int, ...]

    def kick(self, peer: int) -> None:
        """Wakes `peer`, which waits for this rank in shared memory."""
        ...


class PostRecipe(Recipe):
    """A recipe of an all_reduce that is posted. The memory of its phase is used by nobody: it is
    for one call at a time, and of these there are many."""

    __slots__ = ("_kernel", "_plain", "_prefixes", "_quietly", "_size", "dtype")

    def __init__(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object, kernel: Kernel
    ) -> None:
        super().__init__(op, call, phase, vector, keeps)
        self.dtype = vector.dtype
        self._kernel = kernel
        self._plain = kernel.plain(vector.length)  # reduces two arrays; None: no one function does
        self._size = phase.prepared.plan.size
        self._quietly = quietly()
        self._prefixes: dict[object, Callable[[int], bytes]] = {}  # of posts, by tag

    def prefix(self, tag: object, number: int) -> bytes:
        """What comes before the data in posts of this call, of all ranks."""
        prefix = self._prefixes.get(tag)
        if prefix is None:
            if len(self._prefixes) == KEPT_TAGS:
                self._prefixes.clear()
            prefix = self._prefixes[tag] = prefixes(pack_fields(tag, self.call), self.nbytes)
        return prefix(number)

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

    def begun(self, flat: Flat) -> Executor:
        """What goes on with a call that has posted `flat`: to the plan, as if that had been sent to
        everyone."""
        vector = Vector.of(flat)
        memory = SmallReductions([(self._kernel, vector, vector)], self._size)
        first, *_ = self.phase.prepared.plan.steps
        assert isinstance(first, Copy)
        memory.copy(first)
        return Executor(Phase(self.phase.prepared, memory), None, done=self._size)


class PostedCall:
    """One call, from its post to its end, or until it is an operation."""

    __slots__ = (
        "express", "flat", "key", "missing", "nbytes", "over", "prefix", "recipe", "seconds",
        "values", "work", "x",
    )  # fmt: skip

    def __init__(
        self,
        express: PostExpress,
        recipe: PostRecipe,
        key: Key,
        work: Work[Any],
        x: Any,
        flat: Flat,
        seconds: float,
        prefix: bytes,
        values: list[Any],
    ) -> None:
        self.express = express
        self.recipe = recipe
        self.key = key
        self.work = work
        self.x = x  # the array of the user
        self.flat = flat  # the memory of that
        self.seconds = seconds  # that it had when it was called
        self.prefix = prefix  # what comes before the data in the posts of all ranks
        self.nbytes = recipe.nbytes
        self.values = values  # by rank; None: it has not come
        self.missing = len(values) - 1  # values that have not come
        self.over = False  # it waits no more, whatever became of it

    @property
    def call(self) -> bytes:
        return self.recipe.call

    def to_operation(self) -> Operation | None:
        """It goes on as an operation."""
        return self.express.to_operation(self)

    def came(self, rank: int, data: bytes | memoryview) -> None:
        """The value of `rank` is here."""
        self.values[rank] = np.frombuffer(data, self.recipe.dtype)
        self.missing -= 1


class PostExpress(Express[PostingGroup, PostRecipe]):
    """The recipes of a group that posts, and the calls of this rank that wait for posts."""

    _on_lane = False

    def __init__(self, context: PostingGroup, lane: Lane) -> None:
        super().__init__(context)
        self._posts = Posts(lane.board)
        self._moved = lane.moved
        self._polls = lane.polls
        self._crowded = context.size > cores()
        self._bytes = 0  # that calls have posted which wait
        self._broken = False  # a rank is lost: nothing is posted any more

    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> PostRecipe | None:
        if phase.prepared.plan.name != direct_exchange.ALL_REDUCE:
            return None
        assert isinstance(phase.memory, SmallReductions)
        ((kernel, *_),) = phase.memory.groups
        assert isinstance(kernel, Kernel)
        return PostRecipe(op, call, phase, vector, keeps, kernel)

    # -- calls ------------------------------------------------------------------------------------

    def _run(
        self, recipe: PostRecipe, x: Any, flat: Flat, seconds: float, tag: object = None
    ) -> Work[Any] | None:
        calls = self._calls
        waiting = calls.waiting.by_key
        tags, arrivals, nbytes = calls.tags, calls.arrivals, recipe.nbytes
        if (
            self._broken
            or tag in tags.frozen
            or seconds < 2 * waiting_calls.LONG
            or len(waiting) >= MOST
            or self._bytes + nbytes > MOST_BYTES
            or self._records.trace is not None
        ):
            return None
        seq = tags.upcoming(tag)
        key = tag, seq
        early = arrivals.early.get(key)
        found = {} if early is None else early.values(recipe.call, nbytes)
        if found is None or key in arrivals.verdicts:
            return None  # it is to fail, or there is more to it
        prefix = recipe.prefix(tag, seq)
        # Of a few bytes a copy is made sooner than a view.
        shown: Any = flat.tobytes() if nbytes <= FEW else flat.view(np.uint8).data
        if not self._posts.put(prefix, shown):
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, tag, seq, nbytes)
        for rank in self._posts.tell():
            self._context.kick(rank)
        met = None if found or waiting else self._met(recipe, flat, prefix)
        if met is not None:
            return self._at_once(recipe, x, flat, seconds, prefix, met, work)
        # From here on it is called: nothing can be called before it, by whatever runs below.
        tags.take(tag)
        arrivals.take(key)
        values: list[Any] = [None] * self._context.size
        values[self._context.rank] = flat
        call = waiting[key] = PostedCall(self, recipe, key, work, x, flat, seconds, prefix, values)
        self._bytes += nbytes
        for rank, data in found.items():
            call.came(rank, data)
        if self._broken:  # by what was heard while others were woken
            self.to_operation(call)
            return work
        self._look(call)
        while call.missing and not call.over and len(waiting) == 1 and self._news(call):
            self._look(call)
        if not call.over:
            if call.missing:
                self._wait(call)
            else:
                self._complete(call)
        return work

    def _met(self, recipe: PostRecipe, flat: Flat, prefix: bytes) -> list[Any] | None:
        """The values of all ranks where they were posted, if all others post the same within a
        moment. None: nothing has happened, what they have posted is still to be taken."""
        values: list[Any] = [flat] * self._context.size
        nbytes = recipe.nbytes
        for reader in self._posts.readers:
            if not (reader.has_more() or (self._polls and self._comes((reader,)))):
                return None
            data = reader.shown(prefix, nbytes)
            if data is None:
                return None
            values[reader.rank] = np.frombuffer(data, recipe.dtype)
        return None if self._broken else values

    def _at_once(
        self,
        recipe: PostRecipe,
        x: Any,
        flat: Flat,
        seconds: float,
        prefix: bytes,
        values: list[Any],
        work: Work[Any],
    ) -> Work[Any]:
        """Reduce what is there."""
        calls, readers = self._calls, self._posts.readers
        try:
            recipe.reduce(values, flat)
        except Exception as error:
            calls.tags.take(work.tag)
            calls.take_over(work, recipe.call, None, failing(error), seconds, came={})
            return work
        finally:
            for reader in readers:
                reader.passed(prefix, recipe.nbytes)
        self._moved.add(recipe.nbytes, recipe.nbytes * len(readers))
        self._done(work, recipe, x)
        if calls.tags.many:
            calls.forget_tags()
        return work

    def _news(self, call: PostedCall) -> bool:
        """Whether one of those who are missing in `call` posts anything within a moment."""
        late = [each for each in self._posts.readers if call.values[each.rank] is None]
        return self._polls and self._comes(late)

    def _comes(self, readers: Sequence[Reader]) -> bool:
        return self._progress.until(has_news, readers, crowded=self._crowded)

    def _look(self, call: PostedCall) -> None:
        """Take what others have posted, until nothing is missing any more for `call`."""
        for reader in self._posts.readers:
            rank = reader.rank
            while call.values[rank] is None and reader.has_more() and not call.over:
                data = reader.shown(call.prefix, call.nbytes)
                if data is not None:
                    call.came(rank, data.tobytes())
                    reader.passed(call.prefix, call.nbytes)
                else:
                    self._take(reader)

    def _wait(self, call: PostedCall) -> None:
        self._calls.waiting.wait(call)
        self.rest()
        call.work.pending_for_user()

    def _leave(self, call: PostedCall) -> None:
        call.over = True
        del self._calls.waiting.by_key[call.key]
        self._bytes -= call.nbytes

    def _complete(self, call: PostedCall) -> None:
        """Nothing is missing any more for `call`."""
        self._leave(call)
        recipe, work = call.recipe, call.work
        try:
            recipe.reduce(call.values, call.flat)
            result = call.x if recipe.finish is None else recipe.finish(call.x)
        except Exception as error:
            self._calls.take_over(work, recipe.call, None, failing(error), call.seconds, came={})
            return
        self._moved.add(call.nbytes, call.nbytes * (len(call.values) - 1))
        self._calls.ended(work.tag)
        if work.record is not None:
            work.finish(result)
            return
        records, ended = self._records, self._loop.time()
        records.add((
            records.where, work.op, work.tag, work.seq, recipe.call, None, call.nbytes,
            work._started, ended,
        ))  # fmt: skip
        if self._progress.is_due():
            self._loop.call_soon(work.finish_within_call, result, ended)
        else:
            work.finish_within_call(result, ended)

    # -- posts ------------------------------------------------------------------------------------

    def _take(self, reader: Reader) -> None:
        """Hand the next post of `reader` to whatever it is for."""
        try:
            post = reader.take()
            if post is None:
                return
            said = unpack_fields(post.words)
            if len(said) != 2:
                raise ProtocolError("a post says its tag and its call")
            tag, text = said
            fields = [kinds.MESSAGE, self._context.id, tag, post.number, 0, text]
            key, rank, data = key_of(fields), reader.rank, memoryview(post.data)
            call = self._calls.waiting.by_key.get(key)
            if type(call) is PostedCall:
                alike = text == call.recipe.call and len(data) == call.nbytes
                if alike and call.values[rank] is None:
                    call.came(rank, data)
                    if not call.missing:
                        self._complete(call)
                    return
            landing = self._calls.arrivals.message(rank, fields, len(data))
            deliver(landing, (data,), len(data))
        except (ProtocolError, ValueError) as error:
            reader.give_up()
            wrong = error if isinstance(error, ProtocolError) else ProtocolError(str(error))
            self._context.endpoint.blame(self._context.ranks[reader.rank], wrong)

    def read(self) -> None:
        """Take all that was posted."""
        for reader in list(self._posts.readers):
            while reader.has_more():
                self._take(reader)

    def rest(self) -> None:
        """Take all that was posted, and as long as anything waits here, be woken by what comes."""
        posts = self._posts
        if posts.asleep:
            return
        self.read()
        while (self._calls.waiting.by_key or self._calls.ops) and not posts.sleep():
            self.read()

    def kicked(self) -> None:
        """Somebody has posted."""
        if self._posts.asleep:
            self._posts.awake()
            self.rest()

    # -- what is not to be done in here -----------------------------------------------------------

    def to_operation(self, call: PostedCall) -> Operation | None:
        """`call` goes on as an operation."""
        self._leave(call)
        recipe = call.recipe
        rank = self._context.rank
        came = {
            src: value.data.cast("B")
            for src, value in enumerate(call.values)
            if value is not None and src != rank
        }
        return self._calls.take_over(
            call.work,
            recipe.call,
            recipe.begun(call.flat),
            rest_of(recipe, call.x),
            call.seconds,
            came=came,
        )

    def end(self) -> None:
        """Post nothing more, as a rank is lost or the group ends. What was posted is taken."""
        self._broken = True
        self.read()

    def close(self) -> None:
        """The group has ended: let go of all memory."""
        self._posts.close()
