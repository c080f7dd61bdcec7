"""The checks of fields of messages: what each takes, and what it says it expected."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any

import msgpack
import pytest

from aiodist.wire import schema
from aiodist.wire.limits import MAX_SECONDS


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Pair(schema.Struct):
    first: Annotated[int, schema.integer(0, 9)]
    second: Annotated[str, schema.text(3)]


CHECKS: dict[str, tuple[schema.Check, list[tuple[Any, Any]], list[Any], str]] = {
    "integer": (
        schema.integer(-1, 3), [(-1, -1), (0, 0), (3, 3)], [-2, 4, True, 1.0, "1", None],
        "an integer from -1 to 3",
    ),
    "seconds": (
        schema.seconds(0.5), [(0.5, 0.5), (1, 1.0), (MAX_SECONDS, MAX_SECONDS)],
        [0.4, MAX_SECONDS * 1.01, float("nan"), True, "1"], f"seconds from 0.5 to {MAX_SECONDS:g}",
    ),
    "text": (schema.text(2, 1), [("a", "a"), ("ab", "ab")], ["", "abc", b"a"], "1 to 2 characters"),
    "blob": (schema.blob(2), [(b"", b""), (b"ab", b"ab")], [b"abc", "a"], "at most 2 bytes"),
    "flag": (schema.flag, [(True, True), (False, False)], [0, 1, None], "a boolean"),
    "optional": (
        schema.optional(schema.flag), [(None, None), (False, False)], [0], "a boolean",
    ),
    "either": (
        schema.either(schema.flag, schema.text(1)), [(True, True), ("a", "a")], [0, "ab"],
        "a boolean or a text of 0 to 1 characters",
    ),
    "sequence": (
        schema.sequence(schema.flag, 2), [([], ()), ([True, False], (True, False))],
        [(True,), [True] * 3, "ab"], "an array of at most 2",
    ),
    "tree": (
        schema.tree(4), [({}, {}), ({"a": 1}, {"a": 1})], [[], {1: 1}, {"a": 1, 2: 3}],
        "a map with text keys",
    ),
    "one of": (
        schema.one_of(Color), [("red", Color.RED)], ["green", None], "one of red, blue",
    ),
    "struct": (
        schema.struct(Pair), [([1, "a"], Pair(1, "a"))], [(1, "a"), {}], "the fields of Pair",
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_what_it_takes(check: str) -> None:
    function, good, _, _ = CHECKS[check]
    for value, found in good:
        assert function(value) == found
        assert type(function(value)) is type(found)


@pytest.mark.parametrize("check", CHECKS)
def test_what_it_refuses(check: str) -> None:
    function, _, bad, expected = CHECKS[check]
    for value in bad:
        with pytest.raises(ValueError, match=re.escape(expected)):
            function(value)


def test_an_item_of_an_array_is_checked() -> None:
    with pytest.raises(ValueError, match="a boolean"):
        schema.sequence(schema.flag, 2)([True, 1])


def test_a_map_counts_as_it_is_sent() -> None:
    assert len(msgpack.packb({"a": 300})) == 6
    assert schema.tree(6)({"a": 300}) == {"a": 300}
    with pytest.raises(ValueError, match="at most 5 bytes as msgpack"):
        schema.tree(5)({"a": 300})
    assert schema.tree(None)({"a": "b" * 10_000})


def test_the_fields_of_a_struct_are_as_many_as_they_should_be() -> None:
    assert schema.field_names(Pair) == ("first", "second")
    for values in ([1], [1, "a", 2]):
        with pytest.raises(ValueError, match=f"2 fields of Pair, not {len(values)}"):
            schema.build(Pair, values)


def test_an_error_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"a text of 0 to 3 characters in second"):
        schema.build(Pair, [1, "long"])


def test_a_struct_is_sent_as_its_fields() -> None:
    assert msgpack.unpackb(schema.pack({"a": [Pair(1, "b")]})) == {"a": [[1, "b"]]}
    with pytest.raises(TypeError, match="complex 1j cannot be sent"):
        schema.pack(1j)


@pytest.mark.parametrize(
    ("packed", "why"), [(b"\xc1", "FormatError"), (b"\x81\x01\x02", "ValueError: int is not .*")]
)
def test_an_error_says_why_bytes_are_no_msgpack(packed: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^msgpack with text keys \({why}\)$"):
        schema.unpack(packed)
