"""The executor of phases in shared memory: its steps, where it waits and goes on, its areas."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.engine.executor import Executor, area_for, area_of, begin_area
from aiodist.engine.phase import Phase, Prepared, prepared
from aiodist.links.moved import Moved
from aiodist.schedules import pull_direct, pull_slices, pull_whole
from aiodist.schedules.plan import Await, Copy, Plan, Publish, Reduce, Span
from aiodist.shared_memory.board import (
    A_PHASE,
    AREAS,
    CROSSING,
    LEAST_IN_ROUND,
    MAX_PHASES,
    ROUND,
    SMALL,
    SMALL_AREA,
    STEP,
)
from aiodist.shared_memory.lane import DifferentCallsError


class Lane:
    """Writes down what is asked of it; waits as often as `answers` says."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.said: list[Any] = []
        self.moved = Moved()
        self.phase = -1
        self.others = (1,)
        self.by_turns = SMALL
        self.goes_round = False
        self.found: dict[int, int] | None = None

    def places(self) -> dict[int, int] | None:
        return self.found

    def next_phase(self) -> int:
        self.phase += 1
        return self.phase

    def _answer(self) -> bool:
        return self.answers.pop(0) if self.answers else True

    def begin(self, area: int) -> bool:
        self.said.append(("begin", area))
        return self._answer()

    def wait_for(self, peers: Any, publishes: int) -> bool:
        self.said.append(("wait", peers, publishes))
        return self._answer()

    def has_published(self, peer: int, publishes: int) -> bool:
        return False

    def publish(self) -> None:
        self.said.append("publish")

    def end(self, area: int) -> bool:
        self.said.append(("end", area))
        return self._answer()


class Memory:
    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def bind(self, lane: Any, area: int) -> None:
        self._lane.said.append(("bind", area))

    def unbind(self) -> None:
        self._lane.said.append("unbind")

    def copy(self, step: Copy) -> None:
        self._lane.said.append("copy")

    def reduce(self, step: Reduce) -> None:
        self._lane.said.append("reduce")


class Links:
    """Where nobody is lost."""

    def why_lost(self, peer: int) -> None: ...


def executor_of(lane: Any, phase: Phase, *, seq: int = 0, place: int = 0) -> Executor:
    links: Any = Links()
    return Executor(phase, links, lane, begin_area(phase, lane, seq), place)


def run_of(lane: Any, algorithm: Any, *, seq: int = 0, itemsize: int = 8) -> Executor:
    plan = prepared(algorithm, 0, 2, 10)
    memory: Any = Memory(lane)
    return executor_of(lane, Phase(plan, memory, itemsize, plan.plan.shared * itemsize), seq=seq)


def test_steps_in_order():
    lane = Lane()
    run = run_of(lane, pull_whole.all_reduce)
    assert run.run()
    wait = ("wait", (1,), 1)
    assert lane.said == [
        ("begin", 0), ("bind", 0), "copy", "publish", wait, "reduce", ("end", 0),
    ]  # fmt: skip
    run.close()
    assert lane.said[-1] == "unbind"
    assert (lane.moved.sent, lane.moved.received) == (80, 80)


@pytest.mark.parametrize("waits", range(4))
def test_it_goes_on_where_it_waited(waits):
    """Nothing is done twice, however often it has to wait."""
    lane = Lane(*[False] * waits, True, *[False] * waits, True, *[False] * waits, True)
    run = run_of(lane, pull_whole.all_reduce)
    for _ in range(3 * waits):
        assert not run.run()
    assert lane.moved.sent == 0
    assert run.run()
    assert lane.said.count("publish") == 1
    assert lane.said.count("copy") == 1
    assert lane.said.count("reduce") == 1
    assert lane.said.count(("bind", 0)) == 1
    assert lane.said.count(("begin", 0)) == waits + 1
    assert lane.said.count(("wait", (1,), 1)) == waits + 1
    assert lane.said.count(("end", 0)) == waits + 1
    assert lane.moved.sent == 80


def test_an_operation_that_was_given_up_counts_nothing_and_stays():
    lane = Lane(True, True, False, False)
    run = run_of(lane, pull_whole.all_reduce)
    assert not run.run()
    assert not run.run()
    assert lane.moved.received == 0
    assert lane.said.count("reduce") == 1


def test_errors_come_through():
    class Differing(Lane):
        def wait_for(self, peers, publishes):
            raise DifferentCallsError({1: b"barrier()"})

    with pytest.raises(DifferentCallsError) as caught:
        run_of(Differing(), pull_whole.all_reduce).run()
    assert caught.value.calls == {1: b"barrier()"}


