"""Collectives with a tag, of ranks that share memory: posted within the call, unless too large.

Collectives with different tags have no common order, so they cannot use a lane. Here each rank
posts what it has (`aiodist.shared_memory.posts`), and takes what the others have posted, by tag and
number as in a mailbox. What is done then is a plan that begins with everyone showing one value to
all, `direct_exchange.all_reduce` or `share`; what is made of the values is in `posted`.

**A frame that lies in memory.** A post is the one frame that a rank sends to all others in that
plan, but for the way it goes. Each rank decides for itself, by call, whether it posts or sends: a
program with hooks, a full ring. What comes is handed to whatever waits for it here, whichever way
it came. So nothing has to be agreed upon beyond the plan, which follows from what was called
(`base.may_post`, `reductions.is_posted`); and of posts all holds that holds for frames: who gives
up says so over links, and by a word in memory that it has, to whoever calls later; tags are
forgotten as ever (who has ended one has read all posts for it).

**Order.** What a rank sends after a post may be looked at before it. So who gets a frame of which
those before it are missing reads all posts first (`Arrivals.message`). The post is there, as it was
written before; and can be read, as nobody posts before all others read.

**Waiting calls are cheap**, as there may be a thousand of them::

    called ──> posts ──> all others have posted? ── yes ──> the result: done within the call
                                │ no (it looks for a moment, unless others wait already)
                                └──> waits: a `PostedCall`, found by tag and number
                                        ├── the last post comes ──> the result: done
                                        └── anything else ──> an `Operation` (`take_over`)

"Anything else" is whatever is not a post as expected (see `aiodist.engine.waiting_calls`), and a
program that has more phases, as where data is too much to be posted. The operation begins with what
it has posted as sent, and with what has come as received.

**One wake-up for all.** A rank with calls that wait sleeps on the first post of anybody, is woken
once, and takes all that was posted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.collectives.exchange import ROOM_IN_MEMORY
from aiodist.engine.early import key_of
from aiodist.engine.operation import Operation
from aiodist.engine.phase import Phase
from aiodist.errors import ProtocolError
from aiodist.phases import pulls
from aiodist.phases.base import Call
from aiodist.phases.memories import SmallReductions
from aiodist.prepared import berthed, lane_reductions, lane_values, posted_slots
from aiodist.prepared.berthed import BerthedCall, BerthRecipe
from aiodist.prepared.express import Express, ExpressGroup, before, failing, returning
from aiodist.prepared.lane_reductions import LaneRecipe
from aiodist.prepared.posted import (
    Data,
    InOneGo,
    Otherwise,
    Posted,
    PostedCall,
    PostedProgram,
    PostRecipe,
    Shows,
    in_one_go,
    is_shown,
)
from aiodist.prepared.posted_slots import slots_in_one_go
from aiodist.prepared.posted_values import PostedValues, taking_in_one_go
from aiodist.prepared.tapes import tape_of_posts
from aiodist.schedules import direct_exchange
from aiodist.shared_memory.berths import Berths
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import CHEAP_COPY, Posts, Reader, padded
from aiodist.transports.base import deliver
from aiodist.transports.polling import cores
from aiodist.types import ReduceOp
from aiodist.wire import kinds
from aiodist.wire.frames import unpack_fields
from aiodist.work import Work

MOST = 4096
"""Most calls that wait: what each has posted may have to be kept by the others."""
MOST_BYTES = 10 << 20
"""Most bytes that these have posted."""
MOST_SHOWN = ROOM_IN_MEMORY + 64 * 1024
"""Most bytes that one call shows, with all that is said of them."""


class PostingGroup(ExpressGroup, Protocol):
    """A group whose small collectives are posted."""

    id: bytes
    ranks: tuple[int, ...]

    def kick(self, peer: int) -> None:
        """Wakes `peer`, which waits for this rank in shared memory."""
        ...


class PostExpress(Express[PostingGroup, PostRecipe | PostedValues | BerthRecipe]):
    """The recipes of a group that posts, and the calls of this rank that wait for posts."""

    _on_lane = False

    def __init__(self, context: PostingGroup, lane: Lane) -> None:
        super().__init__(context)
        self._posts = Posts(lane.board)
        self.given_up = self._posts.give_up  # says that the others were told of it
        self.berths = Berths(
            lane.board,
            context.loop,
            self._progress,
            context.kick,
            lane.moved,
            crowded=lane.crowded,
            polls=lane.polls,
        )
        self._moved = lane.moved
        self._polls = lane.polls
        self._crowded = context.size > cores()
        self._bytes = 0  # that calls have posted which wait
        self._in_ring: PostedCall | None = None  # what it shows lies in the ring of this rank
        self._broken = False  # a rank is lost: nothing is posted any more
        calls = self._calls
        self._use_compiled(
            (calls.waiting.by_key, calls.tags.frozen),
            ((self, "_broken"),),
            said=[0, 0],
            first=0,
            unfinished=self._unfinished,
            broke=self._broke,
        )

    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> PostRecipe | None:
        if phase.prepared.plan.name != direct_exchange.ALL_REDUCE:
            return None
        assert isinstance(phase.memory, SmallReductions)
        ((kernel, *_),) = phase.memory.groups
        assert isinstance(kernel, Kernel)
        return PostRecipe(op, call, phase, vector, keeps, kernel)

    def _prepare_large(self, call: bytes, group: DtypeGroup, op: ReduceOp) -> BerthRecipe | None:
        phase = pulls.all_reduce(self._context, group)
        how = LaneRecipe("all_reduce", call, phase, group.x, op)
        return BerthRecipe(self._context, self.berths, how, group)

    def _learn(self, x: Any, op: Any) -> PostRecipe | PostedValues | BerthRecipe | None:
        recipe = super()._learn(x, op)
        if isinstance(recipe, PostRecipe) and getattr(x.dtype, "isnative", True):
            self._fuse(recipe, in_one_go, recipe.compiled)
        return recipe

    def _fuse(
        self,
        recipe: PostRecipe | PostedValues,
        way: Callable[..., InOneGo],
        kernel: int | None = None,
    ) -> None:
        """Have `recipe` done in one go, by the compiled part if there is a `kernel` for it."""
        run = way(recipe, self._posts, self.wake, self.follows, self._moved)
        recipe.in_one_go = run
        tape = tape_of_posts(
            recipe, self._posts, self, run, kernel, self._progress, self._moved,
            polls=self._polls, crowded=self._crowded,
        )  # fmt: skip
        recipe.tapes = (tape, tape)

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> PostRecipe | PostedValues | BerthRecipe | None:
        with Shows(self._context):
            found = lane_values.learn(PostedValues, self._context, op, make, args)
        if found is not None:
            self._fuse(found, taking_in_one_go)
            return found
        if op not in lane_reductions.OPS:
            return None
        small = self._learn_small(op, make, args)
        return small or berthed.learn(self._context, self.berths, op, make, args)

    def _learn_small(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> PostRecipe | None:
        if op == "all_reduce" or args[-1] is not None:
            return None
        try:
            call = make(self._context, *args)
            if op == "reduce":
                return self._learn_reduce(call, *args)
            slots = posted_slots.learn(self._context, call, make, *args)
        except (TypeError, ValueError):
            return None  # and the ordinary way raises it
        if slots is not None:
            self._fuse(slots, slots_in_one_go)
        return slots

    def _learn_reduce(self, call: Call, x: Any, dst: int, op: Any, out: None) -> PostRecipe | None:
        recipe = self._learn(x, op)
        if not isinstance(recipe, PostRecipe):
            return None
        recipe.op, recipe.call = call.op, call.text.encode()
        recipe.returns = self._context.rank == dst
        if not recipe.returns:
            recipe.finish = None  # there is no result, and nothing was written
        if recipe.in_one_go is not None:
            self._fuse(recipe, in_one_go, recipe.compiled)
        return recipe

    # -- calls ------------------------------------------------------------------------------------

    def _may_post(self, tag: object) -> bool:
        calls = self._calls
        return not (
            self._broken
            or ((calls.tags.frozen or calls.deferred) and calls.is_frozen(tag))
            or len(calls.waiting.by_key) >= MOST
            or self._records.trace is not None
        )

    def _run(
        self, what: Any, x: Any, given: Any, seconds: float, tag: object = None, /
    ) -> Work[Any] | None:
        """Post a call of `what`, which is a Posted or a BerthRecipe: asked where there is time for
        it. None: nothing has happened."""
        if self._posts.is_given_up():
            self._context.endpoint.poll()  # that may be this one, and the word of it is there
        if not self._may_post(tag):
            return None
        calls = self._calls
        tags, arrivals, run = calls.tags, calls.arrivals, what.in_one_go
        seq = tags.upcoming(tag)
        if (
            run is None
            or calls.waiting.by_key
            or ((arrivals.early or arrivals.verdicts) and not arrivals.is_quiet((tag, seq)))
        ):
            if type(what) is BerthRecipe:
                what = BerthedCall(what, seq, given)
            return self._post(what, x, given, seconds, tag, seq)
        work: Work[Any] = Work.begin(self._loop, what.op, tag, seq, what.nbytes)
        try:
            done = run(tag, seq, x, given)
        except Exception as error:
            self._broke(work, what, error, seconds)
            return work
        if done:
            self._finish(work, what.op, what.call, what.nbytes, what.made(x))
            if tags.many:
                calls.forget_tags()
            return work
        if done is None:
            return None
        self._unfinished(work, what, x, given, 0, 0, seconds)
        return work

    def _unfinished(
        self,
        work: Work[Any],
        what: Any,
        x: Any,
        given: Any,
        area: int,
        done: int,
        seconds: float,
        /,
    ) -> None:
        assert work.seq is not None
        due, rank = what.prefixes(work.tag, work.seq), self._context.rank
        prefix = due[rank]
        assert prefix is not None
        shown: Data = self._posts.last(len(prefix), what.lengths[rank])
        if not (lies := len(shown) > CHEAP_COPY):
            shown = bytes(shown)
        self._called(work, what, x, given, seconds, due, shown, {}, lies=lies)

    def _broke(self, work: Work[Any], what: Any, error: Exception, seconds: float, /) -> None:
        """Fail a call, because a step of it has raised `error`."""
        self._calls.tags.take(work.tag)
        self._take_over(what, (), work, seconds, Otherwise(None, failing(error)))

    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        if not (call.shares_first and self._may_post(tag) and self._may_begin(call, args)):
            return None
        program = call.start(False)
        try:
            with Shows(self._context) if self._has_room(tag) else nullcontext():
                phase = next(program)
        except Exception as error:
            rest = returning(error.value) if isinstance(error, StopIteration) else failing(error)
        else:
            if is_shown(phase):
                assert isinstance(phase, Phase)
                what = PostedProgram(self._context, call, phase, program)
                work = self._run(what, None, None, seconds, tag)
                if work is not None:
                    return work
            rest = before(phase, program)
        # A program may hold on to what it was called with, so it is started once.
        work = Work.begin(self._loop, call.op, tag, None, call.nbytes)
        self._calls.take_over(work, call.text.encode(), None, rest, seconds)
        self.rest()  # what is missing may be posted
        return work

    def _has_room(self, tag: object) -> bool:
        """Whether the next call with `tag` is posted for certain, however large it may be."""
        calls = self._calls
        key = tag, calls.tags.upcoming(tag)
        return (
            self._bytes + MOST_SHOWN <= MOST_BYTES
            and key not in calls.arrivals.early
            and key not in calls.arrivals.verdicts
            and self._posts.has_room(MOST_SHOWN)
        )

    def _post(
        self, what: Posted, x: Any, given: Any, seconds: float, tag: object, seq: int
    ) -> Work[Any] | None:
        """Post a call, the ordinary way. None: nothing has happened."""
        arrivals = self._calls.arrivals
        key = tag, seq
        early = arrivals.early.get(key)
        found = {} if early is None else early.values(what.call, what.fits)
        if found is None or key in arrivals.verdicts:
            return None  # it is to fail, or there is more to it
        shown = what.shown(given)
        due = what.prefixes(tag, seq)
        prefix = due[self._context.rank]
        assert prefix is not None
        if self._in_ring is not None:
            self._in_ring.keep(self._context.rank)
            self._in_ring = None
        if self._bytes + len(shown) > MOST_BYTES or not self._posts.put(prefix, shown):
            return None
        if early is not None:
            arrivals.take(key)  # now: what is heard while others are woken is kept beside it
        work: Work[Any] = Work.begin(self._loop, what.op, tag, seq, what.nbytes)
        self.wake(self._posts.tell())
        if not (found or self._calls.waiting.by_key):
            met = self._met(what, due, shown)
            if met is not None:
                return self._at_once(what, x, given, seconds, due, met, work)
        return self._called(work, what, x, given, seconds, due, shown, found)

    def _called(
        self,
        work: Work[Any],
        what: Posted,
        x: Any,
        given: Any,
        seconds: float,
        due: Sequence[bytes | None],
        shown: Data,
        found: Mapping[int, Data],
        *,
        lies: bool = False,
    ) -> Work[Any]:
        """It is posted, and what others have posted for it may be missing. `lies`: what is shown
        lies in the ring of this rank."""
        # From here on it is called: nothing can be called before it, by whatever runs below.
        calls, rank = self._calls, self._context.rank
        waiting = calls.waiting.by_key
        tag, seq = work.tag, work.seq
        assert seq is not None
        key = tag, seq
        calls.tags.take(tag)
        values: list[Any] = [None] * self._context.size
        values[rank] = shown
        call = waiting[key] = PostedCall(
            self, what, key, work, x, what.keep(given), seconds, due, values, len(shown)
        )
        self._bytes += len(shown)
        if lies:
            self._in_ring = call
        for src, data in found.items():
            call.came(src, data)
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

    def wake(self, peers: Sequence[int]) -> bool:
        """Wake those who sleep until this rank posts. Returns whether nobody is lost."""
        for peer in peers:
            self._context.kick(peer)
        return not self._broken

    def _met(self, what: Posted, due: Sequence[bytes | None], shown: Data) -> list[Data] | None:
        """The values of all ranks where they were posted, if all others post what is expected
        within a moment. None: nothing has happened, what they have posted is still to be taken."""
        values = [shown] * len(due)
        lengths = what.lengths
        for reader in self._posts.readers:
            rank = reader.rank
            prefix = due[rank]
            if prefix is None or not (reader.has_more() or self.follows(reader)):
                return None
            data = reader.shown(prefix, lengths[rank])
            if data is None:
                return None
            values[rank] = data
        return None if self._broken else values

    def _at_once(
        self,
        what: Posted,
        x: Any,
        given: Any,
        seconds: float,
        due: Sequence[bytes | None],
        values: list[Any],
        work: Work[Any],
    ) -> Work[Any]:
        """Do it with what is there."""
        calls, readers = self._calls, self._posts.readers
        try:
            result = what.result(values, x, given)
        except Exception as error:
            result = Otherwise(None, failing(error))
        if type(result) is Otherwise:
            values = [bytes(value) for value in values]
        came = 0
        for reader in readers:
            prefix, nbytes = due[reader.rank], len(values[reader.rank])
            assert prefix is not None
            reader.passed(prefix, nbytes)
            came += nbytes
        if type(result) is Otherwise:
            calls.tags.take(work.tag)
            self._take_over(what, values, work, seconds, result)
            return work
        self._moved.add(len(values[self._context.rank]), came)
        self._finish(work, what.op, what.call, what.nbytes, result)
        if calls.tags.many:
            calls.forget_tags()
        return work

    def _take_over(
        self,
        what: Posted,
        values: Sequence[Any],
        work: Work[Any],
        seconds: float,
        how: Otherwise,
    ) -> Operation | None:
        executor, rest, lane = how
        is_first = executor is not None and lane is None
        came = {
            rank: memoryview(value)
            for rank, value in enumerate(values)
            if value is not None and rank != self._context.rank and is_first
        }
        return self._calls.take_over(work, what.call, executor, rest, seconds, came=came, lane=lane)

    def _news(self, call: PostedCall) -> bool:
        """Whether one of those who are missing in `call` posts anything within a moment."""
        late = [each for each in self._posts.readers if call.values[each.rank] is None]
        return self._polls and self._comes(late)

    def _comes(self, readers: Sequence[Reader]) -> bool:
        return self._progress.watch(self._posts, readers, 0, crowded=self._crowded)

    def follows(self, reader: Reader) -> bool:
        """Whether `reader` has something to read within a moment."""
        return self._polls and self._comes((reader,))

    def _look(self, call: PostedCall) -> None:
        """Take what others have posted, until nothing is missing any more for `call`."""
        lengths = call.what.lengths
        for reader in self._posts.readers:
            rank = reader.rank
            while call.values[rank] is None and reader.has_more() and not call.over:
                self._free(reader)
                prefix = call.prefixes[rank]
                data = None if prefix is None else reader.shown(prefix, lengths[rank])
                if prefix is not None and data is not None:
                    self._came(call, reader, data, len(prefix) + padded(len(data)))
                else:
                    self._take(reader)

    def _came(self, call: PostedCall, reader: Reader, data: memoryview, whole: int) -> None:
        """What `call` waits for of one rank lies in its ring, as a post of `whole` bytes."""
        is_last = call.missing == 1
        if is_last or len(data) > CHEAP_COPY:
            reader.hold(whole, call)  # it is used where it lies, and not copied once more
            call.came(reader.rank, data)
        else:
            call.came(reader.rank, data.tobytes())
            reader.move(whole)
        if is_last:
            self._complete(call)

    def _free(self, reader: Reader) -> None:
        """Have the post that is held of one rank, if one is, kept elsewhere: there is more."""
        if reader.holder is not None:
            reader.holder.keep(reader.rank)
            reader.let_go()

    def _wait(self, call: PostedCall) -> None:
        self._calls.waiting.wait(call)
        self.rest()
        call.work.for_user(self._records.unseen)

    def _leave(self, call: PostedCall) -> None:
        call.over = True
        del self._calls.waiting.by_key[call.key]
        self._bytes -= call.nbytes
        if self._in_ring is call:
            self._in_ring = None

    def _complete(self, call: PostedCall) -> None:
        """Nothing is missing any more for `call`."""
        self._leave(call)
        what, work, values = call.what, call.work, call.values
        try:
            result = what.result(values, call.x, call.given)
        except Exception as error:
            result = Otherwise(None, failing(error))
        if type(result) is Otherwise:
            values = [bytes(value) for value in values]
        for reader in self._posts.readers:
            if reader.holder is call:
                reader.let_go()
        if type(result) is Otherwise:
            self._take_over(what, values, work, call.seconds, result)
            return
        self._moved.add(call.nbytes, sum(map(len, values)) - call.nbytes)
        if work._on_cancel is not None:
            self._finish_waiting(work, what.op, what.call, what.nbytes, result)
            return
        self._calls.ended(work.tag)
        ended = self._note(work, what.op, what.call, what.nbytes)
        self._progress.finish(work, result, ended)

    # -- posts ------------------------------------------------------------------------------------

    def _take(self, reader: Reader) -> None:
        """Hand the next post of `reader` to whatever it is for."""
        self._free(reader)
        try:
            post = reader.next_post()
            said = unpack_fields(post.words)
            if len(said) != 2:
                raise ProtocolError("a post says its tag and its call")
            tag, text = said
            fields = [kinds.MESSAGE, self._context.id, tag, post.number, 0, text]
            key, rank = key_of(fields), reader.rank
            call = self._calls.waiting.by_key.get(key)
            if type(call) is PostedCall:
                alike = text == call.what.call and call.what.fits(len(post.data))
                if alike and call.values[rank] is None:
                    self._came(call, reader, post.data, post.whole)
                    return
            data = memoryview(post.data.tobytes())
            reader.move(post.whole)
            landing = self._calls.arrivals.message(rank, fields, len(data))
            deliver(landing, (data,), len(data))
        except (ProtocolError, ValueError) as error:
            reader.give_up()
            wrong = error if isinstance(error, ProtocolError) else ProtocolError(str(error))
            self._context.endpoint.blame(self._context.ranks[reader.rank], wrong)

    def read(self, *, for_calls: bool = False) -> None:
        """Take all that was posted; `for_calls`: as long as any call waits for that."""
        # Of whom something is held comes last: others may have posted what that waits for.
        for reader in sorted(self._posts.readers, key=lambda reader: reader.held):
            while reader.has_more() and (not for_calls or self._is_awaited()):
                self._take(reader)

    def _is_awaited(self) -> bool:
        """Whether anything here may wait for a post."""
        return bool(self._calls.waiting.by_key or self._calls.ops)

    def rest(self) -> None:
        """As long as anything waits here, take what was posted, and be woken by what comes."""
        # What is for later calls is left to these, which mostly find it as they expect it.
        while not self._posts.asleep and self._is_awaited():
            self.read(for_calls=True)
            if self._is_awaited():
                self._posts.sleep()

    def kicked(self) -> None:
        """Somebody has posted, or has come as far as this rank waits for on a berth."""
        self.berths.kicked()
        if self._posts.asleep:
            self._posts.awake()
            self.rest()

    # -- what is not to be done in here -----------------------------------------------------------

    def to_operation(self, call: PostedCall) -> Operation | None:
        """`call` goes on as an operation."""
        self._leave(call)
        for reader in self._posts.readers:
            if reader.holder is call:
                self._free(reader)
        how = call.what.begun(call.x, call.given)
        return self._take_over(call.what, call.values, call.work, call.seconds, how)

    def hurry(self) -> None:
        """A rank is gone: what it has left in shared memory is taken."""
        self.berths.hurry()

    def end(self) -> None:
        """Post nothing more, as a rank is lost or the group ends. What was posted is taken."""
        self._broken = True
        self.berths.break_off()
        self.read()

    def close(self) -> None:
        super().close()
        self.berths.close()
        self._posts.close()
