"""Tracebacks are held back, whole, and shown without the frames of the event loop."""

from __future__ import annotations

import asyncio.runners
import os

import pytest

from aiodist_cli.tracebacks import MOST, PATIENCE, Withheld, without_the_loop

RUNNERS = os.fsencode(asyncio.runners.__file__)
HEADER = b"Traceback (most recent call last):"
TRACEBACK = [
    HEADER,
    b'  File "/home/me/train.py", line 11, in <module>',
    b"    asyncio.run(main())",
    b'  File "%s", line 190, in run' % RUNNERS,
    b"    return runner.run(main)",
    b"           ^^^^^^^^^^^^^^^^",
    b'  File "/opt/other/lib/python3.14t/asyncio/runners.py", line 118, in run',
    b'  File "/opt/other/lib/python3/dist-packages/uvloop/__init__.py", line 92, in run',
    b'  File "uvloop/loop.pyx", line 1517, in uvloop.loop.Loop.run_until_complete',
    b'  File "/home/me/asyncio/train.py", line 10, in main',
    b"    raise ValueError",
    b"ValueError: no",
]
GROUPED = [
    b"  + Exception Group Traceback (most recent call last):",
    b'  |   File "%s", line 190, in run' % RUNNERS,
    b"  |     return runner.run(main)",
    b'  |   File "/home/me/train.py", line 3, in main',
    b"  |     async with asyncio.TaskGroup():",
    b"  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
    b"  +-+---------------- 1 ----------------",
    b"    | Traceback (most recent call last):",
    b'    |   File "%s", line 3, in step' % RUNNERS,
    b"    |     raise",
    b"    | ValueError: no",
    b"    +------------------------------------",
]


@pytest.mark.parametrize("begin", [TRACEBACK, GROUPED])
def test_what_follows_a_header_is_held_back(begin: list[bytes]) -> None:
    withheld = Withheld()
    assert withheld.feed([b"loss 1.0", b"loss 0.9"], 0.0) == [b"loss 1.0", b"loss 0.9"]
    assert not withheld
    assert withheld.feed([b"loss 0.8", *begin[:3]], 0.0) == [b"loss 0.8"]
    assert withheld
    assert withheld.feed(begin[3:], 0.0) == []
    assert withheld.take() == begin
    assert not withheld
    assert withheld.feed([b"goes on"], 0.0) == [b"goes on"]


def test_text_about_tracebacks_is_no_traceback() -> None:
    withheld = Withheld()
    lines = [b"I print: Traceback (most recent call last):", HEADER + b" and so on"]
    assert withheld.feed(lines, 0.0) == lines


def test_what_is_held_back_is_bounded() -> None:
    withheld = Withheld()
    lines = [HEADER, *[b"  x"] * (MOST - 1)]
    assert withheld.feed([b"before", *lines], 0.0) == [b"before"]
    assert withheld.feed([b"one more"], 0.0) == [*lines, b"one more"]
    assert not withheld


def test_a_rank_that_goes_on_writing_does_not_hold_back_its_traceback() -> None:
    withheld = Withheld()
    assert withheld.feed(TRACEBACK, 0.0) == []
    assert withheld.feed([b"step 1"], PATIENCE / 2) == []
    assert withheld.feed([b"step 2", HEADER], PATIENCE) == [*TRACEBACK, b"step 1", b"step 2"]
    assert withheld.until == 2 * PATIENCE
    assert withheld.take() == [HEADER]


def test_frames_of_the_loop_are_left_out() -> None:
    assert list(without_the_loop(TRACEBACK)) == [*TRACEBACK[:3], *TRACEBACK[9:]]
    assert list(without_the_loop(GROUPED)) == [GROUPED[0], *GROUPED[3:8], *GROUPED[10:]]


def test_all_else_is_left_as_it_is() -> None:
    lines = [b"", b"  indented", b"Fatal Python error: Segmentation fault", b"    ^^^^"]
    assert list(without_the_loop(lines)) == lines
