"""Boards, and lanes on them, word by word: each rank is a thread that the test stops at every look
at a word and at every write, as a processor with a store buffer would let others come in between.
"""

from __future__ import annotations

import _thread
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from aiodist.engine.executor import Executor, begin_area
from aiodist.engine.phase import Phase, prepared
from aiodist.links.moved import Moved
from aiodist.schedules import pull_whole
from aiodist.shared_memory import board as board_module
from aiodist.shared_memory.board import (
    A_PHASE,
    AN_OPERATION,
    AREAS,
    MAX_PHASES,
    ON_DEVICE,
    PAGE,
    POSTS,
    SEGMENT,
    STAMP,
    Board,
    digest_of,
    stamp_of,
)
from aiodist.shared_memory.lane import Lane

# -- one board after the other --------------------------------------------------------------------


def boards(size: int) -> list[Board]:
    memories = [memoryview(bytearray(SEGMENT)) for _ in range(size)]
    return [
        Board(
            rank, memories[rank], {r: m.toreadonly() for r, m in enumerate(memories) if r != rank}
        )
        for rank in range(size)
    ]


def test_areas_do_not_overlap_and_fill_the_segment():
    at = PAGE
    for start, size in AREAS:
        assert start == at
        assert start % PAGE == 0
        at += size
    assert at == POSTS[0]
    assert sum(POSTS) == SEGMENT


def test_stamps_are_ordered_as_things_happen():
    last = A_PHASE - 1
    row = [
        stamp_of(operation, phase, publishes)
        for operation in (0, 1, 2, 1 << 38)
        for phase in (0, 1, MAX_PHASES)
        for publishes in (0, 1, last)
    ]
    assert row == sorted(row)
    assert len(set(row)) == len(row)
    assert row[0] > 0
    assert row[-1] < 1 << 64
    assert stamp_of(3) + AN_OPERATION == stamp_of(4)


def test_each_rank_has_areas_that_others_cannot_write():
    one, two = boards(2)
    for index, (_, size) in enumerate(AREAS):
        area = one.area(0, index)
        assert len(area) == size
        area[:3] = b"abc"
        assert bytes(two.area(0, index)[:4]) == b"abc\0"
        with pytest.raises(TypeError):
            two.area(0, index)[0] = 1


def test_what_was_called():
    one, two, three = boards(3)
    for seq, texts in enumerate([("a", "a", "a"), ("b", "b", "c"), ("a", "d", "a")]):
        for board, text in zip((one, two, three), texts, strict=True):
            board.announce(seq, digest_of(text.encode()), text.encode())
    # The last two operations are told apart by parity; one before is gone.
    assert one.agree(1, digest_of(b"b")) is False
    assert one.different([1, 2], 1, digest_of(b"b")) == {2: b"c"}
    assert one.different([1, 2], 2, digest_of(b"a")) == {1: b"d"}
    assert two.different([0, 2], 2, digest_of(b"d")) == {0: b"a", 2: b"a"}
    assert one.different([2], 2, digest_of(b"a")) == {}


def test_long_texts_are_cut():
    one, two = boards(2)
    text = bytes(range(256)) * 20
    one.announce(5, digest_of(text), text)
    one.announce(6, digest_of(b"next"), b"next")
    (shown,) = two.different([0], 5, 1).values()
    assert len(shown) > 900
    assert text.startswith(shown)
    assert two.different([0], 6, 1) == {0: b"next"}


