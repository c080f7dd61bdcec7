"""The simulator finds every kind of mistake of ranks that share memory: plans made wrong by hand,
and right ones mutated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random

import pytest

from aiodist.schedules import pull_scan, pull_slices, pull_values, pull_whole
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.plan import (
    OUT,
    SHARED,
    Await,
    Copy,
    Grant,
    Plan,
    Publish,
    Recv,
    Reduce,
    Send,
    Span,
    Step,
    X,
)
from aiodist.testing.plan_simulator import Order, PlanError, SimulationResult, Unit, simulate

ORDERS: list[Order] = [lambda n: 0, lambda n: n - 1, *(Random(s).randrange for s in range(3))]

X4, OUT4 = Span(X, 0, 4), Span(OUT, 0, 4)
HERE, THERE = Span(SHARED, 0, 4), Span(SHARED + 1, 0, 4)
"""Shared memory of ranks 0 and 1."""

RACES = "nothing that happened before says that this is over"
ENDS = r"rank \d may come to its end before rank \d has published anything"


def plans(*programs: Sequence[Step], shared: int = 8) -> list[Plan]:
    size = len(programs)
    publishes = sum(isinstance(step, Publish) for step in programs[0])
    return [
        Plan("made by hand", rank, size, tuple(steps), False, 0, shared, publishes)
        for rank, steps in enumerate(programs)
    ]


def run(
    made: Sequence[Plan],
    *,
    length: int = 64,
    in_place: Collection[int] = (),
    order: Order = ORDERS[0],
) -> SimulationResult:
    lengths = [length] * len(made)
    return simulate(made, inputs=lengths, outputs=lengths, in_place=in_place, order=order)


def fails(made: Sequence[Plan], text: str, *, in_place: Collection[int] = ()) -> None:
    """In whatever order events come, `made` is refused with `text`."""
    for order in ORDERS:
        with pytest.raises(PlanError, match=text):
            run(made, in_place=in_place, order=order)


# -- a right plan -----------------------------------------------------------------------------


def test_a_right_plan() -> None:
    made = plans(
        [Copy(HERE, X4), Publish(), Await((1,), 1)],
        [Publish(), Await((0,), 1), Copy(OUT4, HERE)],
    )
    for order in ORDERS:
        outcome = run(made, length=4, order=order)
        assert outcome.out[1] == tuple(Unit(0, X, at) for at in range(4))
        assert outcome[1:] == ((0, 0), (0, 0), (0, 0), 1)


def test_rounds_are_chains_of_what_is_published() -> None:
    ping: list[Step] = [Publish(), Await((1,), 1), Publish(), Publish()]
    pong: list[Step] = [Await((0,), 1), Publish(), Await((0,), 3), Publish(), Publish()]
    assert run(plans([*ping, Await((1,), 2)], pong)).rounds == 4


# -- what can be seen without running ---------------------------------------------------------


def test_plans_that_differ_in_what_all_must_share() -> None:
    made = plans([Publish(), Await((1,), 1)], [Publish(), Await((0,), 1)])
    run(made)
    fails([made[0], made[1]._replace(shared=9)], "plan 1 has 9 shared units .* plan 0 has 8")
    more = made[1]._replace(publishes=2, steps=(*made[1].steps, Publish()))
    fails([made[0], more], "plan 1 .* publishes 2 times; plan 0 has .* publishes 1 times")


def test_more_or_less_published_than_said() -> None:
    fails(plans([Publish()], []), "plan 1 says that it publishes 1 times; it has 0 Publish")
    fails(plans([], [Publish()]), "plan 1 says that it publishes 0 times; it has 1 Publish")


def test_what_is_on_another_host() -> None:
    made = plans([Copy(HERE, X4), Publish()], [Publish(), Await((0,), 1)])
    elsewhere = plans([Copy(HERE, X4), Publish()], [Publish(), Copy(OUT4, HERE)])
    for programs, text in (
        (made, r"rank 1 step 1 Await\(1 of 0\): not all of them are on its host"),
        (elsewhere, r"rank 1 step 1 Copy\(.*\): SHARED\+0 is on another host"),
    ):
        with pytest.raises(PlanError, match=text):
            simulate(programs, inputs=[4, 4], outputs=[4, 4], teams=((0,), (1,)))


def test_with_frames_the_entry_of_all_is_for_the_caller() -> None:
    made = plans(
        [Publish(), Grant(1, 1), Recv(1, ())],
        [Publish(), Send(0, ())],
    )
    assert run(made).frames == (0, 1)


@pytest.mark.parametrize("count", [0, 2, -1])
def test_what_is_never_published_is_awaited(count: int) -> None:
    made = plans([Publish(), Await((1,), count)], [Publish()])
    fails(made, rf"rank 0 step 1 Await\({count} of 1\): each rank publishes 1 times")


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_there_is_not(peer: int) -> None:
    made = plans([Publish(), Await((1, peer), 1)], [Publish()])
    fails(made, rf"Await\(1 of 1, {peer}\): no such peer of rank 0 among 2 ranks")


def test_memory_of_another_rank_is_written() -> None:
    fails(plans([Copy(THERE, X4)], []), r"rank 0 step 0 Copy.* writes SHARED\+1")
    fails(plans([Reduce(THERE, (X4,))], []), r"rank 0 step 0 Reduce.* writes SHARED\+1")


def test_memory_that_there_is_not() -> None:
    fails(plans([Copy(Span(SHARED, 5, 9), X4)]), r"SHARED\+0\[5:9\] = X\[0:4\]\): SHARED\+0 has 8")
    fails(plans([Copy(OUT4, Span(SHARED + 1, 0, 4))]), r"SHARED\+1 has 0 units")


# -- what shows by running --------------------------------------------------------------------


def test_both_wait() -> None:
    made = plans([Await((1,), 1), Publish()], [Await((0,), 1), Publish()])
    fails(made, r"deadlock: rank 0 step 0 Await\(1 of 1\); rank 1 step 0 Await\(1 of 0\)")


def test_reading_what_may_not_be_there_yet() -> None:
    made = plans([Copy(HERE, X4), Publish()], [Publish(), Copy(OUT4, HERE)])
    fails(made, RACES)


def test_reading_what_was_written_after_the_publish() -> None:
    made = plans([Publish(), Copy(HERE, X4)], [Publish(), Await((0,), 1), Copy(OUT4, HERE)])
    fails(made, RACES)


def test_reading_what_nobody_wrote() -> None:
    made = plans([Publish()], [Publish(), Await((0,), 1), Copy(OUT4, HERE)])
    fails(made, r"rank 1 step 2 Copy.* reads what was not written")


def test_writing_what_others_may_still_read() -> None:
    write, read = Copy(HERE, X4), Copy(OUT4, HERE)
    reader: list[Step] = [Await((0,), 1), read, Publish(), Publish()]
    early = plans([write, Publish(), Publish(), write], reader)
    fails(early, RACES)
    run(plans([write, Publish(), Publish(), Await((1,), 1), write], reader))


def test_writing_twice_what_was_published_once() -> None:
    write = Copy(HERE, X4)
    reader: list[Step] = [Publish(), Await((0,), 1), Copy(OUT4, HERE)]
    fails(plans([write, Publish(), write], reader), RACES)
    run(plans([write, write, Publish(), Await((1,), 1)], reader))


def test_a_part_is_written_while_it_may_be_read() -> None:
    write = Copy(HERE, X4)
    later = Copy(Span(SHARED, 3, 7), X4)
    reader: list[Step] = [Publish(), Await((0,), 1), Copy(OUT4, HERE)]
    made = plans([write, Publish(), later], reader)
    where = r"SHARED\+0\[3:4\], which may still be "
    fails(made, rf"rank [01] step 2 Copy.* (reads|writes) {where}(read|written) for rank [01] step")


def test_a_third_rank_may_carry_the_news() -> None:
    made = plans(
        [Copy(HERE, X4), Publish(), Await((2,), 1)],
        [Await((0,), 1), Publish(), Await((2,), 1)],
        [Await((1,), 1), Copy(OUT4, HERE), Publish()],
    )
    for order in ORDERS:
        run(made, order=order)


def test_an_end_before_all_have_entered() -> None:
    made = plans([Publish(), Await((1,), 1)], [Publish(), Await((0,), 1)], [Publish()])
    fails(made, "rank 0 may come to its end before rank 2 has published anything")


# -- the algorithms, with one thing left out --------------------------------------------------

SIZE, LENGTH = 3, 48
BOUNDS = even_bounds(LENGTH, SIZE)

Made = Callable[[int], Plan]

PIPELINES: dict[str, Callable[[int, int], Made]] = {
    "all_reduce": lambda piece, depth: (
        lambda r: pull_slices.all_reduce(r, SIZE, LENGTH, piece, depth)
    ),
    "reduce": lambda piece, depth: lambda r: pull_slices.reduce(r, SIZE, 1, LENGTH, piece, depth),
    "reduce_scatter": lambda piece, depth: (
        lambda r: pull_slices.reduce_scatter(r, SIZE, BOUNDS, piece, depth)
    ),
    "all_gather": lambda piece, depth: (
        lambda r: pull_values.all_gather(r, SIZE, (16,) * SIZE, piece, depth)
    ),
    "exchange": lambda piece, depth: (
        lambda r: pull_values.exchange(r, SIZE, BOUNDS, BOUNDS, -(-16 // piece), piece, depth)
    ),
    "broadcast": lambda piece, depth: lambda r: pull_values.broadcast(r, SIZE, 1, 16, piece, depth),
    "scan": lambda piece, depth: lambda r: pull_scan.scan(r, SIZE, 16, False, piece, depth),
}
"""Each with 16 / piece rounds."""

WHOLES: dict[str, Made] = {
    "all_reduce": lambda r: pull_whole.all_reduce(r, SIZE, 4),
    "reduce": lambda r: pull_whole.reduce(r, SIZE, 1, 4),
    "reduce_scatter": lambda r: pull_whole.reduce_scatter(r, SIZE, BOUNDS),
    "scan": lambda r: pull_whole.scan(r, SIZE, 4, False),
    "share": lambda r: pull_whole.share(r, SIZE, 4),
}

EVERY: dict[str, Made] = {
    **{f"whole {name}": made for name, made in WHOLES.items()},
    **{
        f"{name}, depth {depth}": make(4, depth)
        for name, make in PIPELINES.items()
        for depth in (2, 3, 4, 5)
    },
}
every = pytest.mark.parametrize("name", EVERY)


def mutants(
    made: Sequence[Plan], change: Callable[[tuple[Step, ...], int], Sequence[Step] | None]
) -> Iterator[list[Plan]]:
    """`made`, with one step of one plan changed; by all steps for which `change` says how."""
    for rank, plan in enumerate(made):
        for at in range(len(plan.steps)):
            if (steps := change(plan.steps, at)) is not None:
                changed = list(made)
                changed[rank] = plan._replace(steps=tuple(steps))
                yield changed


@every
@pytest.mark.sample(13)
def test_every_wait_is_needed(name: str) -> None:
    def without(steps: tuple[Step, ...], at: int) -> Sequence[Step] | None:
        last = name.startswith(("scan", "reduce,")) and at + 1 == len(steps)
        if last or not isinstance(steps[at], Await):
            return None  # the last of these is for the ends of others: see test_pull_ends
        return (*steps[:at], *steps[at + 1 :])

    made = [EVERY[name](rank) for rank in range(SIZE)]
    run(made)
    count = 0
    for changed in mutants(made, without):
        fails(changed, f"{RACES}|{ENDS}")
        count += 1
    assert count >= SIZE


@every
@pytest.mark.sample(13)
def test_nothing_is_published_before_it_is_written(name: str) -> None:
    def too_early(steps: tuple[Step, ...], at: int) -> Sequence[Step] | None:
        before = steps[at - 1] if at else None
        if not isinstance(steps[at], Publish) or not isinstance(before, Copy | Reduce):
            return None
        if before.into.buffer < SHARED:
            return None
        return (*steps[: at - 1], steps[at], before, *steps[at + 1 :])

    made = [EVERY[name](rank) for rank in range(SIZE)]
    for changed in mutants(made, too_early):
        fails(changed, RACES)


@every
@pytest.mark.sample(7)
def test_nothing_is_written_twice(name: str) -> None:
    def once_more(steps: tuple[Step, ...], at: int) -> Sequence[Step] | None:
        step = steps[at]
        if not isinstance(step, Copy | Reduce) or step.into.buffer < SHARED:
            return None
        published = steps.index(Publish(), at) + 1
        return (*steps[:published], step, *steps[published:])

    made = [EVERY[name](rank) for rank in range(SIZE)]
    count = 0
    for changed in mutants(made, once_more):
        fails(changed, RACES)
        count += 1
    assert count


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_buffer_less_is_too_few(name: str, depth: int) -> None:
    """With as many rounds as buffers, each is used once; here the last is the first again."""
    make = PIPELINES[name](-(-16 // depth), depth)
    made = [make(rank) for rank in range(SIZE)]
    run(made)
    buffer = made[0].shared // depth

    def placed(span: Span) -> Span:
        if span.buffer < SHARED or span.start < (depth - 1) * buffer:
            return span
        shift = (depth - 1) * buffer
        return Span(span.buffer, span.start - shift, span.stop - shift)

    def moved(step: Step) -> Step:
        match step:
            case Copy(into, source):
                return Copy(placed(into), placed(source))
            case Reduce(into, operands, final):
                return Reduce(placed(into), tuple(map(placed, operands)), final)
            case _:
                return step

    fails([plan._replace(steps=tuple(map(moved, plan.steps))) for plan in made], RACES)
