"""Boards, one after the other and word by word (see `processors`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from processors import Path, machine_of

from aiodist.shared_memory import board as board_module
from aiodist.shared_memory.board import (
    A_PHASE,
    AN_OPERATION,
    AREAS,
    BERTH,
    BERTHS,
    LANE,
    MAX_PHASES,
    ON_DEVICE,
    PAGE,
    POSTS,
    SEGMENT,
    Board,
    digest_of,
    stamp_of,
)

# -- one board after the other --------------------------------------------------------------------


def boards(size: int) -> list[Board]:
    memories = [memoryview(bytearray(LANE)) for _ in range(size)]
    return [
        Board(
            rank, memories[rank], {r: m.toreadonly() for r, m in enumerate(memories) if r != rank}
        )
        for rank in range(size)
    ]


def test_areas_do_not_overlap_and_fill_the_segment():
    at = PAGE + PAGE // 2
    for start, size in AREAS:
        assert start == at
        assert size % PAGE == 0
        at += size
    assert POSTS[0] == at + PAGE // 2
    assert sum(POSTS) == LANE
    assert LANE % PAGE == BERTH % PAGE == 0
    assert LANE + BERTHS * BERTH == SEGMENT


@pytest.mark.parametrize("array", [16, 64], ids=["numpy", "torch"])  # in its page
def test_no_large_array_is_copied_to_just_behind_its_data_in_the_page(array: int):
    for (start, _), words in itertools.product(AREAS, range(1024)):  # bytes before the data
        behind = (start + words - array) % PAGE
        assert 16 <= behind <= PAGE - 16


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


def test_who_is_missing_on_this_core(monkeypatch: pytest.MonkeyPatch) -> None:
    on = {0: 1, 1: 0, 2: 1}
    every = one, two, three = boards(3)

    def says(board: Board, stamp: int = 5) -> bool:
        monkeypatch.setattr(board_module, "core", lambda: on[board.rank])
        return board.apart([rank for rank in on if rank != board.rank], stamp)

    assert not says(one)  # nobody else has said where it is
    assert not says(two)
    assert not says(three)  # rank 0 is on this core
    assert says(two)  # alone on its core
    assert not says(one)
    three.reach(5)
    assert says(one)  # whoever is missing is on the other core
    on[0] = 0
    assert not says(one)
    assert not says(two)
    for board in every:
        board.reach(5)
    assert says(one)
    on[0] = -1
    assert not says(one, 6)  # the system does not say
    assert not says(two, 6)


def test_what_was_called():
    one, two, three = boards(3)
    for seq, texts in enumerate([("a", "a", "a"), ("b", "b", "c"), ("a", "d", "a")]):
        for board, text in zip((one, two, three), texts, strict=True):
            board.announce(seq, digest_of(text.encode()), text.encode())
    # The last two operations are told apart by parity; one before is gone.
    assert one.agree(1, digest_of(b"b")) is False
    for board in (one, two, three):
        board.reach(stamp_of(1 if board is two else 2))
    assert one.different(1, digest_of(b"b")) == {2: b"c"}
    assert one.different(2, digest_of(b"a")) == {}  # rank 1 has not entered it
    two.reach(stamp_of(2))
    assert one.different(2, digest_of(b"a")) == {1: b"d"}
    assert two.different(2, digest_of(b"d")) == {0: b"a", 2: b"a"}


def test_long_texts_are_cut():
    one, two = boards(2)
    text = bytes(range(256)) * 20
    one.announce(5, digest_of(text), text)
    one.announce(6, digest_of(b"next"), b"next")
    one.reach(stamp_of(6))
    (shown,) = two.different(5, 1).values()
    assert len(shown) > 900
    assert text.startswith(shown)
    assert two.different(6, 1) == {0: b"next"}


def test_a_hostile_length_of_a_text_reads_no_further():
    one, two = boards(2)
    one.announce(0, 1, b"x")
    one.own[1024 // 8] = 1 << 60
    one.reach(stamp_of(0))
    (shown,) = two.different(0, 2).values()
    assert len(shown) < 1024


def test_who_passed_an_operation_over_called_nothing_else():
    one, two = boards(2)
    one.announce(4, 1, b"four")
    one.reach(stamp_of(6))
    assert two.different(6, 1) == {}
    assert two.different(6, 2) == {0: b"four"}
    one.abort(6)
    assert two.different(6, 2) == {}
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
    memories = [bytearray(LANE) for _ in range(2)]
    board = Board(0, memoryview(memories[0]), {1: memoryview(memories[1]).toreadonly()})
    board.announce(0, 1, b"x")
    board.reach(stamp_of(0))
    board.close()
    for memory in memories:
        memory.clear()  # raises BufferError if it is looked at
    board.awake()
    assert board.reach(stamp_of(1)) == []


# -- word by word, see `processors` ----------------------------------------------------------------


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


@pytest.mark.parametrize("publishers", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_nobody_dozes_on(publishers: int):
    rings = set()
    for seed in range(400):
        lost, rung = slept_on(random.Random(seed), publishers)
        assert not lost, seed
        rings.add(rung)
    assert {0, 1} <= rings


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
