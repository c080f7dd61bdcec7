"""What may be sent to peers that may not have entered a collective yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import aiodist
from aiodist.engine import failures
from aiodist.engine.calls import MAX_UNSOLICITED, Calls
from aiodist.errors import GroupClosedError
from aiodist.wire import kinds


class Said:
    """A group of three of which only what it says counts; and an operation of it."""

    may_send = Calls.may_send
    goes_unasked = Calls.goes_unasked
    refund = Calls.refund

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.party = SimpleNamespace(say=lambda *words: self.said.append(words))
        self._unsolicited = [0, 0, 0]


@pytest.fixture
def calls() -> Any:
    return Said()


def operation(seq: int) -> Any:
    return SimpleNamespace(tag=None, seq=seq, unsolicited={}, knocked=set())


def test_the_first_frames_go_unasked_and_the_rest_waits(calls: Any) -> None:
    op = operation(0)
    assert calls.may_send(op, 1, MAX_UNSOLICITED + 1)  # one of any size: else nothing ever went
    assert not calls.may_send(op, 1, 1)
    assert calls.may_send(op, 2, 1)
    calls.refund(op, 1)
    assert calls.may_send(op, 1, 1)


def test_what_has_gone_is_counted_whatever_it_was(calls: Any) -> None:
    op = operation(-1)  # it has no number yet
    calls.goes_unasked(op, 1, MAX_UNSOLICITED)
    calls.goes_unasked(op, 1, 1)
    assert not calls.said
    assert not calls.may_send(operation(0), 1, 1)
    calls.refund(op, 1)
    assert calls.may_send(operation(1), 1, 1)


def test_who_waits_knocks_once_at_each_peer(calls: Any) -> None:
    first, second = operation(0), operation(1)
    for peer in (1, 2):
        calls.may_send(first, peer, MAX_UNSOLICITED)
    for _ in range(3):  # each time that its links are looked at
        assert not calls.may_send(second, 1, 1)
        assert not calls.may_send(second, 2, 1)
    assert calls.said == [(1, kinds.KNOCK, None, 1), (2, kinds.KNOCK, None, 1)]
    assert not calls.may_send(first, 1, 1)
    assert calls.said[2:] == [(1, kinds.KNOCK, None, 0)]


def test_what_is_heard_about_tags_is_answered_and_what_waited_for_it_goes_on() -> None:
    heard: list[tuple[object, ...]] = []
    said: list[tuple[object, ...]] = []
    thawed: list[bool] = []
    ends = [True, False]

    def hear(src: int, fields: Sequence[object]) -> tuple[list[tuple[int, tuple[str]]], bool]:
        heard.append((src, fields))
        return [(2, ("word",))], ends.pop()

    calls: Any = SimpleNamespace(
        tags=SimpleNamespace(heard=hear),
        party=SimpleNamespace(say=lambda *words: said.append(words)),
        _thaw=lambda: thawed.append(True),
    )
    calls._send_about_tags = partial(Calls._send_about_tags, calls)
    Calls.about_tags(calls, 1, ["first"])
    assert heard == [(1, ["first"])]
    assert said == [(2, kinds.TAGS, "word")]
    assert not thawed
    Calls.about_tags(calls, 1, ["last"])
    assert thawed == [True]


@pytest.mark.parametrize("abort", [False, True])
def test_who_aborts_tells_it_of_each_operation(abort: bool) -> None:
    failed: list[object] = []
    given_up: list[tuple[object, failures.Verdict, str]] = []
    op = SimpleNamespace(work=SimpleNamespace(fail=failed.append))

    def give_up(op: object, verdict: failures.Verdict, error: object) -> None:
        given_up.append((op, verdict, str(error)))

    def nothing(*_: object, **__: object) -> None: ...

    calls: Any = SimpleNamespace(
        tags=SimpleNamespace(disband=nothing),
        _thaw=nothing,
        posting=None,
        waiting=SimpleNamespace(settle=nothing),
        ops={(None, 0): op},
        party=SimpleNamespace(rank=2),
        ends=SimpleNamespace(
            give_up=give_up,
            withdraw=nothing,
            hearsay=SimpleNamespace(close=nothing),
            relay=SimpleNamespace(leave=nothing),
        ),
    )
    error = GroupClosedError("enough")
    Calls.close(calls, error, abort=abort)
    if abort:
        assert given_up == [(op, failures.Verdict("aborted", "enough", 2), str(error))]
    else:
        assert [str(each) for each in failed] == [str(error)]
        assert failed != [error]  # each Work has one of its own


ENDS: dict[str, Callable[..., aiodist.AiodistError]] = {
    "lost": partial(aiodist.PeerLostError, "rank 2 is lost: it has died", ranks=[2]),
    "late": partial(aiodist.CollectiveTimeoutError, "not entered by rank 2", missing=[2]),
    "gave up": partial(aiodist.CollectiveAbortedError, "tired", rank=2, reason="tired"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_what_ended_an_earlier_step_ends_the_call_for_the_others(end: str) -> None:
    async with aiodist.local(3) as groups:
        error = ENDS[end](group=groups[0].name, epoch=groups[0].epoch)
        groups[0]._context.calls.forgo("split", None, error)
        with pytest.raises(type(error)) as heard:
            await groups[1].barrier()
        for name in ("ranks", "missing", "rank"):
            assert getattr(heard.value, name, None) == getattr(error, name, None)


async def test_a_deadline_of_a_call_that_has_no_number_yet() -> None:
    """Its tag is frozen while the ranks agree on forgetting it."""
    async with aiodist.local(2) as (one, two):
        calls = one._context.calls
        calls.tags.frozen.add("t")
        with pytest.raises(aiodist.CollectiveTimeoutError, match="was not free") as raised:
            await one.all_reduce(1, tag="t", timeout=0.01)
        assert raised.value.seq is None
        assert "#" not in str(raised.value)
        calls.tags.frozen.clear()
        calls.undefer()
        with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 0 gave up") as heard:
            await two.all_reduce(1, tag="t")
        assert heard.value.seq == 0
