"""Plain values by the compiled part, against the Python code: the same bytes, the same values, and
nothing read that is not sound."""

from __future__ import annotations

import enum
import re
import tracemalloc
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from aiodist import compiled
from aiodist.buffers import encoding, tokens, values
from aiodist.errors import ProtocolError

pytestmark = pytest.mark.skipif(
    compiled.core is None, reason=f"no compiled part: {compiled.reason}"
)

WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**66), 2**66),
    st.integers(-200, 200),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.sampled_from(["x" * 255, "x" * 256, "x" * 65536, "ü" * 20, "\udcff", b"x" * 256, 1j]),
)
KEYS = st.recursive(
    WORDS.filter(lambda word: word != 1j), lambda keys: st.tuples(keys, keys), max_leaves=4
)
VALUES = st.recursive(
    WORDS,
    lambda items: st.one_of(
        st.lists(items, max_size=6),
        st.lists(items, max_size=6).map(tuple),
        st.dictionaries(KEYS, items, max_size=4),
    ),
    max_leaves=80,
)


def by_python(value: Any) -> bytes:
    encoder = encoding._Encoder(False, None)
    encoder.put(value, "value", 0)
    return tokens.pack(encoder.tokens)


def read_by_python(meta: bytes) -> Any:
    return values._Reader().read_tokens(tokens.unpack(meta))


@given(VALUES)
def test_it_writes_and_reads_what_python_does(value: Any) -> None:
    it_writes_and_reads_what_python_does(value)


def it_writes_and_reads_what_python_does(value: Any) -> None:
    assert compiled.core is not None
    meta = by_python(value)
    written = compiled.core.write_value(value)
    assert written is None or written == meta
    for most in (len(meta) - 1, len(meta)):
        limited = compiled.core.write_value(value, most)
        assert limited == (None if most < len(meta) else written)
    read = compiled.core.read_value(meta)
    assert read is NotImplemented or repr(read) == repr(read_by_python(meta))


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), WORDS), min_size=65, max_size=300))
@example([0] * 64)
@example([0] * 126)
@example([0] * 127)
@example([0] * 254)
@example([0] * 255)
@example([0] * 65534)
@example([0] * 65535)
@example(
    [sign * (1 << bits) + more for bits in range(63) for sign in (1, -1) for more in (-1, 0, 1)]
)
def test_ints_of_large_values_take_few_bytes(value: list[Any]) -> None:
    for each in (value, tuple(value), dict(enumerate(value)), [value[:10], {"a": value}]):
        it_writes_and_reads_what_python_does(each)


def test_how_deep_it_writes() -> None:
    assert compiled.core is not None
    for more in (0, 100):  # so that it has few tokens, or many
        deep: Any = [0] * more
        for _ in range(tokens.MAX_DEPTH - 1):
            deep = [deep]
        assert compiled.core.write_value(deep) == by_python(deep)
        assert compiled.core.write_value([deep]) is None
        for key, is_plain in (((1, ((2,),)), True), ((1, (((2,),),)), False)):
            deep = [{key: 0}, *[0] * more]
            for _ in range(tokens.MAX_DEPTH - 5):
                deep = [deep]
            assert (compiled.core.write_value(deep) is not None) is is_plain
    endless: list[Any] = [0] * 100
    endless.append(endless)
    assert compiled.core.write_value(endless) is None


class Text(str):
    __slots__ = ()


class Pair(NamedTuple):
    a: Any
    b: Any


class Level(enum.IntEnum):
    LOW = 3
    HIGH = 2**65


def ordered(items: list[Any]) -> OrderedDict[str, Any]:
    made = OrderedDict((str(at), item) for at, item in enumerate(items))
    if items:
        made.move_to_end("0")  # a dict that knows nothing of this has another order
    return made


ODD = st.one_of(
    WORDS,
    st.sampled_from([np.float64(0.5), np.int8(3), np.str_("s"), np.bytes_(b"b"), Text("t"), 2**63]),
    st.sampled_from([Level.LOW, Level.HIGH, bytearray(b"ab"), np.datetime64("2026-11-29")]),
    st.builds(lambda n: np.arange(float(n))[::2], st.integers(0, 9)),
    st.builds(torch.arange, st.integers(0, 9)),
)
TREES = st.recursive(
    ODD,
    lambda items: st.one_of(
        st.lists(items, max_size=40),
        st.lists(items, max_size=4).map(tuple),
        st.dictionaries(KEYS, items, max_size=4),
        st.lists(items, max_size=4).map(ordered),
        st.lists(items, max_size=3).map(lambda x: defaultdict(list, enumerate(x))),
        st.tuples(items, items).map(lambda x: Pair(*x)),
        st.sampled_from([object(), {object(): 1}, np.array([None]), [0] * 70]),
    ),
    max_leaves=100,
)


