"""Small all-reduces with tags, on several ranks in one thread: called in another order by each.

Calls, callbacks, frames, wake-ups and cancellations come in any interleaving. Some calls are posted
and some sent, each rank for itself, over rings that are often full.
"""

from __future__ import annotations

import math
import random
import zlib

import numpy as np
import pytest
from seeds import seeds

from aiodist.collectives import exchange, reductions, values
from aiodist.engine import tags
from aiodist.engine.early import Early
from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)
from aiodist.prepared import lane_reductions, post_express, posted_values
from aiodist.shared_memory import berths, posts
from aiodist.shared_memory.board import _TEXT, _THREAD, PAGE
from aiodist.types import SUM, ReduceOp
from aiodist.wire.frames import MAX_PAYLOAD


class Tagged:
    """One all_reduce with a tag, and what became of it on each rank. `other`: the rank that calls
    something else."""

    def __init__(self, number, tag, length, canceller=None, other=None):
        self.number = number
        self.tag = tag
        self.length = length
        self.canceller = canceller
        self.other = other
        self.works = {}
        self.arrays = {}

    def start(self, context, *, posts):
        rank = context.rank
        length = self.length + (rank == self.other)
        x = self.arrays[rank] = np.full(length, self.value(rank))
        work = None
        if posts and context.post_express is not None:
            work = context.post_express.all_reduce(x, SUM, math.inf, self.tag)
        if work is None:
            call = reductions.all_reduce(context, x, SUM, None)
            work = context.calls.launch(call.op, call.text, call.start, tag=self.tag)
        self.works[rank] = work

    def cancel(self, rank):
        if self.works[rank].cancel():
            self.arrays[rank][...] = -1e9

    def value(self, rank):
        return 10.0 * self.number + rank + 1

    def is_right(self, rank, size):
        return (self.works[rank].result() == sum(map(self.value, range(size)))).all()


class OfKind:
    """One collective of any kind with a tag, as `Tagged`. `posts`: see `lanes.Call`."""

    other = None

    def __init__(self, lanes, number, kind, tag, length, canceller=None):
        self.number = number
        self.tag = tag
        self.canceller = canceller
        self.call = lanes.Call(number, kind, length, tag=tag)
        self.works = self.call.works

    def start(self, context, *, posts):
        self.call.start(context)

    def cancel(self, rank):
        self.call.cancel(rank)

    def is_right(self, rank, size):
        return self.call.is_right(rank, size)


class Program:
    """Each rank makes all calls, those of one tag in their order, and else in any."""

    def __init__(self, world, calls, chance):
        self.world = world
        self.calls = calls
        self.chance = chance
        self.left = {rank: self.shuffled() for rank in world.ranks}
        self.cancels = [call for call in calls if call.canceller is not None]

    def shuffled(self):
        order = [call.tag for call in self.calls]
        self.chance.shuffle(order)
        lines = {tag: [call for call in self.calls if call.tag == tag] for tag in order}
        return [lines[tag].pop(0) for tag in order]

    def events(self):
        alive = [rank for rank in self.world.ranks if rank not in self.world.dead]
        calls = [("call", rank) for rank in alive if self.left[rank]]
        cancels = [("cancel", call) for call in self.cancels if call.canceller in call.works]
        return calls + cancels + self.world.events()

    def step(self):
        events = self.events()
        if not events:
            return False
        match self.chance.choice(events):
            case ("call", rank):
                call = self.left[rank].pop(0)
                call.start(self.world.contexts[rank], posts=self.chance.random() < 0.8)
            case ("cancel", call):
                self.cancels.remove(call)
                call.cancel(call.canceller)
            case event:
                self.world.do(event)
        return True

    def run(self):
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("it goes on for ever")


