"""Copies of what may have to be sent again: shared where it is the same, in memory used before."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist.transports.copies import BLOCKS, LARGE, Copies
from aiodist.transports.retransmission import RetransmissionBuffer
from aiodist.wire.frames import MAX_WHOLE


def of(copies: Copies, *parts: bytes | bytearray) -> memoryview:
    return copies.of([memoryview(part) for part in parts], sum(map(len, parts)))


def address(view: memoryview) -> int:
    where: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return where


@pytest.mark.parametrize("nbytes", [1, LARGE - 1, LARGE, MAX_WHOLE, MAX_WHOLE + 1])
def test_it_is_a_copy(nbytes: int) -> None:
    copies = Copies()
    memory = bytearray(b"x" * nbytes)
    copy = of(copies, memory)
    memory[:] = bytes(nbytes)
    assert copy == b"x" * nbytes


def test_of_several_views() -> None:
    assert of(Copies(), b"a" * LARGE, b"bc", b"d") == b"a" * LARGE + b"bcd"


def test_memory_that_nobody_has_any_more_is_used_again() -> None:
    copies = Copies()
    places = {address(of(copies, bytes([k]) * LARGE)) for k in range(9)}
    assert len(places) == 1
    held = [of(copies, b"a" * LARGE) for _ in range(BLOCKS)]
    assert {address(of(copies, b"b" * LARGE))}.isdisjoint(map(address, held))
    assert places < set(map(address, held))


def test_memory_of_which_somebody_has_a_part_is_not_written() -> None:
    copies = Copies()
    part = of(copies, b"a" * LARGE)[5:9]
    others = [of(copies, bytes([k]) * LARGE) for k in range(2 * BLOCKS)]
    assert bytes(part) == b"aaaa"
    assert others == [bytes([k]) * LARGE for k in range(2 * BLOCKS)]


def test_what_is_the_same_is_copied_once() -> None:
    copies = Copies()
    memory = bytearray(b"a" * LARGE)
    copies.begin()
    whole, again = of(copies, memory), of(copies, memory)
    part = copies.of([memoryview(memory)[:9]], 9)
    copies.end()
    assert whole is again
    assert part == b"a" * 9


def test_what_was_written_since_is_copied_anew() -> None:
    copies = Copies()
    memory = bytearray(b"a" * LARGE)
    for letter in (b"b", b"c"):
        copies.begin()
        before = of(copies, memory)
        copies.end()
        memory[:] = letter * LARGE
        assert of(copies, memory) == letter * LARGE
        assert before != memory


def test_links_that_have_sent_the_same_share_a_copy() -> None:
    copies = Copies()
    memory = bytearray(b"a" * MAX_WHOLE)
    links = [RetransmissionBuffer(copies) for _ in range(3)]
    copies.begin()
    for kept in links:
        kept.lend(b"head", (memoryview(memory),), len(memory), "token")
        kept.settle("token", 1)
    copies.end()
    memory[:] = bytes(len(memory))
    sent = [frame.views[0] for kept in links for frame in kept.again()]
    assert sent[0] == b"a" * MAX_WHOLE
    assert all(view.obj is sent[0].obj for view in sent)