def test_a_hostile_length_of_a_text_reads_no_further():
    one, two = boards(2)
    one.announce(0, 1, b"x")
    one.own[1024 // 8] = 1 << 60
    (shown,) = two.different([0], 0, 2).values()
    assert len(shown) < 1024


def test_who_passed_an_operation_over_called_nothing_else():
    one, two = boards(2)
    one.announce(4, 1, b"four")
    assert two.different([0], 6, 1) == {}
    assert two.different([0], 6, 2) == {0: b"four"}
    one.abort(6)
    assert two.different([0], 6, 2) == {}
    assert two.is_void(6)
    assert not two.is_void(4)
    assert not two.is_void(5)
    assert not one.is_void(6)  # its own word is no news


def test_who_is_woken():
    one, two, three = boards(3)
    assert one.reach(stamp_of(0)) == []
    two.sleep([0], stamp_of(0, 0, 1))
    three.sleep([0], stamp_of(0, 0, 2))
    assert one.reach(stamp_of(0, 0, 1)) == [1]
    assert one.reach(stamp_of(0, 0, 2)) == [2]  # nobody is woken twice for one nap
    two.awake()
    assert one.reach(stamp_of(1)) == []
    two.sleep([0], stamp_of(2))
    assert one.reach(stamp_of(2)) == [1]
    two.sleep([0], stamp_of(3))  # another nap
    assert one.reach(stamp_of(3)) == [1]


def test_the_last_one_wakes_who_needs_all():
    one, two, three, four = boards(4)
    stamp = stamp_of(0, 0, 1)
    four.sleep([0, 1, 2], stamp)
    assert two.reach(stamp) == []
    assert one.reach(stamp_of(0)) == []  # not as far as that
    assert three.reach(stamp) == []
    assert one.reach(stamp) == [3]


def test_who_needs_one_is_woken_by_that_one():
    one, two, three = boards(3)
    stamp = stamp_of(0, 0, 1)
    two.sleep([2], stamp)
    assert one.reach(stamp) == []
    assert three.reach(stamp) == [1]


def test_who_needs_some_is_woken_by_the_first_that_is_missing():
    one, two, three, four = boards(4)
    stamp = stamp_of(0, 0, 1)
    one.reach(stamp)
    four.sleep([0, 2], stamp)
    assert two.reach(stamp) == []
    assert three.reach(stamp) == [3]


def test_reached():
    one, two, three = boards(3)
    assert one.reached([], stamp_of(9))
    assert one.reached([1, 2], 0)
    two.reach(stamp_of(0))
    assert one.reached([1], stamp_of(0))
    assert not one.reached([1, 2], stamp_of(0))
    three.reach(stamp_of(0, 2, 1))
    assert one.reached([1, 2], stamp_of(0))
    assert not one.reached([1], stamp_of(0, 0, 1))


def test_a_closed_board_lets_go():
    memories = [bytearray(SEGMENT) for _ in range(2)]
    board = Board(0, memoryview(memories[0]), {1: memoryview(memories[1]).toreadonly()})
    board.announce(0, 1, b"x")
    board.reach(stamp_of(0))
    board.close()
    for memory in memories:
        memory.clear()  # raises BufferError if it is looked at
    board.awake()
    assert board.reach(stamp_of(1)) == []


# -- word by word ---------------------------------------------------------------------------------


class Segment:
    """Words of one rank; `stores` are those on their way from its processor."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.stores: deque[tuple[int, int]] = deque()

    def flush_one(self) -> None:
        index, value = self.stores.popleft()
        self.words[index] = value


class View:
    """Words of `segment` from `offset` on, as `viewer` sees them."""

    def __init__(self, machine: Machine, viewer: int, segment: Segment, offset: int) -> None:
        self._machine = machine
        self._viewer = viewer
        self._segment = segment
        self._offset = offset

    def cast(self, _: str) -> View:
        return self

    def owner(self, machine: Machine) -> int:
        return machine.segments.index(self._segment)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return View(
                self._machine, self._viewer, self._segment, self._offset + (index.start or 0) // 8
            )
        self._machine.pause(self._viewer)
        return self._segment.words.get(self._offset + index, 0)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            return  # a text
        self._machine.pause(self._viewer)
        self._segment.stores.append((self._offset + index, value))


class Path:
    """Choices that follow `prefix`, then take the first option."""

    def __init__(self, prefix: list[int]) -> None:
        self._prefix = prefix
        self._taken: list[tuple[int, int]] = []

    def choice(self, options: list[Any]) -> Any:
        at = len(self._taken)
        index = self._prefix[at] if at < len(self._prefix) else 0
        self._taken.append((index, len(options)))
        return options[index]

    def following(self) -> list[int] | None:
        taken = list(self._taken)
        while taken:
            index, count = taken.pop()
            if index + 1 < count:
                return [before for before, _ in taken] + [index + 1]
        return None


class Machine:
    """Processors, one a rank, that do actions; the test chooses who goes on."""

    def __init__(self, size: int, chooser: Any, *, fences: bool = True) -> None:
        self.segments = [Segment() for _ in range(size)]
        self.ranks = range(size)
        self.chooser = chooser
        self._fences = fences
        self._actions: list[Callable[[], None] | None] = [None] * size
        self._go = [_thread.allocate_lock() for _ in range(size)]
        self._back = _thread.allocate_lock()
        self._running = -1
        self._fresh = False
        self._stopped = False
        self.dozing: dict[int, int] = {}  # by rank: at whose stamp
        self.rings: list[int] = []  # at whose stamps
        self.errors: list[BaseException] = []
        for lock in (*self._go, self._back):
            lock.acquire()
        self.threads = [
            threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in self.ranks
        ]

    def board(self, rank: int, *, dozes: bool = False) -> Board:
        views: dict[int, Any] = {
            r: View(self, rank, segment, 0) for r, segment in enumerate(self.segments)
        }
        own = views.pop(rank)
        return Board(rank, own, views, dozes=dozes)

    # What the kernel does, to which every rank's stamp has the number of the rank as its address.

    def address_of(self, view: View) -> int:
        return view.owner(self)

    def wait(self, address: int, seen: int, seconds: float) -> None:
        """The look and the falling asleep are one step. Nobody sleeps for `seconds` alone."""
        rank = self._running
        self.fence()  # as every system call is
        self.pause(rank)
        if self.segments[address].words.get(STAMP, 0) == seen:
            self.dozing[rank] = address
            self.pause(rank)

    def ring(self, address: int) -> None:
        self.pause(self._running)
        self.rings.append(address)
        for rank in [rank for rank, at in self.dozing.items() if at == address]:
            del self.dozing[rank]

    def fence(self) -> None:
        """Of the processor that is running: all its stores are seen before it goes on."""
        rank = self._running
        if rank >= 0 and self._fences:
            self.pause(rank)
            while self.segments[rank].stores:
                self.segments[rank].flush_one()

    def pause(self, rank: int) -> None:
        if self._fresh:
            self._fresh = False  # it could have been started later
        elif self._running == rank:
            self._back.release()
            self._go[rank].acquire()
            if self._stopped:
                raise SystemExit

    def _work(self, rank: int) -> None:
        while True:
            self._go[rank].acquire()
            if self._stopped:
                return
            action = self._actions[rank]
            assert action is not None
            try:
                action()
            except SystemExit:
                return
            except BaseException as error:
                self.errors.append(error)
            self._actions[rank] = None
            self._back.release()

    def run(self, queues: Callable[[int], list[list[Callable[[], None]]]]) -> None:
        """Choose until all is done. `queues`: of whose heads a rank does one when it is idle."""
        while not self.errors:
            options: list[tuple[int, Any]] = []
            for rank in self.ranks:
                if rank in self.dozing:
                    continue
                if self._actions[rank] is not None:
                    options.append((rank, None))
                else:
                    options += [(rank, queue) for queue in queues(rank) if queue]
            options += [(-1 - rank, None) for rank in self.ranks if self.segments[rank].stores]
            if not options:
                return
            rank, queue = self.chooser.choice(options)
            if rank < 0:
                self.segments[-1 - rank].flush_one()
                continue
            if queue is not None:
                self._actions[rank] = queue.pop(0)
            self._fresh = queue is not None
            self._running = rank
            self._go[rank].release()
            self._back.acquire()
            self._running = -1
        raise self.errors[0]

    def stop(self) -> None:
        self._stopped = True
        for lock in self._go:
            lock.release()
        for thread in self.threads:
            thread.join()


@contextmanager
def machine_of(size: int, chooser: Any, *, fences: bool = True) -> Iterator[Machine]:
    machine = Machine(size, chooser, fences=fences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board_module, "_acquire", machine.fence)
        patch.setattr(board_module, "_release", lambda: None)
        patch.setattr(board_module, "futex", machine)
        for thread in machine.threads:
            thread.start()
        try:
            yield machine
        finally:
            machine.stop()


def lost_wake_ups(*, fences: bool) -> tuple[int, int]:
    """Runs all interleavings of one that falls asleep and one that publishes: how many there are,
    and in how many the first sleeps on."""
    lost = 0
    prefix: list[int] | None = []
    for count in itertools.count():
        if prefix is None:
            return count, lost
        path = Path(prefix)
        with machine_of(2, path, fences=fences) as machine:
            sleeper, publisher = machine.board(0), machine.board(1)
            asleep: list[bool] = []
            kicked: list[int] = []

            def sleep(board: Board = sleeper, asleep: list[bool] = asleep) -> None:
                board.sleep([1], stamp_of(0, 0, 1))
                asleep.append(not board.reached([1], stamp_of(0, 0, 1)))

            def publish(board: Board = publisher, kicked: list[int] = kicked) -> None:
                kicked += board.reach(stamp_of(0, 0, 1))

            todo = {0: [sleep], 1: [publish]}
            machine.run(lambda rank, todo=todo: [todo[rank]])
            lost += asleep == [True] and kicked != [0]
        prefix = path.following()
    raise AssertionError


def test_no_wake_up_is_lost():
    count, lost = lost_wake_ups(fences=True)
    assert lost == 0
    assert count > 50


def test_without_fences_wake_ups_would_be_lost():
    """What the test above is worth."""
    _, lost = lost_wake_ups(fences=False)
    assert lost


def slept_on(chooser: Any, publishers: int, *, fences: bool = True) -> tuple[bool, int]:
    """Lets one doze until so many others have published, twice: whether nobody woke it, and how
    many have rung."""
    stamps = [stamp_of(0, 0, 1), stamp_of(0, 0, 2)]
    with machine_of(publishers + 1, chooser, fences=fences) as machine:
        sleeper, *others = [machine.board(rank, dozes=True) for rank in machine.ranks]
        peers = range(1, publishers + 1)

        def doze() -> None:
            for stamp in stamps:
                while not sleeper.doze(peers, stamp, 1.0):
                    pass

        todo: list[list[Callable[[], None]]] = [[doze]]
        todo += [[partial(_reach, board, stamp) for stamp in stamps] for board in others]
        machine.run(lambda rank: [todo[rank]])
        return bool(machine.dozing), len(machine.rings)


def _reach(board: Board, stamp: int) -> None:
    assert board.reach(stamp) == []  # nobody is sent a frame who dozes


def test_without_fences_one_would_doze_on():
    """What the test below is worth."""
    assert any(slept_on(random.Random(seed), 1, fences=False)[0] for seed in range(400))


@pytest.mark.parametrize("publishers", [1, 2, 3])
def test_nobody_dozes_on(publishers: int):
    rings = set()
    for seed in range(400):
        lost, rung = slept_on(random.Random(seed), publishers)
        assert not lost, seed
        rings.add(rung)
    assert {0, 1} <= rings


# -- lanes, word by word --------------------------------------------------------------------------


class Loop:
    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)


class Progress:
    def is_due(self) -> bool:
        return False

    def watch(self, board: Board, peers: Any, stamp: int, *, crowded: bool) -> bool:
        return board.reached(peers, stamp)


class Sharing:
    """Every rank's number, through the first word of its area."""

    def __init__(self, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.number = number
        self.found = [0] * size
        self.areas: list[Any] = []

    def bind(self, lane: Lane, area: int) -> None:
        self.areas = [lane.area(rank, area) for rank in range(len(self.found))]

    def unbind(self) -> None:
        self.areas = []

    def copy(self, step: Any) -> None:
        if step.into.buffer >= 3:
            self.areas[self.rank][0] = self.number
            return
        for rank in range(step.into.start, step.into.stop):
            self.found[rank] = self.number if rank == self.rank else self.areas[rank][0]


class Links:
    """Where nobody is lost."""

    def check(self, peer: int) -> None: ...


class Rider:
    """An operation of so many phases, in each of which all share a number."""

    place = 0

    def __init__(self, user: User, seq: int, phases: int, size: int) -> None:
        self.seq = seq
        self.call = b"share"
        self.digest = 77
        self.outcome = ""
        self.rows: list[list[int]] = []
        self._user = user
        self._phases = phases
        self._size = size
        self._run: Executor | None = None
        self._memory: Sharing | None = None

    def resume(self) -> None:
        lane = self._user.lane
        if self.outcome or not lane.enter(self):
            return
        while True:
            if self._run is None:
                number = self._user.number(self.seq, len(self.rows))
                self._memory = Sharing(self._user.rank, self._size, number)
                plan = prepared(pull_whole.share, self._user.rank, self._size, 1)
                phase = Phase(plan, self._memory, 8, 8)
                links: Any = Links()
                self._run = Executor(phase, links, lane, begin_area(phase, lane, self.seq))
            if not self._run.run():
                return
            assert self._memory is not None
            self.rows.append(self._memory.found)
            self._run.close()
            self._run = None
            if len(self.rows) == self._phases:
                self.finish("done")
                return

    def finish(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self._user.lane.leave(self, failed=outcome != "done")


class User:
    """One rank: its lane, and what its loop is to do."""

    def __init__(self, machine: Machine, rank: int, phases: list[int], *, polls: bool) -> None:
        self.rank = rank
        self.loop: Any = Loop()
        self.progress: Any = Progress()
        self.users: list[User] = []
        self.riders: list[Rider] = []
        self.verdicts: set[int] = set()
        self.calls: list[Callable[[], None]] = []
        self.cancels: list[Callable[[], None]] = []
        self.gives_up: set[int] = set()
        self._phases = phases
        self._size = len(machine.segments)
        self.lane = Lane(
            machine.board(rank),
            self.loop,
            self.progress,
            self._kick,
            0,
            Moved(),
            size=self._size,
            crowded=False,
            polls=polls,
        )

    def number(self, seq: int, phase: int) -> int:
        return 1 + 1000 * seq + 100 * phase + self.rank

    def _kick(self, peer: int) -> None:
        user = self.users[peer]
        user.loop.ready.append(user.lane.kicked)

    def call(self) -> None:
        seq = len(self.riders)
        rider = Rider(self, seq, self._phases[seq], self._size)
        self.riders.append(rider)
        if seq in self.verdicts:
            rider.finish("aborted")
            return
        if seq in self.gives_up:
            self.cancels.append(lambda: self.cancel(seq))
        self.lane.add(rider)

    def cancel(self, seq: int) -> None:
        if not self.riders[seq].outcome:
            self.riders[seq].finish("cancelled")
            for user in self.users:
                if user is not self:
                    user.loop.ready.append(lambda user=user: user.hear(seq))

    def hear(self, seq: int) -> None:
        """Someone gave `seq` up."""
        if seq < len(self.riders):
            self.riders[seq].finish("aborted")
        else:
            self.verdicts.add(seq)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_lanes_word_by_word(seed, polls):
    """Whatever comes in between: all operations end, with the numbers of that very operation."""
    chance = random.Random(seed)
    size = chance.choice([2, 2, 3])
    phases = [chance.choice([1, 1, 2, 3]) for _ in range(4)]
    given_up = {(chance.randrange(size), chance.randrange(4)) for _ in range(chance.randrange(3))}
    with machine_of(size, chance) as machine:
        users = [User(machine, rank, phases, polls=polls) for rank in range(size)]
        for user in users:
            user.users = users
            user.calls = [user.call] * len(phases)
            user.gives_up = {seq for rank, seq in given_up if rank == user.rank}
        machine.run(lambda rank: [users[rank].calls, users[rank].cancels, users[rank].loop.ready])
        for user in users:
            assert len(user.riders) == len(phases)
            for rider in user.riders:
                where = f"rank {user.rank} #{rider.seq}: {rider.outcome} {rider.rows}"
                assert rider.outcome, f"{where} hangs"
                if rider.outcome != "done":
                    assert rider.seq in {seq for _, seq in given_up}, where
                for phase, row in enumerate(rider.rows):
                    assert row == [other.number(rider.seq, phase) for other in users], where
            assert user.lane.idle


def test_who_passed_an_operation_over_has_no_place():
    one, two = boards(2)
    one.announce(4, 1, b"x", 9)
    assert two.places(4) == {0: 9}
    one.abort(6)
    assert two.places(6) is None


def test_who_has_its_array_on_a_device():
    one, two, three = boards(3)
    for board in (two, three):
        board.announce(4, 1, b"call", ON_DEVICE)
    assert one.all_on_devices(4)
    assert not two.all_on_devices(4)
    assert one.places(4) is None  # not in memory that all see
    one.announce(4, 1, b"call", 9)
    assert two.places(4) is None
    assert not one.all_on_devices(5)  # the other parity
    two.announce(6, 1, b"call")
    assert not one.all_on_devices(6)
    two.announce(8, 1, b"call", ON_DEVICE)
    assert one.all_on_devices(8)
    three.abort(10)  # passed over: it has announced nothing
    assert not one.all_on_devices(10)