@pytest.fixture(params=[1024, 1 << 19])
def posting(request, lanes, monkeypatch):
    """``posting(size, polls)``: ranks that post."""
    monkeypatch.setattr(posts, "SIZE", request.param)
    monkeypatch.setattr(posts, "NEAR", request.param // 4)
    monkeypatch.setattr(exchange, "ROOM_IN_MEMORY", 170_000)
    monkeypatch.setattr(post_express, "MOST_SHOWN", 180_000)
    # In large rings all is held where it lies.
    monkeypatch.setattr(post_express, "CHEAP_COPY", 1024 if request.param == 1024 else 0)

    def make(size, seed, **how):
        world = lanes.World(size, lanes.Chance(seed), **how)
        for context in world.contexts:
            context.may_post = True
        return world

    return make


def some_calls(chance, size, count, **rarely):
    """`rarely`: what happens in some of them to a rank."""
    return [
        Tagged(
            number,
            chance.choice("abcdefgh"),
            chance.choice([1, 1, 3, 40]),
            **{what: chance.randrange(size) for what, odds in rarely.items()
               if chance.random() < odds},
        )
        for number in range(count)
    ]  # fmt: skip


REDUCTIONS = ["express", "all_reduce", "reduce", "reduce_scatter", "slots", "out", "exscan", "list"]


@pytest.fixture(params=["all_reduce", "all_reduce on berths", "any kind", "on berths"])
def calls_of(request, lanes, monkeypatch):
    """``calls_of(chance, size, count, **rarely)``, see `some_calls`. On berths, of which there are
    few: that is where large reductions are, and here they are not large."""
    large = request.param.endswith("on berths")
    if large:
        monkeypatch.setattr(reductions, "EAGER_LIMIT", 20)
        monkeypatch.setattr(reductions, "POSTED_OF_TWO", 20)
        monkeypatch.setattr(lane_reductions, "SMALL_LISTS", 20)
        for limit, most in (("EAGER_LIMIT", 20), ("ROOM_IN_MEMORY", 2000), ("EAGER", 2000)):
            monkeypatch.setattr(exchange, limit, most)
    if request.param.startswith("all_reduce"):
        return some_calls

    def make(chance, size, count, **rarely):
        kinds = chance.sample([*lanes.PREPARED, "number", "tree", "exscan", "list", "max"], 4)
        lengths = [1, 3, chance.choice([3, 0, 2000, 20_000])]
        if large:
            monkeypatch.setattr(berths, "BERTHS", chance.choice([1, 2, 8]))
            kinds = chance.choice([REDUCTIONS, kinds])
            lengths = [1, 3, 3, 7000, chance.choice([20_000, 40_000])]
        root = chance.randrange(size)
        return [
            OfKind(
                lanes,
                # The same root mostly, so that kinds come to be known.
                number * size + (root if chance.random() < 0.8 else chance.randrange(size)),
                chance.choice(kinds),
                chance.choice("abcdefgh"),
                chance.choice(lengths),
                **{what: chance.randrange(size) for what, odds in rarely.items()
                   if chance.random() < odds},
            )
            for number in range(count)
        ]  # fmt: skip

    return make


def check_over(world):
    """Nothing is kept of what has ended."""
    for context in world.contexts:
        assert not context.pending
        assert not context.calls.ops
        assert not context.calls.waiting.by_key
        assert not context.calls.arrivals.early
        assert not context.calls.tags._pending
        assert not any(context.calls._unsolicited)
        assert not context.post_express._bytes
        assert not context.berths._moored
        assert all(berth.is_free for berth in context.berths._all)


def check_right(world, calls):
    """All have ended well."""
    for call in calls:
        for rank in world.ranks:
            assert call.is_right(rank, world.size), (call.number, rank)
    check_over(world)


IN_ONE_GO = {
    "all_reduce": "in_one_go",
    "reduce_scatter": "slots_in_one_go",
    **dict.fromkeys(["broadcast", "into", "all_gather", "gather", "scatter", "all_to_all"],
                    "taking_in_one_go"),
}  # fmt: skip
"""By kind of call: what carries it out within it."""


def outcome(lanes, posting, seed, kind, monkeypatch, *, way):
    """What is in the memory of all ranks after each of some calls, and what the users have. `way`:
    "ordinary", "python" or "compiled"."""
    ends = []
    name = IN_ONE_GO[kind]
    make = getattr(post_express, name)

    def counted(*args):
        run = make(*args)

        def count(*call):
            ends.append(run(*call))
            return ends[-1]

        return count if way == "python" else None

    if way != "compiled":
        monkeypatch.setattr(post_express, "tape_of_posts", lambda *_, **__: None)
        monkeypatch.setattr(post_express, name, counted)
    chance = random.Random(f"{kind} {seed}")
    size = chance.choice([2, 2, 3]) if kind == "all_reduce" else 2
    world = posting(size, seed, polls=True)
    if kind == "all_reduce":
        calls = some_calls(chance, size, 40, canceller=0.1)
    else:
        lengths = [1, 3, 3, chance.choice([40, 5000])]
        calls = [
            OfKind(lanes, 2 * number + 1, kind, chance.choice("abc"), chance.choice(lengths))
            for number in range(40)
        ]
    seen = []
    for call in calls:
        for rank in chance.sample(range(size), size):
            call.start(world.contexts[rank], posts=chance.random() < 0.9)
            if call.canceller == rank:
                call.cancel(rank)
            seen += [zlib.crc32(memory[:PAGE]) for memory in world.memories]
            seen += [
                zlib.crc32(memory[posts.START : posts.START + posts.SIZE])
                for memory in world.memories
            ]
        if chance.random() < 0.7:
            world.settle()
    world.settle()
    moved = [context.post_express._moved for context in world.contexts]
    seen += [(each.sent, each.received) for each in moved]
    for call in calls:
        for rank, work in call.works.items():
            if kind == "all_reduce":
                seen.append((repr(work.exception()) if not work.cancelled() else "",
                             call.arrays[rank].tobytes()))  # fmt: skip
            else:
                assert call.is_right(rank, size)
    check_over(world)
    return seen, ends


@pytest.mark.parametrize("kind", IN_ONE_GO)
@pytest.mark.parametrize("seed", seeds(3, 6))
@pytest.mark.sample(12)
def test_in_one_go_leaves_the_same(lanes, posting, seed, kind, monkeypatch):
    with monkeypatch.context() as patch:
        there, ends = outcome(lanes, posting, seed, kind, patch, way="python")
    assert {True, False} <= {*ends}
    assert {*ends} <= {True, False, None}
    with monkeypatch.context() as patch:
        assert there == outcome(lanes, posting, seed, kind, patch, way="ordinary")[0]
    with monkeypatch.context() as patch:
        assert there == outcome(lanes, posting, seed, kind, patch, way="compiled")[0]


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seed", seeds(6, 12))
@pytest.mark.sample(24)
def test_any_order(posting, calls_of, seed, polls, monkeypatch):
    """Tags are forgotten again and again on the way, in every other of the worlds."""
    if seed % 2:
        monkeypatch.setattr(tags, "MANY", 1)
    chance = random.Random(seed)
    size = chance.choice([2, 2, 3, 4, 16])
    world = posting(size, seed, polls=polls)
    calls = calls_of(chance, size, 30 if size < 16 else 8)
    Program(world, calls, chance).run()
    check_right(world, calls)
    if size < 16:  # where many make few calls, it is chance whether two tags are idle at once
        assert any(context.calls.tags._forgotten for context in world.contexts) == bool(seed % 2)


@pytest.mark.parametrize("how", ["late", "hears_late"])
@pytest.mark.parametrize("seed", seeds(10, 20))
@pytest.mark.sample(40)
def test_what_follows_a_post(posting, calls_of, seed, how, monkeypatch):
    """Frames that were sent after it are not looked at before it: whether ranks come to share
    memory one after the other, or look at their links before they are woken."""
    chance = random.Random(f"{how} {seed}")
    size = chance.choice([2, 2, 3, 4])
    calls = calls_of(chance, size, 20)
    monkeypatch.setattr(berths, "BERTHS", 8)
    world = posting(size, seed, polls=chance.random() < 0.5, **{how: True})
    Program(world, calls, chance).run()
    check_right(world, calls)


@pytest.mark.parametrize("seed", seeds(10, 20))
def test_some_are_cancelled(posting, calls_of, seed):
    chance = random.Random(f"cancel {seed}")
    size = chance.choice([2, 3, 4])
    world = posting(size, seed, polls=chance.random() < 0.5)
    calls = calls_of(chance, size, 20, canceller=0.4)
    Program(world, calls, chance).run()
    for call in calls:
        for rank, work in call.works.items():
            assert work.done(), f"rank {rank} hangs in #{call.number}"
            if work.cancelled():
                assert call.canceller == rank
            elif (error := work.exception()) is not None:
                assert isinstance(error, CollectiveAbortedError)
                assert error.rank == call.canceller != rank
                assert error.tag == call.tag
            else:
                assert call.is_right(rank, size)
    check_over(world)


@pytest.mark.parametrize("limit", [reductions.EAGER_LIMIT, 20])
@pytest.mark.parametrize("seed", seeds(10, 20))
def test_one_rank_calls_something_else(posting, seed, limit, monkeypatch):
    """The error of all says who called what. Other tags are not concerned."""
    monkeypatch.setattr(reductions, "EAGER_LIMIT", limit)
    monkeypatch.setattr(reductions, "POSTED_OF_TWO", limit)
    chance = random.Random(f"other {seed}")
    size = chance.choice([2, 3, 4])
    world = posting(size, seed)
    calls = some_calls(chance, size, 20, other=0.3)
    Program(world, calls, chance).run()
    for call in calls:
        texts = {
            rank: f"all_reduce({SUM}, float64[{call.length + (rank == call.other)}])"
            for rank in world.ranks
        }
        for rank, work in call.works.items():
            if call.other is None:
                assert call.is_right(rank, size)
                continue
            error = work.exception()
            assert isinstance(error, (MismatchError, CollectiveAbortedError)), error
            if isinstance(error, MismatchError):
                assert error.calls.items() <= texts.items()
                assert len(set(error.calls.values())) == 2
    check_over(world)


@pytest.mark.parametrize("seed", seeds(10, 20))
def test_a_rank_dies(posting, calls_of, seed):
    """What it has posted counts: what it gave completes or fails, nothing hangs."""
    chance = random.Random(f"dies {seed}")
    size = chance.choice([2, 3, 4])
    world = posting(size, seed, polls=chance.random() < 0.5)
    calls = calls_of(chance, size, 12)
    program = Program(world, calls, chance)
    for _ in range(chance.randrange(80)):
        program.step()
    dead = chance.randrange(size)
    world.kill(dead)
    for _ in range(chance.randrange(10)):
        program.step()
    world.tell_of(dead)
    program.run()
    for call in calls:
        for rank, work in call.works.items():
            if rank == dead:
                continue
            assert work.done(), f"rank {rank} hangs in #{call.number}"
            if (error := work.exception()) is None:
                assert call.is_right(rank, size)
            else:
                assert isinstance(error, PeerLostError)
                assert error.ranks == (dead,)
    alive = [context for context in world.contexts if context.rank != dead]
    assert not any(context.pending for context in alive)


def largest_frame(world):
    """Have all happen that can: the most bytes of any frame meanwhile."""
    largest = 0
    while events := world.events():
        largest = max([largest, *(len(data) for wire in world.wires.values() for _, data in wire)])
        world.do(events[0])
    return largest


GIVERS = {"broadcast": {1}, "into": {1}, "all_gather": {0, 1}, "gather": {0}, "scatter": {1},
          "all_to_all": {0, 1}, "express": {0, 1}, "reduce": {0, 1}}  # fmt: skip
"""The ranks that have something for the others."""
REDUCED = ("express", "reduce")
"""So few bytes are not reduced on berths."""


@pytest.mark.parametrize("full", [set(), {0}, {1}, {0, 1}])
@pytest.mark.parametrize("kind", GIVERS)
def test_large_arrays_are_in_posts(lanes, kind, full, monkeypatch):
    """Of each rank, unless it has no room for them: then they are on berths; or in frames where
    there is no berth either; and the same."""
    world = lanes.World(2, lanes.Chance(0))
    for context in world.contexts:
        context.may_post = True
    for number in range(9):
        for rank in full if number == 6 else ():
            world.contexts[rank].post_express.berths.break_off()
        for rank in full if number == 3 else ():
            own = world.contexts[rank].post_express._posts
            own._limit = 0
            monkeypatch.setattr(own, "_find", lambda _: -1)
        call = OfKind(lanes, 2 * number + 1, kind, "t", 60_000)
        for context in world.contexts:
            call.start(context, posts=True)
        largest = largest_frame(world)
        if number >= (3 if kind in REDUCED else 6) and full & GIVERS[kind]:
            assert largest > 100_000
        else:
            assert largest < 1000
        assert all(call.is_right(rank, 2) for rank in world.ranks)
    for context in world.contexts if kind not in REDUCED else ():
        recipes = context.post_express._recipes.values()
        assert any(isinstance(recipe, posted_values.PostedValues) for recipe in recipes)


@pytest.mark.parametrize("posts", [True, False])
def test_who_waits_for_its_number_is_not_overtaken(lanes, posts):
    """A contribution may free a tag before the word comes that lets those go on that wait."""
    world = lanes.World(2, lanes.Chance(0))
    for context in world.contexts:
        context.may_post = True
    calls = [Tagged(number, "t", 3) for number in range(2)]
    calls[0].start(world.contexts[0], posts=True)
    calls[1].start(world.contexts[0], posts=True)
    late = world.contexts[1]
    late.calls.tags.frozen.add("t")
    calls[0].start(late, posts=posts)
    late.calls.tags.frozen.clear()
    calls[1].start(late, posts=posts)
    late.calls.undefer()
    world.settle()
    assert all(call.is_right(rank, 2) for call in calls for rank in world.ranks)


@pytest.mark.parametrize("has_berths", [True, False])
@pytest.mark.parametrize("why", ["there is room", "the ring is full", "others have asked for it"])
def test_what_is_too_large_for_a_frame(lanes, why, has_berths, monkeypatch):
    """Where a call is of no kind that is prepared: it is posted for certain, or travels apart."""
    monkeypatch.setattr(post_express, "MOST_BYTES", 1 << 40)
    world = lanes.World(2, lanes.Chance(0))
    works = []
    for context in world.contexts:
        context.may_post = True
        if not has_berths:
            context.post_express.berths.break_off()
        for tag in range(14 if why == "the ring is full" else 1):
            if why == "others have asked for it":
                context.calls.arrivals.early[tag, 0] = Early(inquirers=(1 - context.rank,))
            x = np.full(270_000, tag + context.rank + 1.0)[::2]  # its parts lie apart
            call = values.all_gather(context, x, None)
            work = context.post_express.begin(call, (x, None), math.inf, tag)
            if work is None:
                work = context.calls.launch(call.op, call.text, call.start, tag=tag)
            works.append((tag, work))
    largest = largest_frame(world)
    assert largest <= MAX_PAYLOAD
    assert (largest > 1000) == (why != "there is room" and not has_berths)
    for tag, work in works:
        assert [set(row) for row in work.result()] == [{tag + 1.0}, {tag + 2.0}]


def test_what_a_dead_rank_has_posted_is_taken(posting):
    world = posting(2, 0)
    call = Tagged(0, "a", 3)
    call.start(world.contexts[0], posts=True)
    call.start(world.contexts[1], posts=True)
    assert call.works[1].done()
    assert not call.works[0].done()
    for wires in world.wires.values():
        wires.clear()  # nobody was woken
    world.kill(1)
    world.tell_of(1)
    assert call.is_right(0, 2)


def test_a_thousand_at_once_are_one_wake_up(posting):
    world = posting(2, 0)
    calls = [Tagged(number, number, 1) for number in range(1000)]
    for call in calls[:900]:
        call.start(world.contexts[0], posts=True)
    woken = sum(len(wires) for wires in world.wires.values())
    for call in calls[:3]:
        call.start(world.contexts[1], posts=True)
    if posts.SIZE > 1 << 16:
        assert woken == 0
        assert [len(world.wires[1, 0]), len(world.wires[0, 1])] == [1, 0]
    for call in calls[3:]:
        call.start(world.contexts[1], posts=True)
    for call in calls[900:]:
        call.start(world.contexts[0], posts=True)
    world.settle()
    assert all(call.is_right(rank, 2) for call in calls for rank in range(2))
    check_over(world)


def test_the_group_ends(posting):
    world = posting(2, 0)
    calls = [Tagged(number, "ab"[number % 2], 3) for number in range(4)]
    for call in calls:
        call.start(world.contexts[0], posts=True)
    context = world.contexts[0]
    assert len(context.pending) == 4
    context.close(GroupClosedError("over"))
    for call in calls:
        assert isinstance(call.works[0].exception(), GroupClosedError)
    assert context.post_express is None
    assert not context.pending


@pytest.mark.parametrize("tail", [b"", b"\x91\xa1a", b"\x92\xc2\xc4\x00", b"\xc1"])
def test_a_post_that_makes_no_sense(posting, tail):
    """Whoever posts it is lost."""
    world = posting(2, 0)
    blamed = []
    world.contexts[0].endpoint.blame = lambda rank, error: blamed.append(rank)
    theirs = world.contexts[1].post_express._posts
    words = tail or b"\x92\xa1a\xa1b"
    head = posts.prefixes(words, 8)(0)
    assert theirs.put_parts(head, (bytes(8),), len(head) + 32) >= 0
    theirs.tell()
    world.contexts[0].post_express.read()
    world.contexts[0].post_express.read()
    assert blamed == [1]


def loses_who_lies(world):
    """Let the first rank lose whom it blames, as ranks do."""
    context = world.contexts[0]

    def blame(rank, error):
        context.endpoint.lost[rank] = str(error)
        context.rank_lost(rank, str(error))

    context.endpoint.blame = blame


WORDS = [*range(_THREAD + 1), _TEXT // 8, _TEXT // 8 + 128, posts.HEAD, posts.LAP, posts.GIVEN_UP,
         posts.SLEEP, posts.DOZES, posts.READS, posts.CURSORS, posts.CURSORS + 1]  # fmt: skip


@pytest.mark.parametrize("value", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("way", ["python", "compiled"])
@pytest.mark.sample(101)
def test_a_word_that_makes_no_sense(posting, lanes, monkeypatch, word, value, way):
    """What another rank writes ends no call in an error that is not one of aiodist."""
    if way == "python":
        monkeypatch.setattr(post_express, "tape_of_posts", lambda *_, **__: None)
    world = posting(2, 0)
    loses_who_lies(world)
    works = []
    for number in range(12):
        if number >= 6:
            world.memories[1][:PAGE].cast("Q")[word] = value
        for kind, tag in [("express", None), ("express", "a"), ("all_gather", "a")]:
            call = lanes.Call(number, kind, 3, tag=tag)
            ranks = [1, 0] if 1 not in world.contexts[0].gone else [0]
            for rank in ranks if number % 2 else reversed(ranks):
                call.start(world.contexts[rank])
            works.append(call.works[0])
            world.settle()
    world.contexts[0].close(GroupClosedError("over"))
    for work in works:
        assert isinstance(work.exception(), (AiodistError, type(None)))


@pytest.mark.parametrize("kind", ["express", "all_gather", "slots"])
@pytest.mark.parametrize("way", ["python", "compiled"])
@pytest.mark.parametrize("ends", ["call", "close"])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_post_beyond_the_end_of_the_ring(posting, lanes, monkeypatch, kind, way, ends, is_begun):
    """A rank is lost if its ring ends before its post does, and the group then ends as ever."""
    if way == "python":
        monkeypatch.setattr(post_express, "tape_of_posts", lambda *_, **__: None)
    world = posting(2, 0)
    loses_who_lies(world)
    context, theirs = world.contexts[0], world.contexts[1].post_express._posts
    (reader,) = context.post_express._posts.readers
    taken = 0
    for number in range(1, 8, 2):
        taken = reader.taken
        call = lanes.Call(number, kind, 12, tag="a")
        for rank in world.ranks:
            call.start(world.contexts[rank])
        world.settle()
    # The next post is like the last one, but lies elsewhere.
    size, stop = reader.taken - taken, theirs._head - theirs._base
    post = bytearray(theirs.ring[stop - size : stop])
    post[16] += 1  # the number of the call
    reader.at = posts.SIZE - (size - 64 if is_begun else 0)
    theirs.ring[reader.at :] = post[: posts.SIZE - reader.at]
    theirs._own[posts.HEAD] = reader.taken + size
    if ends == "call":
        call = lanes.Call(9, kind, 12, tag="a")
        call.start(context)
        assert isinstance(call.works[0].exception(), PeerLostError)
    context.close(GroupClosedError("over"))
    assert context.post_express is None
    assert context.ended is not None


KERNELS = [
    (op, dtype)
    for op in (SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT)
    for dtype in ("float64", "float32", "int64", "complex64")
    if (op, dtype) not in ((ReduceOp.AVG, "int64"), (ReduceOp.MAX, "complex64"))
]


@pytest.mark.parametrize(("op", "dtype"), KERNELS)
@pytest.mark.parametrize("length", [1, 5])
def test_posted_or_sent_the_bits_are_the_same(posting, op, dtype, length):
    found = []
    for way in range(3):  # all send, all post, some do
        world = posting(3, 0)
        works = []
        for rank, context in enumerate(world.contexts):
            x = np.arange(1 + rank, 1 + rank + length).astype(dtype) / 7
            x = x.astype(dtype)
            if dtype.startswith("f"):
                x[0] = np.float64(0x7FF8000000000001 + rank).astype(dtype) if rank else np.nan
            work = None
            if way == 1 or (way == 2 and rank):
                work = context.post_express.all_reduce(x, op, math.inf, "a")
                assert work is not None
            if work is None:
                call = reductions.all_reduce(context, x, op, None)
                work = context.calls.launch(call.op, call.text, call.start, tag="a")
            works.append(work)
        world.settle()
        found += [work.result().tobytes() for work in works]
    assert len(set(found)) == 1
