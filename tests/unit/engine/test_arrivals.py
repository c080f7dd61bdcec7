"""What is kept of collectives that were not called yet, or cannot be called just now: verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine import arrivals
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.failures import Verdict
from aiodist.errors import ProtocolError
from aiodist.wire import kinds

VERDICT = Verdict("aborted", "enough", 1, {})


class _Tags:
    """The counts of a rank that has called nothing, with tags that a round is about."""

    def __init__(self, *frozen: object) -> None:
        self.frozen = set(frozen)

    def is_ahead(self, tag: object, seq: int) -> bool:
        return True

    def contributed(self, tag: object, seq: int) -> None: ...


def _arrivals(*frozen: object) -> tuple[Arrivals, _Tags]:
    tags = _Tags(*frozen)
    relay = SimpleNamespace(hear=lambda src, key, fields: VERDICT)
    calls: Any = SimpleNamespace(find={}.get, tags=tags, ends=SimpleNamespace(relay=relay))
    return Arrivals(calls), tags


def _abort(of: Arrivals, numbers: Sequence[int], tag: object = "a") -> None:
    for number in numbers:
        of.abort(1, [kinds.ABORT, b"group", tag, number], 0)


def test_verdicts_on_a_frozen_tag_are_heard_after_the_round() -> None:
    of, tags = _arrivals("a")
    _abort(of, range(3))
    _abort(of, [7], tag="b")
    assert list(of.verdicts) == [("b", 7)]
    tags.frozen.clear()
    of.thaw()
    assert list(of.verdicts) == [("b", 7), ("a", 0), ("a", 1), ("a", 2)]


def test_verdicts_on_a_frozen_tag_are_bounded_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, tags = _arrivals("a")
    each = arrivals._size(("a", 0), VERDICT)
    monkeypatch.setattr(arrivals, "MAX_VERDICT_BYTES", 10 * each)
    for _ in range(2):
        _abort(of, range(50))
        frozen, tags.frozen = tags.frozen, set()
        of.thaw()
        assert list(of.verdicts) == [("a", number) for number in range(10)]
        tags.frozen = frozen
        of.clear()


def test_each_verdict_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[object] = []
    size = arrivals._size

    def counted(key: Any, verdict: Verdict) -> int:
        weighed.append(key)
        return size(key, verdict)

    monkeypatch.setattr(arrivals, "_size", counted)
    of, _ = _arrivals("a")
    _abort(of, range(100))
    assert len(weighed) == 100


def test_what_is_kept_of_a_rank_is_bounded_by_what_is_there_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, _ = _arrivals()
    monkeypatch.setattr(arrivals, "MAX_AHEAD_BYTES", 3 * arrivals.AHEAD + 10)
    for number in range(10):  # each is called here after what has come of it
        of.grant(1, [kinds.GRANT, b"group", "a", number, 1, b"c"], 0)
        assert of.take(("a", number))[1] is not None
    for number in range(3):
        of.grant(1, [kinds.GRANT, b"group", "a", number, 1, b"c"], 0)
    of.grant(2, [kinds.GRANT, b"group", "a", 0, 1, b"c"], 0)
    with pytest.raises(ProtocolError, match="rank 1 sent over"):
        of.grant(1, [kinds.GRANT, b"group", "a", 3, 1, b"c"], 0)
