"""Polling: for how long, by a clock that counts looks."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from aiodist.transports import polling as progress
from aiodist.transports import slices
from aiodist.transports.polling import AGAIN, LONGEST, SHORTEST, Progress
from aiodist.work import Work

STEP = 1e-6


class Clock:
    """Every look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += STEP
        return self.now


class Quiet:
    """A link on which nothing comes before it was looked at `patience` times."""

    def __init__(self, patience: float = float("inf")) -> None:
        self.looks = 0
        self.patience = patience
        self.answer = True

    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        self.looks += 1
        return self.answer if self.looks > self.patience else None

    def doze(self, seconds: float) -> bool:
        return False


class Dozy(Quiet):
    """One at which the system wakes who dozes: at the end of each doze there is something else."""

    def __init__(self, clock: Clock, patience: float = float("inf")) -> None:
        super().__init__(patience)
        self.kind = "shm"
        self._clock = clock
        self.dozed: list[float] = []

    def doze(self, seconds: float) -> bool:
        self.dozed.append(seconds)
        self._clock.now += seconds / 2
        return True

    def poll(self) -> bool:
        return bool(self.look_for(b"", memoryview(b"")))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "_clock", made)
    monkeypatch.setattr(progress, "neighbours", progress.Neighbours())
    monkeypatch.setattr(slices, "shorten", lambda: False)  # this thread stays as it is
    return made


def look(polling: Progress, link: Any) -> tuple[bool, int]:
    """Whether it came, and after how many looks."""
    assert not polling.is_due()
    polling._turned()
    assert not polling.is_due()
    return polling.look(link, link.look_for, b"", b"", crowded=False), link.looks


