"""What ranks say of the places that they give, and what is made of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from aiodist.buffers.encoding import encode
from aiodist.buffers.tokens import MAX_DEPTH
from aiodist.buffers.values import parse
from aiodist.collectives import fitting
from aiodist.collectives.fitting import (
    LOOK,
    NOTHING,
    given,
    joined,
    parted,
    wanted,
    wanted_of_each,
)
from aiodist.errors import MismatchError, ProtocolError

X = np.ones((2, 3), "f4")
FROZEN = np.ones((2, 3), "f4")
FROZEN.flags.writeable = False


def meta(value: object) -> bytes:
    return encode(value).meta


def test_what_is_wanted_is_what_is_given() -> None:
    assert wanted(X) == given([meta(X), meta(X)])
    assert wanted(X.T) == given([meta(X.T)]) != wanted(X)
    assert wanted(X.astype("f8")) not in (wanted(X), LOOK)
    assert wanted(None) == NOTHING
    for out in (FROZEN, np.broadcast_to(X, (5, 2, 3)), object(), [object()]):
        assert wanted(out) == LOOK
    for metas in ([meta(X), meta(X.T)], [100_000], [meta("a" * 2000)]):
        assert given(metas) == LOOK


TREES: list[Any] = [
    7, "word", [], [X], [X, 7], [[X], 7], {"a": X}, {"a": 7}, {"b": X}, {1: X}, {"1": X},
    {"a": X, "b": 7}, {"a": {"b": X}}, [X.T], {"a": X.T}, {str(number): X for number in range(30)},
]  # fmt: skip


def test_forms_of_trees() -> None:
    """If two trees have one form, one is a place for the other."""
    for one, other in itertools.product(TREES, TREES):
        if wanted(one) == given([meta(other)]):
            parse(meta(other)).allocate(one)
        else:
            assert one is not other
    swapped = {"b": 8.5, "a": X}
    assert wanted(swapped) == wanted({"a": X, "b": 7}) != LOOK
    assert wanted((X, "x")) == wanted([X, None]) != LOOK
    assert wanted([np.float32(1)]) == wanted([1.0])
    assert wanted({"a": FROZEN}) == LOOK
    deep: Any = X
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    assert wanted(deep) == LOOK
    assert wanted([X] * 64) != wanted([X] * 65) == LOOK
    for key in (float("nan"), 1.5, True, (1, "a"), None):
        assert wanted({key: X, "a": 7}) == given([meta({key: X, "a": 7})]) == LOOK


def test_what_is_wanted_of_each() -> None:
    own = wanted(X)
    for out in (np.ones((4, 2, 3), "f4"), np.ones((8, 3), "f4"), [X, X, None, X], [FROZEN] * 0):
        assert wanted_of_each(out, X, 4) == own
    for out in (np.ones((4, 2, 3)), np.ones((9, 3), "f4"), np.ones(24, "f4"), [X, FROZEN], 7):
        assert wanted_of_each(out, X, 4) == LOOK
    assert wanted_of_each(None, X, 4) == NOTHING
    assert wanted_of_each([X], [X], 1) == wanted_of_each([X], 7, 1) == LOOK
    number = np.ones((), "f4")
    assert wanted_of_each(np.ones(4, "f4"), number, 4) == wanted(number)


def test_words_are_parted_as_they_were_joined() -> None:
    words = msgpack.packb([1, 2])
    blobs = [joined(NOTHING, words), joined(wanted(X), words), joined(LOOK, b""), b""]
    assert blobs[0] is words
    wants, rest = parted(blobs)
    assert wants == [NOTHING, wanted(X), LOOK, NOTHING]
    assert [bytes(each) for each in rest] == [words, words, b"", b""]
    for blob in (b"\xc1", b"\xc1\x00", b"\xc1\x05abc"):
        with pytest.raises(ProtocolError, match="rank 0"):
            parted([blob])


def settled(monkeypatch: pytest.MonkeyPatch, blobs: list[bytes]) -> None:
    def share(place: Any, own: bytes, on_lane: bool, *, of_one: bool) -> Any:
        return blobs
        yield

    monkeypatch.setattr(fitting, "share", share)

    def error(cls: Any, text: str, **fields: Any) -> Exception:
        made: Exception = cls(text, **fields)
        return made

    for _ in fitting.settle(SimpleNamespace(error=error), None, False, False):
        pass


def test_what_others_say_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, [b"", b""])
    with pytest.raises(MismatchError, match="too long") as caught:
        settled(monkeypatch, [b"", msgpack.packb(("too long", {0: "a", 1: "b"}))])
    assert caught.value.calls == {0: "a", 1: "b"}
    for words in (b"\xc1", msgpack.packb(7), msgpack.packb((1, {})), msgpack.packb(("a", [1]))):
        with pytest.raises(ProtocolError, match="rank 1"):
            settled(monkeypatch, [b"", words])
