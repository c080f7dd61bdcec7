"""The simulator finds every kind of mistake: plans made wrong by hand, and right ones mutated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

import pytest

from aiodist.schedules import chain, recursive_doubling, reduce, reduce_scatter
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.testing.plan_simulator import (
    Order,
    PlanError,
    Reduced,
    SimulationResult,
    Unit,
    contributors,
    simulate,
)

ORDERS: list[Order] = [lambda n: 0, lambda n: n - 1, *(Random(s).randrange for s in range(3))]

X4, OUT4, TMP4 = Span(X, 0, 4), Span(OUT, 0, 4), Span(TMP, 0, 4)


def plans(*programs: Sequence[Step], eager: bool = False, scratch: int = 8) -> list[Plan]:
    size = len(programs)
    return [
        Plan("made by hand", rank, size, tuple(steps), eager, scratch)
        for rank, steps in enumerate(programs)
    ]


def run(
    made: Sequence[Plan],
    *,
    length: int = 8,
    in_place: Collection[int] = (),
    segment: int | None = None,
    order: Order = ORDERS[0],
) -> SimulationResult:
    lengths = [length] * len(made)
    return simulate(
        made, inputs=lengths, outputs=lengths, in_place=in_place, segment=segment, order=order
    )


def fails(
    made: Sequence[Plan],
    text: str,
    *,
    in_place: Collection[int] = (),
    segment: int | None = None,
    length: int = 8,
) -> None:
    """In whatever order events come, `made` is refused with `text`."""
    for order in ORDERS:
        with pytest.raises(PlanError, match=text):
            run(made, in_place=in_place, segment=segment, length=length, order=order)


# -- a right plan -----------------------------------------------------------------------------


def test_a_right_plan() -> None:
    made = plans(
        [Grant(1, 1), Copy(TMP4, X4), Recv(1, (OUT4,)), Reduce(OUT4, (TMP4, OUT4))],
        [Send(0, (X4,))],
    )
    for order in ORDERS:
        outcome = run(made, order=order)
        assert outcome.out[0][0] == Reduced((Unit(0, X, 0), Unit(1, X, 0)), final=True)
        assert contributors(outcome.out[0][3]) == (Unit(0, X, 3), Unit(1, X, 3))
        assert outcome.out[0][4:] == tuple(Unit(0, OUT, at) for at in range(4, 8))
        assert outcome[1:] == ((0, 1), (0, 4), (1, 0), 1)


def test_the_order_is_asked_with_the_number_of_choices() -> None:
    asked: list[int] = []

    def order(choices: int) -> int:
        asked.append(choices)
        return 0

    # Two sends, then both frames are under way; each that arrives lets a rank go on.
    run(plans([Send(1, (X4,)), Recv(1, (OUT4,))], [Send(0, (X4,)), Recv(0, (OUT4,))], eager=True),
        order=order)  # fmt: skip
    assert asked == [2, 2, 2, 2, 1, 1]


# -- what is seen without running -------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (plans([])[0]._replace(rank=1), "plan 0 of 1 says rank 1 of 1"),
        (plans([])[0]._replace(size=2), "plan 0 of 1 says rank 0 of 2"),
    ],
)
def test_plans_of_someone_else(made: Plan, text: str) -> None:
    fails([made], text)


def test_eager_and_bulk_do_not_mix() -> None:
    first, second = plans([], [])
    fails([first, second._replace(eager=True)], "plan 1 .* eager=True; plan 0 says eager=False")


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Copy(Span(OUT, 5, 9), X4), r"step 0 Copy\(OUT\[5:9\] = X\[0:4\]\): OUT has 8 units"),
        (Copy(OUT4, Span(X, 6, 10)), "X has 8 units"),
        (Copy(Span(TMP, 6, 10), X4), "TMP has 8 units"),
        (Copy(OUT4, Span(X, -1, 3)), "X has 8 units"),
        (Copy(OUT4, Span(X, 3, 2)), "X has 8 units"),
        (Copy(X4, OUT4), "rank 0 step 0 .* writes X"),
        (Copy(OUT4, Span(X, 0, 3)), "the lengths differ"),
        (Reduce(OUT4, (X4, Span(X, 0, 5))), "the lengths differ"),
        (Reduce(OUT4, ()), "has no operands"),
        (Copy(OUT4, Span(OUT, 1, 5)), "moves units within one memory"),
        (Send(0, (X4,)), "no such peer of rank 0 among 2 ranks"),
        (Recv(2, (OUT4,)), r"Recv\(from 2: OUT\[0:4\]\): no such peer"),
        (Grant(-1, 1), r"Grant\(1 to -1\): no such peer"),
        (Grant(1, 0), "others at least one frame"),
        (Send(1, (X4, Span(X, 4, 7))), "a frame of 7 units, over the segment of 6"),
        (Recv(1, (OUT4, Span(OUT, 3, 4))), "its spans overlap"),
        (Send(1, (X4,)), "1 frames are sent from rank 0 to rank 1, 0 received"),
        (Recv(1, (OUT4,)), "0 frames are sent from rank 1 to rank 0, 1 received"),
        (Grant(1, 2), "0 frames are sent from rank 1 to rank 0, 2 granted"),
    ],
)
def test_a_step_that_cannot_be_right(step: Step, text: str) -> None:
    fails(plans([step], []), text, segment=6)


def test_moves_are_seen_through_one_memory_under_two_names() -> None:
    made = plans([Copy(Span(OUT, 1, 5), X4)])
    run(made)
    fails(made, "moves units within one memory", in_place=[0])


def test_an_eager_plan_grants_nothing() -> None:
    fails(plans([Grant(1, 1)], [], eager=True), "an eager plan grants nothing")


def test_both_ends_of_a_slot_have_one_length() -> None:
    made = plans([Grant(1, 1), Recv(1, (OUT4,))], [Send(0, (Span(X, 0, 3),))])
    fails(made, "slot 0 from rank 1 to rank 0: 3 units are sent, 4 received")


def test_a_frame_that_was_never_granted() -> None:
    fails(plans([Recv(1, (OUT4,))], [Send(0, (X4,))]), "1 frames are sent .*, 0 granted")


# -- deadlocks --------------------------------------------------------------------------------


def test_both_receive_first() -> None:
    made = plans([Recv(1, (OUT4,)), Send(1, (X4,))], [Recv(0, (OUT4,)), Send(0, (X4,))], eager=True)
    fails(made, r"deadlock: rank 0 step 0 Recv\(from 1.*; rank 1 step 0 Recv\(from 0")


def test_grants_that_stand_behind_sends() -> None:
    made = plans(
        [Send(1, (X4,)), Grant(1, 1), Recv(1, (OUT4,))],
        [Send(0, (X4,)), Grant(0, 1), Recv(0, (OUT4,))],
    )
    fails(made, r"deadlock: rank 0 step 0 Send\(to 1: X\[0:4\]\); rank 1 step 0 Send")


# -- races ------------------------------------------------------------------------------------

NOTHING_SAYS = "nothing that happened before says that this is over"


def test_what_was_sent_is_overwritten() -> None:
    made = plans(
        [Send(1, (OUT4,)), Copy(OUT4, X4)], [Recv(0, (OUT4,))], eager=True
    )  # fmt: skip
    fails(
        made, r"rank 0 step 1 Copy.* writes OUT\[0:4\], which may still be read for rank 0 step 0 "
    )
    fails(made, NOTHING_SAYS)


def test_what_was_sent_in_place_is_overwritten() -> None:
    exchange: list[list[Step]] = [
        [Send(1 - rank, (X4,)), Recv(1 - rank, (TMP4,)), Reduce(OUT4, (X4, TMP4))]
        for rank in range(2)
    ]
    made = plans(*exchange, eager=True)
    run(made)
    fails(made, r"Reduce\(OUT\[0:4\] = X\[0:4\], TMP\[0:4\]\) writes X\[0:4\]", in_place=[0, 1])


@pytest.mark.parametrize("answer", [(), (Span(TMP, 4, 8),)])
def test_an_answer_says_that_a_frame_has_arrived(answer: tuple[Span, ...]) -> None:
    source = tuple(Span(X, 0, span.length) for span in answer)
    right = plans(
        [Send(1, (OUT4,)), Recv(1, answer), Copy(OUT4, X4)],
        [Recv(0, (OUT4,)), Send(0, source)],
        eager=True,
    )
    for order in ORDERS:
        run(right, order=order)
    # An answer that may be given before the frame is there says nothing.
    wrong = plans(right[0].steps, right[1].steps[::-1], eager=True)
    fails(wrong, NOTHING_SAYS)


def test_a_grant_says_that_a_frame_has_arrived() -> None:
    sends: list[Step] = [Send(1, (OUT4,)), Send(1, (Span(OUT, 4, 8),)), Copy(OUT4, X4)]
    recvs: list[Step] = [Recv(0, (OUT4,)), Recv(0, (Span(OUT, 4, 8),))]
    made = plans(sends, [Grant(0, 1), recvs[0], Grant(0, 1), recvs[1]])
    for order in ORDERS:
        run([plan._replace(pushes=1) for plan in made], order=order)
    # The second frame may leave before its grant.
    fails(made, NOTHING_SAYS)
    made = [plan._replace(pushes=0) for plan in plans(sends, [Grant(0, 2), *recvs])]
    fails(made, NOTHING_SAYS)
    # It says so to the sender alone once a send has needed it.
    made = plans([sends[0], sends[2], sends[1]], [Grant(0, 1), recvs[0], Grant(0, 1), recvs[1]])
    fails([plan._replace(pushes=0) for plan in made], NOTHING_SAYS)


def test_a_third_rank_may_carry_the_news() -> None:
    unit = (Span(X, 0, 1),)
    made = plans(
        [Send(1, (OUT4,)), Recv(2, (Span(TMP, 0, 1),)), Copy(OUT4, X4)],
        [Recv(0, (OUT4,)), Send(2, unit)],
        [Recv(1, (Span(TMP, 0, 1),)), Send(0, unit)],
        eager=True,
    )
    for order in ORDERS:
        run(made, order=order)


def test_memory_that_was_granted_is_written() -> None:
    made = plans([Grant(1, 1), Copy(OUT4, X4), Recv(1, (OUT4,))], [Send(0, (X4,))])
    fails(
        made, r"Recv\(from 1: OUT\[0:4\]\) writes OUT.*may still be written for rank 0 step 1 Copy"
    )
    run(plans([Copy(OUT4, X4), Grant(1, 1), Recv(1, (OUT4,))], [Send(0, (X4,))]))


def test_memory_that_was_granted_is_read() -> None:
    grant, keep, take = Grant(1, 1), Copy(TMP4, OUT4), Recv(1, (OUT4,))
    fails(
        plans([grant, keep, take], [Send(0, (X4,))]),
        r"step 2 Recv.* writes OUT\[0:4\], which may still be read for rank 0 step 1 Copy",
    )
    run(plans([keep, grant, take], [Send(0, (X4,))]))


def test_a_grant_too_many_for_one_place() -> None:
    take, keep = Recv(1, (TMP4,)), Copy(OUT4, TMP4)
    source = [Send(0, (X4,)), Send(0, (X4,))]
    fails(plans([Grant(1, 2), take, keep, take], source), NOTHING_SAYS)
    run(plans([Grant(1, 1), take, keep, Grant(1, 1), take], source))


def test_a_frame_may_come_into_memory_of_which_a_send_is_under_way() -> None:
    made = plans(
        [Grant(2, 1), Send(1, (OUT4,)), Recv(2, (OUT4,))],
        [Grant(0, 1), Recv(0, (OUT4,))],
        [Send(0, (X4,))],
    )
    fails(made, r"Recv\(from 2.* may still be read for rank 0 step 1 Send\(to 1")


def test_two_frames_come_into_one_memory() -> None:
    made = plans(
        [Grant(1, 1), Grant(2, 1), Recv(1, (OUT4,)), Recv(2, (Span(OUT, 3, 7),))],
        [Send(0, (X4,))],
        [Send(0, (X4,))],
    )
    fails(made, r"writes OUT\[3:4\], which may still be written for rank 0 step 2 ")


def test_eager_frames_may_come_at_once_too() -> None:
    made = plans([Copy(OUT4, X4), Recv(1, (OUT4,))], [Send(0, (X4,))], eager=True)
    fails(made, NOTHING_SAYS)


# -- wrong use of data ------------------------------------------------------------------------


def test_scratch_that_nobody_wrote() -> None:
    fails(plans([Copy(OUT4, TMP4)]), r"rank 0 step 0 Copy.* reads what was not written")
    made = plans([Send(1, (TMP4,))], [Grant(0, 1), Recv(0, (OUT4,))])
    fails(made, r"rank 0 step 0 Send.* reads what was not written")


def test_a_final_result_is_reduced_again() -> None:
    twice: list[Step] = [Reduce(TMP4, (X4,)), Reduce(OUT4, (TMP4, X4))]
    fails(plans(twice), "rank 0 step 1 .* reduces what was reduced finally")
    run(plans([Reduce(TMP4, (X4,), final=False), twice[1]]))


def test_the_first_problem_is_told() -> None:
    made = plans([Copy(TMP4, Span(TMP, 4, 8)), Reduce(OUT4, (TMP4,)), Reduce(OUT4, (OUT4,))])
    fails(made, "step 0 Copy.* reads what was not written")


# -- the algorithms, with one thing left out --------------------------------------------------


def mutated(made: Sequence[Plan], change: Callable[[Plan], list[Step]]) -> list[Plan]:
    changed = [plan._replace(steps=tuple(change(plan))) for plan in made]
    assert changed != made
    return changed


def test_recursive_doubling_needs_its_first_copy() -> None:
    def from_the_input(plan: Plan) -> list[Step]:
        def place(span: Span) -> Span:
            return Span(X, 0, 1) if span == Span(TMP, 0, 1) else span

        steps: list[Step] = []
        for step in plan.steps[1:]:
            if isinstance(step, Send):
                step = step._replace(spans=tuple(map(place, step.spans)))
            elif isinstance(step, Reduce):
                step = step._replace(operands=tuple(map(place, step.operands)))
            steps.append(step)
        return steps

    made = mutated([recursive_doubling.all_reduce(rank, 4) for rank in range(4)], from_the_input)
    run(made)
    fails(made, NOTHING_SAYS, in_place=range(4))


def test_large_wholes_need_the_empty_frames() -> None:
    def without_answers(plan: Plan) -> list[Step]:
        return [
            Grant(step.peer, step.count - 1) if isinstance(step, Grant) else step
            for step in plan.steps
            if not (isinstance(step, Send | Recv) and step.spans == ())
        ]

    made = [recursive_doubling.all_reduce_whole(rank, 4, 8, 3) for rank in range(4)]
    run(made)
    fails(mutated(made, without_answers), NOTHING_SAYS)


def all_granted_at_once(plan: Plan) -> list[Step]:
    """The steps of `plan` with no flow control: it grants everything at its start."""
    grants: list[Step] = [step for step in plan.steps if isinstance(step, Grant)]
    return grants + [step for step in plan.steps if not isinstance(step, Grant)]


def test_slices_need_their_window() -> None:
    # Rank 2 has nothing to reduce, so nothing but grants keeps it from running ahead.
    made = [reduce_scatter.direct(rank, 3, (0, 9, 18, 18), 1, 2) for rank in range(3)]
    run(made, length=18)
    fails(mutated(made, all_granted_at_once), NOTHING_SAYS, length=18)


def test_scans_need_their_window() -> None:
    made = [chain.scan(rank, 3, 8, 1, False, window=2) for rank in range(3)]
    run(made)
    fails(mutated(made, all_granted_at_once), NOTHING_SAYS)


def with_a_ring(plan: Plan, first: int, slots: int) -> list[Step]:
    """The steps of `plan`, with the scratch from `first` on used in turn as `slots` units."""
    steps: list[Step] = []
    writes = 0

    def place(span: Span) -> Span:
        if span.buffer != TMP or span.start < first:
            return span
        at = first + (writes - 1) % slots
        return Span(TMP, at, at + 1)

    for step in plan.steps:
        if isinstance(step, Reduce | Copy):
            writes += step.into.buffer == TMP and step.into.start >= first
            step = step._replace(into=place(step.into))
        if isinstance(step, Reduce):
            step = step._replace(operands=tuple(map(place, step.operands)))
        elif isinstance(step, Send):
            step = step._replace(spans=tuple(map(place, step.spans)))
        steps.append(step)
    return steps


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_results_on_their_way_to_the_root_need_their_ring(window: int) -> None:
    size, length = 3, 90
    first = (size - 1) * window
    made = [reduce.scatter_gather(rank, size, 0, length, 1, window) for rank in range(size)]
    ring = made[1].scratch - first
    assert ring == 2 * max(1, window // 2)
    run(made, length=length)
    smaller = mutated(made, lambda plan: with_a_ring(plan, first, ring - 1))
    fails(smaller, NOTHING_SAYS, length=length)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_prefixes_on_their_way_need_their_ring(window: int) -> None:
    made = [chain.scan(rank, 3, 30, 1, False, window=window) for rank in range(3)]
    run(made, length=30)

    def smaller(plan: Plan) -> list[Step]:
        return with_a_ring(plan, window if plan.rank else 0, window)

    fails(mutated(made, smaller), NOTHING_SAYS, length=30)
