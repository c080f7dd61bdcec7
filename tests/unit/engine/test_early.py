"""Headers of frames of collectives, and what came before its collective was called."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.engine.early import Ahead, Early, entered_and_text, key_of, slot_and_call
from aiodist.errors import ProtocolError

HEAD = [1, b"context!"]


@pytest.mark.parametrize("tag", [None, "t", 3, b"split"])
@pytest.mark.parametrize("more", [[], [1, b"call"]])
def test_a_key(tag: object, more: list[Any]) -> None:
    assert key_of([*HEAD, tag, 0, *more]) == (tag, 0)


@pytest.mark.parametrize("rest", [[], ["t"], ["t", -1], ["t", True], ["t", 1.0], ["t", None]])
def test_no_number(rest: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="a tag and a sequence number"):
        key_of([*HEAD, *rest])


@pytest.mark.parametrize("tag", [1.5, True, [], {}])
def test_no_tag(tag: object) -> None:
    with pytest.raises(ProtocolError, match=f"not {type(tag).__name__}"):
        key_of([*HEAD, tag, 0])


def test_the_rest_of_a_header() -> None:
    assert slot_and_call([*HEAD, None, 0, 3, b"call"]) == (3, b"call")
    assert entered_and_text([*HEAD, None, 0, False, "waits"]) == (False, "waits")


@pytest.mark.parametrize(
    "rest", [[], [3], [3, b"c", 1], [True, b"c"], ["3", b"c"], [3, "c"], [None, b"c"]]
)
def test_no_slot_and_call(rest: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="must end in a slot and a call"):
        slot_and_call([*HEAD, None, 0, *rest])


@pytest.mark.parametrize("rest", [[], [True], [True, "t", 1], [1, "t"], [True, b"t"], [None, "t"]])
def test_no_flag_and_text(rest: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="must end in a flag and a text"):
        entered_and_text([*HEAD, None, 0, *rest])


class Nobody:
    """Keeps no frame: these have come already."""

    def came(self, frame: Ahead) -> None:
        raise AssertionError("it has come already")


def frame(src: int, call: bytes, data: bytes) -> Ahead:
    return Ahead(Nobody(), (None, 0), src, 0, call, memoryview(bytearray(data)))


@pytest.mark.parametrize(
    ("src", "call", "size", "taken"),
    [(1, b"c", 2, b"ab"), (1, b"c", 3, b""), (1, b"d", 2, b""), (2, b"c", 2, b"")],
)
def test_a_frame_is_taken_by_what_fits_it(src: int, call: bytes, size: int, taken: bytes) -> None:
    early, into = Early(), bytearray(size)
    early.frames += [frame(1, b"c", b"ab"), frame(1, b"c", b"cd")]
    assert early.take(src, call, memoryview(into)) is bool(taken)
    assert into == (taken or bytes(size))
    assert len(early.frames) == (1 if taken else 2)


def test_frames_are_taken_in_order() -> None:
    early, into = Early(), bytearray(2)
    early.frames += [frame(1, b"c", b"ab"), frame(1, b"c", b"cd")]
    found = []
    while early.take(1, b"c", memoryview(into)):
        found.append(bytes(into))
    assert found == [b"ab", b"cd"]


def test_values_are_one_frame_of_each_and_nothing_else() -> None:
    early = Early()
    early.frames += [frame(1, b"c", b"ab"), frame(2, b"c", b"cde")]
    assert early.values(b"c", (2, 3).__contains__) == {1: b"ab", 2: b"cde"}
    assert early.values(b"d", (2, 3).__contains__) is None
    assert early.values(b"c", (2, 4).__contains__) is None
    early.frames.append(frame(1, b"c", b"ab"))
    assert early.values(b"c", (2, 3).__contains__) is None


@pytest.mark.parametrize("what", ["frames", "grants", "inquirers", "knockers"])
def test_it_is_empty_once_nothing_came(what: str) -> None:
    early = Early()
    assert early.is_empty
    something: dict[str, Any] = {"frames": [frame(1, b"c", b"")], "grants": {1: (1, b"c")}}
    setattr(early, what, something.get(what, (1,)))
    assert not early.is_empty
