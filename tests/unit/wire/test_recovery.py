"""Votes, and the next view as what has changed of the one before."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from aiodist.wire.messages import EpochView, MemberInfo
from aiodist.wire.recovery import BallotResult, Cause, Heard, NextView, Purpose, Void, Vote


def member(rank: int, name: str) -> MemberInfo:
    return MemberInfo(rank, name, "host", 1, "", {}, 0.0, "", ())


def view(epoch: int, *names: str) -> EpochView:
    return EpochView("g", epoch, tuple([member(rank, one) for rank, one in enumerate(names)]))


BEFORE = view(1, "a", "b", "c")
AFTER = view(2, "a", "c", "d")


def test_the_next_view_comes_of_the_one_before_and_of_what_has_changed() -> None:
    change = NextView.between(BEFORE, AFTER)
    assert (change.gone, [one.id for one in change.joined]) == ((1,), ["d"])
    assert change.after(BEFORE) == AFTER


def test_members_of_one_process_share_the_view() -> None:
    change = NextView.between(BEFORE, AFTER)
    made = change.after(BEFORE)
    assert change.after(BEFORE) is made
    assert change.after(view(1, "a", "b", "c")) is not made  # of another view, though it is equal


def test_the_change_lives_as_long_as_its_view_and_keeps_none() -> None:
    change = NextView.between(BEFORE, AFTER)
    seen = weakref.ref(change)
    made = change.after(BEFORE)
    view_seen = weakref.ref(made)
    del change
    gc.collect()
    assert seen() is not None
    del made
    gc.collect()
    assert (seen(), view_seen()) == (None, None)


def test_a_change_that_makes_no_sense_is_refused() -> None:
    change = NextView.between(BEFORE, AFTER)
    with pytest.raises(ValueError, match="of another view than that of epoch 2"):
        change.after(AFTER)
    with pytest.raises(ValueError, match="makes no sense"):
        replace(change, gone=(0,)).after(BEFORE)


def test_what_was_called_is_said_in_words() -> None:
    vote = Vote(b"context!", 0, Purpose.RENDEZVOUS, least=2)
    assert vote.call == "rendezvous(min_size=2, max_size=None)"
    assert Vote(b"context!", 0, Purpose.SHRINK).call == "shrink()"


def test_an_outcome_is_a_verdict_or_void() -> None:
    verdict, void = BallotResult(False, (), 1), Void(Cause.TIMEOUT, "late", "a")
    assert Heard(b"context!", 0, verdict=verdict).outcome is verdict
    assert Heard(b"context!", 0, void=void).outcome is void
    assert Heard(b"context!", 0).outcome is None
