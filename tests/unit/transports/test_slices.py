"""Short time slices: asked for once a thread has lost a whole slice, and only if that harms no
choice of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiodist.transports import polling, slices


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns in a thread of its own, because a thread cannot be made as it was."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def needs_short_slices() -> None:
    found = slices.attributes()
    if found is None or not found.runtime:
        pytest.skip("this system has no slices that a thread can choose")


def test_a_thread_gets_short_slices_and_keeps_the_rest() -> None:
    needs_short_slices()

    def shortened() -> Any:
        before, done, after = slices.attributes(), slices.shorten(), slices.attributes()
        assert before is not None and after is not None
        return (before.policy, before.nice) == (after.policy, after.nice), done, after.runtime

    assert in_thread(shortened) == (True, True, slices.SLICE)


@pytest.mark.parametrize(
    "policy, runtime, done",
    [(2, 3_000_000, False), (0, 0, False), (0, slices.SLICE, True), (0, 10_000, True)],
    ids=["another policy", "a system without slices", "short already", "shorter"],
)
def test_a_thread_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, policy: int, runtime: int, done: bool
) -> None:
    asked: list[Any] = []
    found = slices.Attributes(policy=policy, runtime=runtime)
    monkeypatch.setattr(slices, "attributes", lambda: found)
    monkeypatch.setattr(slices, "_call", lambda *args: asked.append(args))
    assert slices.shorten() is done
    assert not asked


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    assert slices.attributes() is None
    assert not slices.shorten()


def test_each_thread_asks_once_after_a_yield_that_took_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(slices, "shorten", lambda: asked.append(threading.get_ident()))
    neighbours = polling.Neighbours()

    def lose_a_slice() -> int:
        neighbours.yielded(1.0, 1.0 + polling.HOGGED / 2)
        assert len(asked) == before
        for _ in range(3):
            neighbours.yielded(1.0, 1.0 + 2 * polling.HOGGED)
        return threading.get_ident()

    before = 0
    own = lose_a_slice()
    before = 1
    other = in_thread(lose_a_slice)
    assert asked == [own, other]