@given(TREES, st.booleans())
def test_any_value_is_encoded_as_by_python(value: Any, allow_pickle: bool) -> None:
    def encoded() -> Any:
        try:
            found = encoding.encode(value, allow_pickle=allow_pickle)
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        return found.meta, [bytes(each) for each in found.buffers], found.specs

    def read(meta: bytes) -> Any:
        incoming = values.parse(meta, allow_pickle=allow_pickle)
        tree = re.sub("0x[0-9a-f]+", "", repr(incoming._tree))
        return tree, incoming.specs, incoming.is_plain, incoming.has_pickles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "core", None)
        patch.setattr(values, "core", None)
        by_python = encoded()
        read_by_python = read(by_python[0]) if isinstance(by_python[0], bytes) else None
    assert encoded() == by_python
    if read_by_python is not None:
        assert read(by_python[0]) == read_by_python


@given(TREES, st.lists(st.tuples(st.sampled_from("cid"), st.integers(0), st.integers(0, 255))))
def test_it_reads_nothing_that_is_not_sound(value: Any, changes: list[Any]) -> None:
    """Bytes are changed, inserted and deleted."""
    assert compiled.core is not None
    try:
        meta = bytearray(encoding.encode(value).meta)
    except (TypeError, ValueError):
        return
    for how, where, byte in changes[:4]:
        at = where % (len(meta) + 1)
        if how == "i":
            meta.insert(at, byte)
        elif at < len(meta):
            meta[at : at + 1] = b"" if how == "d" else bytes([byte])
    reader = values._Reader()
    read = compiled.core.read_value(bytes(meta), reader.extension)
    if read is not NotImplemented:
        expected = repr(read_by_python(bytes(meta)))
        assert re.sub("0x[0-9a-f]+", "", repr(read)) == re.sub("0x[0-9a-f]+", "", expected)


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        ([None, True, 1, 0.5, "a", b"b", (1, [2])], True),
        ({"a": 1, 2: {}, (1, "b"): [], None: 0}, True),
        ([0] * 63, True),
        ([0] * 64, True),  # one token more than `tokens.FEW`
        ({n: {str(n): [n, -n, None]} for n in range(99)}, True),
        ([[0] * 64, 2**63], False),
        (2**63, False),
        ("\udcff", False),
        (1j, False),
        ({(1, (2,)): {1: 2}}, True),
        (type("Text", (str,), {})("a"), False),
        ([[object()]], False),
    ],
)
def test_what_is_plain(value: Any, is_plain: bool) -> None:
    assert compiled.core is not None
    assert (compiled.core.write_value(value) is not None) is is_plain


@pytest.mark.parametrize("depth", [tokens.MAX_DEPTH, tokens.MAX_DEPTH + 1])
@pytest.mark.parametrize("kind", [tokens.LIST, tokens.TUPLE])
def test_how_deep_it_reads(depth: int, kind: int) -> None:
    assert compiled.core is not None
    meta = tokens.pack([*[tokens.container(kind, 1)] * depth, "x"])
    read = compiled.core.read_value(meta)
    if depth > tokens.MAX_DEPTH:
        assert read is NotImplemented
        with pytest.raises(ProtocolError, match="levels deep"):
            read_by_python(meta)
    else:
        assert repr(read) == repr(read_by_python(meta))


def test_containers_within_each_other_claim_no_more_than_there_is() -> None:
    assert compiled.core is not None
    for kind in (tokens.LIST, tokens.TUPLE):
        claimed = 40_000
        meta = tokens.pack([*[tokens.container(kind, claimed)] * 90, *[None] * 50_000])
        tracemalloc.start()
        try:
            assert compiled.core.read_value(meta) is NotImplemented
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 3 * 8 * claimed


def test_a_container_that_claims_too_much_gets_no_memory() -> None:
    assert compiled.core is not None
    for kind in (tokens.LIST, tokens.TUPLE, tokens.DICT):
        assert compiled.core.read_value(tokens.pack([tokens.container(kind, 2**32 - 1)])) is (
            NotImplemented
        )


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_an_array_is_read_is_not_lost(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        errors.append(error())
        raise errors[-1]

    errors: list[BaseException] = []
    monkeypatch.setattr(values._Reader, "extension", fail)
    with pytest.raises(error) as caught:
        values._Reader().read(encoding.encode({"a": np.zeros(3), "b": [np.zeros(3)]}).meta)
    assert errors == [caught.value]