@pytest.mark.parametrize(
    ("place", "found", "direct"),
    [(0, {1: 8}, False), (7, None, False), (7, {1: 8}, True)],
)
def test_where_arrays_lie(place: int, found: dict[int, int] | None, direct: bool) -> None:
    """Where all lie in memory that all see, and only there, another plan runs."""
    lane = Lane(False)
    lane.found = found
    pulled = prepared(pull_whole.all_reduce, 0, 2, 10)
    other = prepared(pull_direct.reduce_scatter, 0, 2, (0, 5, 10), 100)
    asked: list[dict[int, int]] = []

    def choose(places: dict[int, int]) -> Prepared:
        asked.append(places)
        return other

    memory: Any = Memory(lane)
    run = executor_of(lane, Phase(pulled, memory, 8, 80, choose), place=place)
    assert not run.run()
    assert run.run()
    assert asked == ([found] if direct else [])
    assert lane.said.count(("wait", (1,), 0)) == (2 if place else 0)
    assert ("copy" in lane.said) is not direct


def test_more_pieces_than_can_be_counted() -> None:
    plan = Plan("p", 0, 2, (), eager=False, publishes=A_PHASE)
    lane: Any = Lane()
    memory: Any = Memory(lane)
    with pytest.raises(ValueError, match="move fewer bytes at a time"):
        executor_of(lane, Phase(prepared(lambda: plan), memory, 1, 0))


def test_areas_take_turns():
    assert [area_for(1, seq, 0) for seq in range(4)] == [0, 1, 0, 1]
    assert [area_for(1, 0, phase) for phase in range(4)] == [0, 1, 0, 1]
    assert [area_for(1, 1, phase) for phase in range(2)] == [1, 0]
    assert area_for(0, 0, 0) == 0
    assert area_for(SMALL, 7, 0) == 1
    assert {area_for(SMALL + 1, seq, phase) for seq in range(3) for phase in range(3)} == {2}
    assert area_for(CROSSING, 0, 0) == 2
    # Where there are more ranks than cores, larger ones do so, too.
    assert [area_for(SMALL_AREA, seq, 0, SMALL_AREA) for seq in range(3)] == [0, 1, 0]
    assert area_for(SMALL_AREA + 1, 0, 0, SMALL_AREA) == 2
    with pytest.raises(ValueError, match=f"{CROSSING + 1} bytes"):
        area_for(CROSSING + 1, 0, 0)


@pytest.mark.parametrize("nbytes", [1, LEAST_IN_ROUND - 1, LEAST_IN_ROUND, STEP + 1, SMALL])
def test_each_phase_begins_behind_the_last_one_of_its_size(nbytes: int) -> None:
    """Until it is back at the start of the area. Phases of few bytes begin there each time."""
    lane: Any = Lane()
    lane.goes_round = True
    phase = Phase(prepared(pull_whole.all_reduce, 0, 2, 1), memory=Memory(lane), shared=nbytes)
    found = [area_of(phase, lane, seq, 0) for seq in range(2 * ROUND // STEP)]
    assert [area % len(AREAS) for area in found] == [0, 1] * (ROUND // STEP)
    begins = [area // len(AREAS) * STEP for area in found]
    assert begins[::2] == begins[1::2]
    places = dict.fromkeys(begins)
    apart = -(-nbytes // STEP) * STEP if nbytes >= LEAST_IN_ROUND else ROUND
    assert [*places] == [*range(0, ROUND, apart)]
    assert max(begins) + nbytes <= SMALL_AREA
    # The number of the phase counts like that of the operation.
    assert [area_of(phase, lane, seq - 1, 1) for seq in range(1, len(found))] == found[1:]
    lane.goes_round = False
    assert {area_of(phase, lane, seq, 0) for seq in range(4)} == {0, 1}


def test_each_phase_of_an_operation_has_its_area():
    lane = Lane()
    for phase in range(MAX_PHASES):
        assert run_of(lane, pull_whole.all_reduce, seq=3).run()
        assert lane.said[-1] == ("end", (3 + phase) & 1)


def test_plans_are_kept():
    assert prepared(pull_whole.all_reduce, 0, 2, 10) is prepared(pull_whole.all_reduce, 0, 2, 10)
    assert prepared(pull_whole.all_reduce, 1, 2, 10).plan.rank == 1


def test_what_a_plan_moves():
    pulled = prepared(pull_slices.all_reduce, 0, 2, 100, 10, 3)
    # Half is staged for the other; so is the result of the own half. As much is taken of it.
    assert (pulled.shown, pulled.taken) == (100, 100)
    own = Span(3, 0, 4)
    plan = Plan(
        "p", 0, 2, (Copy(own, Span(0, 0, 4)), Publish(), Await((1,), 1)), eager=False, shared=4
    )
    pulled = prepared(lambda: plan)
    assert (pulled.shown, pulled.taken) == (4, 0)
