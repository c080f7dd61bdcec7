"""The pure parts: numbered lines, pieces, credit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.errors import ProtocolError
from aiodist.p2p import credit
from aiodist.p2p.credit import ReceiverCredit, SenderCredit, cost
from aiodist.p2p.mailbox import NumberedQueue
from aiodist.p2p.pieces import Pieces, cut


@pytest.mark.parametrize("way", [0, 1, credit.WINDOW, 10**6, 10**7, 10**12])
def test_the_limits_are_related_as_the_proof_needs_them(way: int) -> None:
    window, total, ahead = credit.limits_for(way)
    assert window - credit.SHARED_BATCH >= credit.MOST
    assert total - credit.SHARED_BATCH >= credit.MOST
    assert credit.BATCH <= credit.SHARED_BATCH
    assert credit.WINDOW <= window <= credit.FAR_WINDOW and credit.TOTAL <= total <= 16 << 20
    assert window >= min(way, credit.FAR_WINDOW)  # the way is filled by one tag
    assert total >= 2 * window  # and one that nobody receives leaves room for others
    assert 0 <= ahead < window and bool(ahead) == (way > 1)


def test_what_far_ranks_send_is_limited_as_well() -> None:
    limits = credit.limits_for(credit.FAR_WINDOW)
    books, other = SenderCredit(limits), ReceiverCredit(limits)
    price = credit.WINDOW
    for _ in range(credit.FAR_WINDOW // price):
        assert books.pay("a", price)
        other.charge("a", price, wanted=False)
    assert not books.pay("a", price) and books.admit("a", price) is None
    with pytest.raises(ProtocolError, match=f"beyond the credit of {credit.FAR_WINDOW}"):
        other.charge("a", price, wanted=False)
    for _ in range(credit.FAR_WINDOW // price):
        assert books.pay("b", price)
        other.charge("b", price, wanted=False)
    assert other.tight and books.admit("c", price) is None
    with pytest.raises(ProtocolError, match="beyond the total"):
        other.charge("c", price, wanted=False)


@given(st.lists(st.integers(0, 20), unique=True))
def test_a_line_is_always_in_order(numbers: list[int]) -> None:
    line: NumberedQueue[int] = NumberedQueue()
    for number in numbers:
        line.insert(number, number)
    assert list(line) == sorted(numbers)
    if numbers:
        assert line.head == min(numbers)


def views(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(16_384, 16_500)), max_size=8)


@given(sizes, sizes, st.integers(100, 20_000), st.integers(0, 10))
def test_pieces_land_whatever_the_buffers_are(
    source: list[int], target: list[int], most: int, move: int
) -> None:
    total = sum(source)
    text = (bytes(range(251)) * (total // 251 + 1))[:total]
    buffers, at = [], 0
    for size in source:
        buffers.append(memoryview(text)[at : at + size])
        at += size
    pieces = [b"".join(piece) for piece in cut(buffers, most)]
    assert b"".join(pieces) == text
    assert all(0 < len(piece) <= most for piece in pieces)
    # The receiver's buffers may be others, of the same size in all.
    rest = total
    into = []
    for size in target:
        into.append(min(size, rest))
        rest -= into[-1]
    memory = views([*into, rest])
    filled = []
    landing = Pieces(memory, lambda: filled.append(landing.left))
    for index, piece in enumerate(pieces):
        landing.place(len(piece))
        half = len(piece) // 2
        landing.memory[:half] = piece[:half]
        if index == move:  # amid the piece, as when a receive is cancelled
            before = [bytes(view) for view in memory]
            old_memory, memory = memory, views(source)
            landing.move(memory)
        landing.memory[half:] = piece[half:]
        assert not filled
        landing.landed()
        if index >= move:
            assert [bytes(view) for view in old_memory] == before
    assert landing.left == 0
    assert filled == ([0] if pieces else [])
    assert b"".join(memory) == text


def test_the_next_message_of_a_stalled_tag_goes_to_the_end_of_the_line() -> None:
    books = SenderCredit()
    price = cost(0, 60_000)
    tag = 0
    while books.admit(tag, price) is not None:
        tag += 1
    assert books.first_stalled() == tag
    assert books.admit("late", cost("late", 0)) is None, "it would slip past"
    books.refund(0, price)
    assert books.admit(tag, price) is False
    assert books.first_stalled() == "late"


def test_a_tag_that_its_window_holds_back_does_not_stall_others() -> None:
    """A tag that waited for the total has its first message cancelled; the next is too large for
    the window: the tags behind it come first."""
    books = SenderCredit()
    for tag in (0, 1):
        while books.admit(tag, cost(tag, 60_000)) is not None:
            pass
    while books.admit(f"fill {tag}", cost("fill 10", 60_000)) is not None:
        tag += 1
    for waiting in (0, "behind"):
        assert books.admit(waiting, 1000) is None
    books.forget(f"fill {tag}")
    books.refund(1, cost(1, 60_000))
    assert books.first_stalled() == 0
    assert books.admit(0, cost(0, 60_000)) is None
    assert books.first_stalled() == "behind"
    assert books.admit("behind", 1000) is False


def test_a_want_is_used_once() -> None:
    books = SenderCredit()
    books.want("x")
    assert books.admit("y", 1000) is False
    assert books.admit("x", 1000) is True
    assert books.admit("x", 1000) is False
    assert not books.unwant("x")


def test_wants_are_told_only_where_the_total_may_hold_back() -> None:
    books = ReceiverCredit()
    assert not books.ask("x")
    for tag in range(66):
        books.charge(tag, cost(tag, 62_500), wanted=False)
    assert books.tight
    assert books.ask("x") and not books.ask("x")
    assert books.take_back("x") and not books.take_back("x")
    books.answered("x", denied=True)
    assert books.ask("x")


def test_a_crowd_of_wants_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "MAX_WANTS", 2)
    monkeypatch.setattr(credit, "TOTAL", 0)
    monkeypatch.setattr(credit, "MOST", 1)
    books = ReceiverCredit()
    assert books.ask("a") and books.ask("b") and not books.ask("c")
    books.take_back("a")
    books.answered("a", denied=True)
    assert books.crowded and books.ask("c")
