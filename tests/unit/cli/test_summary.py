"""Which rank is to blame, and what is said about it."""

from __future__ import annotations

import pytest

from aiodist_cli.summary import Exit, cause, distinct, headline, last_words

LOST = (b"Traceback (most recent call last):", b"aiodist.errors.PeerLostError: rank 1 died [x]")
OWN = (b"Traceback (most recent call last):", b"ValueError: no")
GROUPED = (
    b"  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
    b"  +-+---------------- 1 ----------------",
    b"    | aiodist.errors.CollectiveAbortedError: rank 1 gave up",
    b"    +------------------------------------",
)


def test_nobody_failed() -> None:
    assert cause([]) is None
    assert cause([Exit(0, 0), Exit(1, 0, LOST)]) is None


def test_first_failure_counts() -> None:
    assert cause([Exit(3, 0), Exit(2, 1, OWN), Exit(0, 7, OWN)]) == Exit(2, 1, OWN)


WRAPPED = (
    *(*LOST, b"", b"The above exception was the direct cause of the following exception:", b""),
    *(b"Traceback (most recent call last):", b"  File", b"RuntimeError: the step failed"),
)


WRAPPED_IN_A_GROUP = (
    b"  + Exception Group Traceback (most recent call last):",
    b"  |   File",
    b"  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
    b"  +-+---------------- 1 ----------------",
    *(b"    | " + line for line in WRAPPED),
    b"    +------------------------------------",
)
LOGGED = (b"ERROR: it went on", *WRAPPED)


@pytest.mark.parametrize("tail", [LOST, GROUPED, (*LOST, b""), WRAPPED, WRAPPED_IN_A_GROUP])
def test_consequences_come_last(tail: tuple[bytes, ...]) -> None:
    victim = Exit(0, 1, tail)
    assert victim.is_consequence
    assert cause([victim, Exit(1, 1, OWN)]) == Exit(1, 1, OWN)
    assert cause([victim]) == victim


LONG = (
    *(b"Traceback (most recent call last):", b"  File", b"    await group.barrier()"),
    b"aiodist.errors.PeerLostError: rank 1 is lost: RuntimeError: CUDA error",
    b"For debugging consider passing CUDA_LAUNCH_BLOCKING=1 [group 'world']",
)


IGNORED = (
    *(b"Exception ignored in: <function Transport.__del__>", b"Traceback (most recent call last):"),
    *(b"  File", b"RuntimeError: Event loop is closed"),
)


LOST_LEAF = b"aiodist.errors.PeerLostError: rank 1 is lost"
NEVER_RAISED = (
    b"  + Exception Group Traceback (most recent call last):",
    *(b"  |   File", b"  | ExceptionGroup: several (2 sub-exceptions)"),
    b"  +-+---------------- 1 ----------------",
    b"    | ExceptionGroup: one (1 sub-exception)",
    b"    +-+---------------- 1 ----------------",
    b"      | ValueError: no",
    b"      +------------------------------------",
    b"    +---------------- 2 ----------------",
    b"    | " + LOST_LEAF,
    b"    +------------------------------------",
)


@pytest.mark.parametrize("more", [(), (b"a note",), (b"", b"wandb: synced 3 files"), IGNORED])
@pytest.mark.parametrize("raised", [LONG, LOST, WRAPPED, WRAPPED_IN_A_GROUP, NEVER_RAISED])
def test_lines_after_that_of_the_exception_hide_no_consequence(
    raised: tuple[bytes, ...], more: tuple[bytes, ...]
) -> None:
    victim = Exit(0, 1, (b"before", *raised, *more), (*raised, *more))
    assert victim.is_consequence
    assert victim.error in (raised[-1], LONG[-2], b"RuntimeError: the step failed", LOST_LEAF)
    words = [victim.error, *raised[-1:] * (raised is LONG), *filter(None, more)]
    assert victim.unsaid == words
    raised = (*raised, *more, *OWN, *more)
    assert not Exit(0, 1, raised, raised).is_consequence


@pytest.mark.parametrize("last", [(), IGNORED])
@pytest.mark.parametrize("log", [b"ERROR:root:it goes on", b"12:03 | WARNING | it goes on"])
@pytest.mark.parametrize("raised", [LONG, LOST, WRAPPED, WRAPPED_IN_A_GROUP])
def test_an_exception_that_a_log_has_is_not_that_which_ended_the_rank(
    raised: tuple[bytes, ...], log: bytes, last: tuple[bytes, ...]
) -> None:
    lines = (*raised, b"no checkpoint: give up", *last)
    assert Exit(0, 1, (log, *lines), lines).error == (b"no checkpoint: give up", *last)[-1]
    assert not Exit(0, 1, (log, *lines), lines).is_consequence
    lines = (*raised, *LOST, b"a note")
    assert Exit(0, 1, (log, *lines), lines).error == LOST[-1]


@pytest.mark.parametrize(
    "exit",
    [
        Exit(0, 1),
        Exit(0, 1, OWN),
        Exit(0, -9, LOST),  # killed, whatever it said before
        Exit(0, 1, (*LOST, b"ValueError: while handling that")),
        Exit(0, 1, (*LOGGED, *OWN)),
        Exit(0, 1, (*LOGGED, b"the program's last words")),
        Exit(0, 1, (b"aiodist.errors.CollectiveTimeoutError: rank 2 did not come",)),
        Exit(0, 1, (b"aiodist.errors.PeerLostErrorOfMine: x",)),
    ],
)
def test_causes(exit: Exit) -> None:
    assert not exit.is_consequence


def test_what_several_ranks_have_said_is_told_once() -> None:
    other = (b"Traceback (most recent call last):", b"ValueError: else")
    said = [(0, OWN), (3, other), (2, OWN), (4, other), (5, LOST)]
    assert distinct(OWN, said) == ([0, 2], [(other, [3, 4]), (LOST, [5])])
    assert distinct((), said) == ([], [(OWN, [0, 2]), (other, [3, 4]), (LOST, [5])])


def test_single_lines_are_told_each() -> None:
    assert distinct([b"no"], [(1, [b"no"]), (2, [b"no"])]) == ([], [([b"no"], [1]), ([b"no"], [2])])


def test_texts() -> None:
    failed = Exit(2, -11, (b"Fatal",))
    assert headline(failed, 4) == "rank 2 of 4 failed with signal SIGSEGV"
    assert headline(Exit(0, 3), 1) == "rank 0 of 1 failed with exit code 3"
    assert last_words("SIGINT", [1, 0]) == "aiodist run: SIGINT; ranks 0 and 1 stopped"
    assert last_words("x", [], failed) == "aiodist run: x; the end of its stderr:"
    assert last_words("x", [3], Exit(0, 1)) == (
        "aiodist run: x; rank 3 stopped; it wrote nothing to stderr"
    )