async def test_looking_in_vain_gets_shorter_and_is_tried_again(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    looks = [look(polling, Quiet())[1] for _ in range(AGAIN + 2)]
    assert looks[0] == pytest.approx(LONGEST / STEP, abs=3)
    assert looks[1] == pytest.approx(LONGEST / STEP / 2, abs=3)
    assert looks[AGAIN - 1] == pytest.approx(SHORTEST / STEP, abs=3)
    assert looks[AGAIN] == pytest.approx(looks[0], abs=3)
    assert looks[AGAIN + 1] == pytest.approx(looks[AGAIN - 1], abs=3)


async def test_one_that_pays_makes_up_for_all(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    for _ in range(AGAIN - 1):
        assert look(polling, Quiet()) != (True, 1)
    assert look(polling, Quiet(3)) == (True, 4)
    assert look(polling, Quiet())[1] == pytest.approx(LONGEST / STEP, abs=3)


async def test_something_else_ends_it(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    link = Quiet(3)
    link.answer = False
    assert look(polling, link) == (False, 4)


async def test_the_loop_gets_its_turn(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    assert not polling.is_due()
    clock.now += progress.LOOP_DUE
    assert polling.is_due()
    quiet: Any = Quiet()
    assert not polling.look(quiet, quiet.look_for, b"", b"", crowded=False)
    await asyncio.sleep(0)
    assert not polling.is_due()


async def test_who_looks_for_many_frames_gives_the_loop_its_turn(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked before whether the loop is due, and others work whenever they are let: a poll
    goes on for longer then, but not all of the polls of a call, nor those of the next one."""
    polling = Progress(asyncio.get_running_loop())

    def let_work() -> None:
        clock.now += 20 * progress.OTHERS

    monkeypatch.setattr(progress, "_yield", let_work)
    quiet: Any = Quiet()
    for _ in range(20):
        assert not polling.look(quiet, quiet.look_for, b"", b"", crowded=True)
    assert clock.now < progress.LOOP_DUE + progress.HELD + 21 * progress.OTHERS
    assert polling.is_due()
    await asyncio.sleep(0)
    assert not polling.is_due()


async def test_what_is_done_behind_a_look_makes_the_loop_due_as_ever(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    quiet: Any = Quiet(3)
    assert polling.look(quiet, quiet.look_for, b"", b"", crowded=True)
    assert not polling.is_due()
    clock.now += progress.LOOP_DUE
    assert polling.is_due()


class Done:
    """What is done within its call; `fails`: a hook raises that hears of it."""

    _on_cancel: Callable[[Any], None] | None = None

    def __init__(self, heard: list[Any], *, fails: bool = False) -> None:
        self._heard = heard
        self._fails = fails

    def finish_within_call(self, result: Any, ended: float) -> None:
        self._heard.append((result, ended))
        if self._fails:
            raise RuntimeError("the hook")


async def test_what_is_done_while_the_loop_is_due_has_its_result_after_that(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    polling = Progress(loop)
    heard: list[Any] = []
    polling.finish(Done(heard), "a", 1.0)
    assert heard == [("a", 1.0)]  # at once, as long as it is not due
    clock.now += progress.LOOP_DUE
    with monkeypatch.context() as patched:
        calls: list[Any] = []
        patched.setattr(loop, "call_soon", calls.append)
        for result in "bcd":
            polling.finish(Done(heard), result, 2.0)
    assert heard == [("a", 1.0)]
    (once,) = calls  # one handle for all
    loop.call_soon(once)
    await asyncio.sleep(0)
    assert heard == [("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 2.0)]
    polling.finish(Done(heard), "e", 3.0)
    assert heard[-1] == ("e", 3.0)


async def test_what_is_done_while_the_loop_is_due_cannot_be_cancelled(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    polling = Progress(loop)
    assert not polling.is_due()
    clock.now += progress.LOOP_DUE
    works: list[Work[int]] = [Work.begin(loop, "all_reduce") for _ in range(3)]
    for number, work in enumerate(works):
        polling.finish(work, number, 1.0)
        assert not work.done()
    assert not works[1].cancel()
    assert [work.result() for work in works] == [0, 1, 2]
    await asyncio.sleep(0)


async def test_a_hook_that_raises_is_no_matter_of_what_is_done_beside_it(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    polling = Progress(loop)
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    heard: list[Any] = []
    assert not polling.is_due()
    clock.now += progress.LOOP_DUE
    polling.finish(Done(heard, fails=True), "a", 1.0)
    polling.finish(Done(heard), "b", 1.0)
    for _ in range(2):
        await asyncio.sleep(0)
    assert [result for result, _ in heard] == ["a", "b"]
    assert told == ["the hook"]


async def test_who_waits_for_long_lets_others_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    polling = Progress(asyncio.get_running_loop())
    began = clock.now
    assert look(polling, Quiet()) != (True, 1)
    assert yields[0] >= began + progress.ALONE
    crowd: Any = Quiet()
    yields.clear()
    began = clock.now
    assert not polling.look(crowd, crowd.look_for, b"", b"", crowded=True)
    assert yields[0] < began + progress.ALONE


class Busy(Quiet):
    """A link on which something comes at every so many looks; of another process, or of this."""

    def __init__(self, every: float, kind: str = "tcp") -> None:
        super().__init__()
        self.every = every
        self.kind = kind

    def poll(self) -> bool:
        self.looks += 1
        return self.looks % self.every == 0


def inline(polling: Progress, link: Any, looks: float) -> int:
    """How often `link` was looked at by who waits until it was looked at so often."""
    polling._turned()
    polling.inline(lambda: link.looks >= looks, lambda: link)
    return link.looks


async def test_what_comes_in_between_renews_the_budget(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    almost = round(LONGEST / STEP) - 5
    assert inline(polling, Busy(almost), 3 * almost) == 3 * almost
    assert polling._in_vain == 0
    assert inline(polling, Busy(2 * almost), 3 * almost) == pytest.approx(LONGEST / STEP, abs=3)
    assert polling._in_vain == 1


async def test_a_link_of_this_loop_is_not_waited_for(clock: Clock) -> None:
    assert inline(Progress(asyncio.get_running_loop()), Busy(2, "inproc"), 10) == 1


async def test_the_loop_gets_its_turn_though_more_and_more_comes(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    polling._turned()
    assert inline(polling, Busy(1), math.inf) == pytest.approx(progress.LOOP_DUE / STEP, abs=3)


class Peer:
    """A rank that is there once it was looked at, or dozed for, so often."""

    def __init__(self, clock: Clock, looks: float, dozes: float = math.inf) -> None:
        self.can_doze = True
        self.is_apart = True
        self.places = [(0, 0)]  # where ranks were seen last
        self._clock = clock
        self._left = looks
        self._naps = dozes
        self.looks = 0
        self.dozed: list[float] = []
        self.wakes = False  # whether each doze ends at once

    def met(self, peers: Any, stamp: int) -> bool | None:
        self.looks += 1
        return True if self.looks > self._left else None

    def apart(self, peers: Any, stamp: int) -> bool:
        return self.is_apart

    def where(self) -> list[tuple[int, int]]:
        return self.places

    def doze(self, peers: Any, stamp: int, seconds: float) -> bool:
        self.dozed.append(seconds)
        if not self.wakes:
            self._clock.now += seconds
        return len(self.dozed) > self._naps


def watch(polling: Progress, peer: Peer) -> bool:
    polling._turned()
    return polling.watch(peer, [1], 1, crowded=False)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of cores that this thread was given, in order. It may use cores 0, 1 and 2."""
    given: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: given.append(set(to)), raising=False)
    return given


# The ranks and 1 + the core of each, this rank first; and the core to which this rank moves.
PLACES = {
    "two on one core": ([(1, 1), (0, 1)], 1),
    "the other one moves": ([(0, 1), (1, 1)], None),
    "each on one of its own": ([(1, 1), (0, 2)], None),
    "four on three cores": ([(3, 1), (0, 1), (1, 2), (2, 3)], None),
    "three and one": ([(2, 1), (0, 1), (1, 1), (3, 2)], 2),
    "all on one": ([(3, 2), (0, 2), (1, 2), (2, 2)], 0),
    "unknown": ([(1, 0), (0, 0)], None),
    "others of its thread": ([(1, 1)], None),
    "another core than it may use": ([(1, 1), (0, 1), (2, 2), (3, 3), (4, 9)], None),
}


@pytest.mark.parametrize("case", PLACES)
async def test_ranks_that_share_a_core_part(moved: list[set[int]], clock: Clock, case: str) -> None:
    where, to = PLACES[case]
    Progress(asyncio.get_running_loop()).part(where)
    assert moved == ([] if to is None else [{to}, {0, 1, 2}])


async def test_ranks_part_now_and_then(moved: list[set[int]], clock: Clock) -> None:
    """A rank that waits for one of another core does not move."""
    polling = Progress(asyncio.get_running_loop())
    peer = Peer(clock, 0)
    peer.places = [(1, 1), (0, 1)]
    watch(polling, peer)
    assert not moved
    peer.is_apart = False
    for _ in range(3):
        watch(polling, peer)
    assert len(moved) == 2
    clock.now += progress.PART
    watch(polling, peer)
    assert len(moved) == 4


async def test_ranks_stay_if_that_is_not_allowed_or_others_compute(
    moved: list[set[int]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling = Progress(asyncio.get_running_loop())
    clock.now = 5.0
    progress.neighbours.yielded(clock.now - 1.0, clock.now)
    polling.part([(1, 1), (0, 1)])
    assert not moved
    clock.now += progress.A_WHILE

    def refused(_: int, to: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    polling.part([(1, 1), (0, 1)])
    assert polling._parts_at == math.inf


async def test_who_polled_in_vain_dozes(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    peer = Peer(clock, math.inf, dozes=0)
    assert watch(polling, peer)
    assert peer.looks >= LONGEST / STEP / 2
    assert peer.dozed == [pytest.approx(progress.DOZE * LONGEST, rel=0.1)]
    soon = Peer(clock, 3)
    assert watch(polling, soon)
    assert not soon.dozed


async def test_dozing_in_vain_gets_shorter(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    dozed = []
    for _ in range(3):
        peer = Peer(clock, math.inf)
        assert not watch(polling, peer)
        dozed += peer.dozed
    assert dozed == [pytest.approx(progress.DOZE * LONGEST / 2**k, rel=0.1) for k in range(3)]


async def test_a_doze_ends_when_the_loop_is_due(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    peer = Peer(clock, math.inf)
    peer.wakes = True  # again and again, for nothing
    polling._turned()
    assert not polling.is_due()
    due = clock.now + progress.LOOP_DUE
    clock.now = due - 50 * STEP
    assert not polling.watch(peer, [1], 1, crowded=False)
    assert max(peer.dozed, default=0.0) <= 50 * STEP
    assert clock.now == pytest.approx(due, abs=5 * STEP)


async def test_while_the_loop_is_due_ranks_are_looked_for_once_more(clock: Clock) -> None:
    """A rank looks as long as ever, but does not doze. On a crowded host it dozes, for a short
    time."""
    polling = Progress(asyncio.get_running_loop())
    assert not polling.is_due()
    clock.now += progress.LOOP_DUE
    late = Peer(clock, 300)
    assert polling.watch(late, [1], 1, crowded=False)
    for k in range(3):
        missing, since = Peer(clock, math.inf), clock.now
        assert not polling.watch(missing, [1], 1, crowded=False)
        assert clock.now - since == pytest.approx(LONGEST / 2**k, rel=0.2)
        assert not missing.dozed
    polling._in_vain = 0
    crowded = Peer(clock, math.inf, dozes=0)
    assert polling.watch(crowded, [1], 1, crowded=True)
    clock.now = polling._due + progress.HELD
    missing = Peer(clock, math.inf)
    assert not polling.watch(missing, [1], 1, crowded=True)
    assert not missing.looks
    assert not missing.dozed
    assert polling.is_due()


async def test_of_many_ranks_who_yielded_in_vain_dozes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need the core: it is offered once to each of them, not again and again."""
    polling = Progress(asyncio.get_running_loop())
    yields: list[float] = []

    def let_work() -> None:
        yields.append(clock.now)
        clock.now += 2 * progress.OTHERS

    monkeypatch.setattr(progress, "_yield", let_work)
    peer = Peer(clock, math.inf, dozes=0)
    peer.is_apart = False
    polling._turned()
    assert polling.watch(peer, [1], 1, crowded=True)
    assert len(yields) == peer.looks == len(peer.dozed) == 1
    assert peer.dozed == [pytest.approx(progress.LOOP_DUE + progress.HELD, rel=0.1)]
    polling._turned()
    brought = Peer(clock, 0)
    assert polling.watch(brought, [1], 1, crowded=True)
    assert not brought.dozed
    # Who cannot doze yields on: the other way to wait takes longer.
    yields.clear()
    polling._turned()
    sleepless = Peer(clock, 3)
    sleepless.can_doze = sleepless.is_apart = False
    assert polling.watch(sleepless, [1], 1, crowded=True)
    assert len(yields) == 4


async def test_who_waits_for_ranks_on_other_cores_keeps_its_own_for_a_while(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more ranks than cores: whom the core is offered has nothing to do with it."""
    polling = Progress(asyncio.get_running_loop())
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    brought = Peer(clock, progress.APART / STEP / 2)
    polling._turned()
    assert polling.watch(brought, [1], 1, crowded=True)
    assert not yields
    late = Peer(clock, 1.5 * progress.APART / STEP)
    begun = clock.now
    assert polling.watch(late, [1], 1, crowded=True)
    assert yields[0] - begun == pytest.approx(progress.APART, abs=5 * STEP)


@pytest.mark.parametrize("crowded", [False, True])
async def test_a_missing_rank_of_this_core_is_offered_it_at_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    polling = Progress(asyncio.get_running_loop())
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    near = Peer(clock, 2)
    near.is_apart = False
    polling._turned()
    assert polling.watch(near, [1], 1, crowded=crowded)
    assert len(yields) == near.looks


async def test_where_the_system_wakes_nobody_there_is_no_doze(clock: Clock) -> None:
    peer = Peer(clock, math.inf)
    peer.can_doze = False
    assert not watch(Progress(asyncio.get_running_loop()), peer)
    assert not peer.dozed


async def test_beside_who_computes_nobody_polls(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A yield that took a whole time slice says that there is somebody; for a while."""

    def long_yield() -> None:
        clock.now += 2 * progress.HOGGED

    monkeypatch.setattr(progress, "_yield", long_yield)
    polling = Progress(asyncio.get_running_loop())
    found = Peer(clock, math.inf)
    assert not watch(polling, found)  # by the first yield
    assert found.looks
    peer = Peer(clock, math.inf, dozes=0)
    assert watch(polling, peer)
    assert not peer.looks
    assert len(peer.dozed) == 1
    # On a crowded host the neighbours may be ranks that need this core.
    polling._turned()
    near = Peer(clock, 0)
    near.is_apart = False
    assert polling.watch(near, [1], 1, crowded=True)
    assert near.looks
    clock.now += progress.A_WHILE
    monkeypatch.setattr(progress, "_yield", lambda: None)
    later = Peer(clock, 3)
    assert watch(polling, later)
    assert not later.dozed


async def test_beside_who_computes_a_link_is_polled_briefly(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling = Progress(asyncio.get_running_loop())
    assert look(polling, Quiet())[1] == pytest.approx(LONGEST / STEP, abs=3)
    progress.neighbours.yielded(clock.now - 2 * progress.HOGGED, clock.now)
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    polling._in_vain = 0
    assert look(polling, Quiet())[1] == pytest.approx(SHORTEST / STEP, abs=3)
    assert not progress.linger(clock.now + 100 * STEP)
    assert not yields


async def test_who_looked_at_a_link_in_vain_dozes(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    link = Dozy(clock, round(LONGEST / STEP) + 3)
    assert look(polling, link)[0] is True
    assert link.dozed[:1] == [pytest.approx(progress.DOZE * LONGEST, rel=0.1)]
    dozed = []
    for _ in range(3):
        never = Dozy(clock)
        assert look(polling, never)[0] is None
        dozed.append(never.dozed[0])
    assert dozed == [pytest.approx(progress.DOZE * LONGEST / 2**k, rel=0.2) for k in range(3)]


async def test_what_was_there_is_not_looked_for_again(clock: Clock) -> None:
    link = Dozy(clock, 0)
    assert look(Progress(asyncio.get_running_loop()), link) == (True, 1)
    assert not link.dozed


async def test_where_ranks_share_cores_nobody_dozes_at_a_link(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    link: Any = Dozy(clock)
    polling.inline(lambda: False, lambda: link)
    assert polling.look(link, link.look_for, b"", b"", crowded=True) is None
    assert not link.dozed


async def test_a_receive_of_one_rank_dozes_at_its_link(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    link: Any = Dozy(clock, round(LONGEST / STEP) + 3)
    polling.inline(lambda: link.looks > link.patience, lambda: link, link)
    assert link.dozed
    polling._turned()
    never: Any = Dozy(clock)
    polling.inline(lambda: False, lambda: never, never)
    assert never.dozed
    assert polling._dozed_in_vain == 1


async def test_lingering_offers_the_core(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    assert progress.linger(clock.now + 2 * STEP)
    assert len(yields) == 1
    assert not progress.linger(clock.now)
    assert len(yields) == 1


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS and Windows do not tell
    assert progress.cores() == os.cpu_count()
