"""Collectives with a tag, of ranks that share memory: posted within the call, if they are small.

Collectives with different tags have no common order, so they cannot share a lane. Instead, each
rank posts its data (`aiodist.shared_memory.posts`) and takes the posts of the others by tag and
number, as from a mailbox. Such a collective has a plan whose first phase shows one value of each
rank to all: `direct_exchange.all_reduce` or `share`. `posted` says what becomes of the values.

**A post is a frame in memory.** In these plans each rank sends one frame to all others, and a post
replaces it. Each rank decides for each call whether it posts or sends. For example, it sends if its
program has hooks, or if its ring is full. The receiver hands either to the same waiting call. So
ranks need to agree on the plan alone, which follows from the arguments (`Place.may_post`,
`reductions.is_posted`). All rules for frames hold for posts:

* A rank that gives up says so over links. It also writes a word in memory, for ranks that call
  later.
* Tags are forgotten as ever, because a rank that has ended a call has read all posts for it.

**Order.** A rank may see a frame before it looks at a post that was sent earlier. So if earlier
frames are missing when a frame comes, the rank reads all posts first (`Arrivals.message`). The
missing post is there, because it was written before. It can be read, because no rank posts until
all ranks read posts.

**Waiting calls are cheap**, because there may be a thousand of them::

    called ──> posts ──> all others have posted? ── yes ──> the result: done within the call
                                │ no (it looks for a moment, unless others wait already)
                                └──> waits: a `PostedCall`, found by tag and number
                                        ├── the last post comes ──> the result: done
                                        └── anything else ──> an `Operation` (`take_over`)

"Anything else" is all that is not an expected post (see `aiodist.engine.waiting_calls`). It is also
a program with more phases, for example because its data is too large for a post. The operation
counts the call's post as sent frames, and the posts that came as received frames.

**One wake-up for all.** A rank with waiting calls sleeps until any rank posts. It is woken once,
and takes all posts that came meanwhile.
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
from aiodist.prepared.berthed import BerthRecipe
from aiodist.prepared.express import Express, ExpressGroup, before, failing, returning
from aiodist.prepared.joined import JoinedCalls
from aiodist.prepared.lane_reductions import LaneRecipe
from aiodist.prepared.plain_values import PostedPlain, plain_in_one_go
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
from aiodist.prepared.tapes import ReducedParts, tape_of_posts
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
"""The most calls that wait, because other ranks may have to keep what each of them has posted."""
MOST_BYTES = 10 << 20
"""The most bytes that waiting calls have posted."""
MOST_SHOWN = ROOM_IN_MEMORY + 64 * 1024
"""The most bytes that one call shows, with their description."""


class PostingGroup(ExpressGroup, Protocol):
    """A group whose small collectives are posted."""

    id: bytes
    ranks: tuple[int, ...]

    def kick(self, peer: int) -> None:
        """Wake `peer`, which waits for this rank in shared memory."""
        ...


class PostExpress(Express[PostingGroup, PostRecipe | PostedValues | BerthRecipe]):
    """Keeps the recipes of a group that posts, and the calls of this rank that wait for posts."""

    _on_lane = False

    def __init__(self, context: PostingGroup, lane: Lane) -> None:
        super().__init__(context)
        self._posts = Posts(lane.board)
        self.given_up = self._posts.give_up  # tells the others that this rank has given a call up
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
        self._bytes = 0  # bytes posted by waiting calls
        self._in_ring: PostedCall | None = None  # its data lies in this rank's ring
        self._broken = False  # a rank is lost, so nothing is posted any more
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
        if isinstance(recipe, PostRecipe):
            self._fuse(recipe, in_one_go, recipe.compiled)
        return recipe

    def _fuse(
        self,
        recipe: PostRecipe | PostedValues,
        way: Callable[..., InOneGo],
        kernel: int | None = None,
        parts: ReducedParts | None = None,
    ) -> None:
        """Let one function do calls of `recipe`, or the compiled part if it has a `kernel`."""
        run = way(recipe, self._posts, self.wake, self.follows, self._moved)
        recipe.in_one_go = run
        tape = tape_of_posts(
            recipe, self._posts, self, run, kernel, self._progress, self._moved,
            polls=self._polls, crowded=self._crowded, parts=parts,
        )  # fmt: skip
        recipe.tapes = (tape, tape)

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> PostRecipe | PostedValues | BerthRecipe | JoinedCalls | None:
        with Shows(self._context):
            found = lane_values.learn(PostedValues, self._context, op, make, args)
        if found is not None:
            self._fuse(found, taking_in_one_go)
            found.teach_shown()
            return found
        if op not in lane_reductions.OPS:
            return self._learn_joined(op, make, args)
        small = self._learn_small(op, make, args)
        if isinstance(small, PostRecipe):
            return small
        return berthed.learn(self._context, self.berths, op, make, args) or small

    def _learn_plain(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> PostedPlain | None:
        with Shows(self._context):
            found = lane_values.learn(PostedPlain, self._context, op, make, args)
        if found is not None:
            self._fuse(found, plain_in_one_go)
        return found

    def _learn_small(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> PostRecipe | PostedValues | BerthRecipe | JoinedCalls | None:
        try:
            call = make(self._context, *args)
            if op != "reduce_scatter":
                if op == "reduce" and args[-1] is None and type(args[0]) not in (list, tuple):
                    return self._learn_reduce(call, *args)
                rest = self._learn_joined(op, make, args)
                if isinstance(rest, PostRecipe):
                    self._fuse(rest, in_one_go, rest.compiled)
                return rest
            slots = posted_slots.learn(self._context, call, make, *args)
        except (TypeError, ValueError, OverflowError):
            return None  # the ordinary way raises it again
        if slots is not None:
            self._fuse(slots, slots_in_one_go, slots.compiled, slots.parts)
        return slots

    def _learn_reduce(self, call: Call, x: Any, dst: int, op: Any, out: None) -> PostRecipe | None:
        recipe = self._learn(x, op)
        if not isinstance(recipe, PostRecipe):
            return None
        recipe.op, recipe.call = call.op, call.text.encode()
        recipe.returns = self._context.rank == dst
        if not recipe.returns:
            recipe.finish = None  # no result, and no array was written
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
        """Post a call of `what`, a Posted or a BerthRecipe. None: nothing has happened."""
        if self._posts.is_given_up():
            self._context.endpoint.poll()  # a rank gave a call up, perhaps this one: read why
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
            return self._post(what.for_call(seq, given), x, given, seconds, tag, seq)
        work: Work[Any] = Work.begin(self._loop, what.op, tag, seq, what.nbytes)
        try:
            done = run(tag, seq, x, given)
        except Exception as error:
            self._broke(work, what, error, seconds)
            return work
        if done:
            self._finish(work, what.op, what.call, what.nbytes, what.made(x))
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
        what = what.for_call(work.seq, given)
        due = what.prefixes(work.tag, work.seq)
        shown: Data = self._posts.last(what.lengths[self._context.rank])
        if not (lies := len(shown) > CHEAP_COPY):
            shown = bytes(shown)
        self._called(work, what, x, given, seconds, due, shown, {}, lies=lies)

    def _broke(self, work: Work[Any], what: Any, error: Exception, seconds: float, /) -> None:
        """Fail a call, because one of its steps has raised `error`."""
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
        # Start the program only once, because it may keep its arguments.
        work = Work.begin(self._loop, call.op, tag, None, call.nbytes)
        self._calls.take_over(work, call.text.encode(), None, rest, seconds)
        self.rest()  # missing data may have been posted
        return work

    def _has_room(self, tag: object) -> bool:
        """Say whether the next call with `tag` is certain to be posted, whatever its size."""
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
        """Post a call in the general way. None: nothing has happened."""
        arrivals = self._calls.arrivals
        key = tag, seq
        early = arrivals.early.get(key)
        found = {} if early is None else early.values(what.call, what.fits)
        if found is None or key in arrivals.verdicts:
            return None  # it has to fail, or something else has come for it
        shown = what.shown(given)
        due = what.prefixes(tag, seq)
        prefix = due[self._context.rank]
        assert prefix is not None
        if self._in_ring is not None:
            self._in_ring.keep(self._context.rank)
            self._in_ring = None
        whole = len(prefix) + padded(len(shown))
        if self._bytes + len(shown) > MOST_BYTES:
            return None
        if self._posts.put_parts(prefix, (shown,), whole) < 0:
            return None
        if early is not None:
            arrivals.take(key)  # now, because frames that come while we wake others are kept apart
        work: Work[Any] = Work.begin(self._loop, what.op, tag, seq, what.nbytes)
        self.wake(self._posts.tell())
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
        """Continue a call that has posted, though posts of others may be missing.

        `lies`: its data still lies in this rank's ring.
        """
        # The call takes its number first, because code that runs below may call other collectives.
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
        if self._broken:  # a message arrived while we woke others
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
        """Wake ranks that sleep until this rank posts. Return whether no rank is lost."""
        for peer in peers:
            self._context.kick(peer)
        return not self._broken

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
        """Say whether a rank that is missing in `call` posts anything within a moment."""
        late = [each for each in self._posts.readers if call.values[each.rank] is None]
        return self._polls and self._comes(late)

    def _comes(self, readers: Sequence[Reader]) -> bool:
        return self._progress.watch(self._posts, readers, 0, crowded=self._crowded)

    def follows(self, reader: Reader) -> bool:
        """Say whether `reader` has something to read within a moment."""
        return self._polls and self._comes((reader,))

    def _look(self, call: PostedCall) -> None:
        """Take the posts of others, until `call` has all that it needs."""
        for reader in self._posts.readers:
            rank = reader.rank
            while call.values[rank] is None and reader.has_more() and not call.over:
                self._free(reader)
                prefix = call.prefixes[rank]
                data = None if prefix is None else reader.shown(prefix)
                if prefix is not None and data is not None:
                    self._came(call, reader, data, len(prefix) + padded(len(data)))
                else:
                    self._take(reader)

    def _came(self, call: PostedCall, reader: Reader, data: memoryview, whole: int) -> None:
        """Take the post of one rank that `call` waits for. It has `whole` bytes in the ring."""
        is_last = call.missing == 1
        if is_last or len(data) > CHEAP_COPY:
            reader.hold(whole, call)  # use it in the ring, because that spares a copy
            call.came(reader.rank, data)
        else:
            call.came(reader.rank, data.tobytes())
            reader.move(whole)
        if is_last:
            self._complete(call)

    def _free(self, reader: Reader) -> None:
        """Copy the post that is held in a ring, because there is more to read behind it."""
        if reader.holder is not None:
            reader.holder.keep(reader.rank)
            reader.let_go()

    def _wait(self, call: PostedCall) -> None:
        self._calls.waiting.wait(call)
        self.rest()

    def _leave(self, call: PostedCall) -> None:
        call.over = True
        del self._calls.waiting.by_key[call.key]
        self._bytes -= call.nbytes
        if self._in_ring is call:
            self._in_ring = None

    def _complete(self, call: PostedCall) -> None:
        """Finish `call`, because all posts for it are here."""
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
        """Give the next post of `reader` to the call or operation that it is for."""
        self._free(reader)
        try:
            post = reader.next_post()
            said = unpack_fields(post.words)
            if len(said) != 2:
                raise ProtocolError("malformed post: its words must be a tag and a call")
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
        """Take all posts; `for_calls`: only as long as a call or an operation waits for posts."""
        # Read ranks with a held post last, because others may post what its call waits for.
        for reader in sorted(self._posts.readers, key=lambda reader: reader.held):
            while reader.has_more() and (not for_calls or self._is_awaited()):
                self._take(reader)

    def _is_awaited(self) -> bool:
        """Say whether a call or an operation here may wait for posts."""
        return bool(self._calls.waiting.by_key or self._calls.ops)

    def rest(self) -> None:
        """Take posts as long as anything waits for them, then ask to be woken by the next one."""
        # Leave posts for later calls in the ring, because these calls mostly find what they expect.
        while not self._posts.asleep and self._is_awaited():
            self.read(for_calls=True)
            if self._is_awaited():
                self._posts.sleep()

    def kicked(self) -> None:
        """Go on, because a rank has posted, or has come as far on a berth as needed here."""
        self.berths.kicked()
        if self._posts.asleep:
            self._posts.awake()
            self.rest()

    # -- calls that become operations, and the end -------------------------------------------------

    def to_operation(self, call: PostedCall) -> Operation | None:
        """Make an operation of `call`."""
        self._leave(call)
        for reader in self._posts.readers:
            if reader.holder is call:
                self._free(reader)
        how = call.what.begun(call.x, call.given)
        return self._take_over(call.what, call.values, call.work, call.seconds, how)

    def hurry(self) -> None:
        """Take what a lost rank has left in shared memory."""
        self.berths.hurry()

    def end(self) -> None:
        """Post nothing more, because a rank is lost or the group ends. Take all that was posted."""
        self._broken = True
        self.berths.break_off()
        self.read()

    def close(self) -> None:
        super().close()
        self.berths.close()
        self._posts.close()
