"""What a recipe keeps for each tag."""

from __future__ import annotations

import pytest

from aiodist.prepared import posted
from aiodist.prepared.posted import ByTag


def test_what_is_made_for_a_tag_is_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted, "KEPT_TAGS", 3)
    made: list[object] = []

    def make(tag: object) -> str:
        made.append(tag)
        return f"of {tag}"

    kept = ByTag(make)
    for tag in ("a", 1, "a", None, "a"):
        assert kept[tag] == f"of {tag}"
    assert made == ["a", 1, None]
    assert kept["b"] == "of b" and len(kept) == 1  # a fourth tag makes it forget the others
    assert kept["a"] == "of a" and made == ["a", 1, None, "b", "a"]
