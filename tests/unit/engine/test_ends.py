"""A Work ends, whatever goes wrong while its operation is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine.ends import Ends
from aiodist.engine.failures import Verdict
from aiodist.work import Work


def nothing(*_: object, **__: object) -> None: ...


def fail(*_: object, **__: object) -> None:
    raise ValueError("of a test")


class Ending:
    """Rank 0 of three, with one operation. `fails` names what raises."""

    def __init__(self, fails: str) -> None:
        self.discarded: list[int] = []

        def does(name: str) -> Any:
            return fail if name == fails else nothing

        def discard(peer: int, op: object) -> None:
            self.discarded.append(peer)
            does("discard")()

        party = SimpleNamespace(
            rank=0, size=3, group="g", epoch=0, discard=discard, lost=dict, ranks=range(3)
        )
        self.work: Work[Any] = Work.begin(asyncio.get_running_loop(), "barrier", None)
        self.op: Any = SimpleNamespace(
            tag=None, seq=0, work=self.work, call=b"barrier()", close=does("close")
        )
        calls: Any = SimpleNamespace(
            party=party, forget=does("forget"), given_up=nothing, ops={(None, 0): self.op}
        )
        self.ends = Ends(calls)
        self.ends.relay = SimpleNamespace(tell=does("tell"))  # type: ignore[assignment]


@pytest.mark.parametrize("fails", ["forget", "close", "discard", "tell"])
async def test_a_work_fails_whatever_raises_while_it_is_given_up(fails: str) -> None:
    ending, error = Ending(fails), RuntimeError("why")
    with pytest.raises(ValueError, match="of a test"):
        ending.ends.give_up(ending.op, Verdict("error", "why", 0), error)
    assert ending.work.exception() is error
    assert ending.discarded == [1, 2]


@pytest.mark.parametrize("fails", ["forget", "close", "discard"])
async def test_a_work_fails_whatever_raises_while_it_is_withdrawn(fails: str) -> None:
    ending = Ending(fails)
    with pytest.raises(ValueError, match="of a test"):
        ending.ends.end(ending.op, Verdict("error", "why", 1))
    assert "rank 1 gave up" in str(ending.work.exception())
    assert ending.discarded == [1, 2]


async def test_an_operation_that_cannot_be_given_up_keeps_no_other_from_a_loss() -> None:
    ending = Ending("")
    lost: list[int] = []
    ending.ends._calls.ops = {(None, seq): SimpleNamespace(seq=seq) for seq in range(2)}  # type: ignore[misc]

    def lose(op: Any, src: int) -> None:
        lost.append(op.seq)
        fail()

    ending.ends._lose = lose  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="of a test"):
        ending.ends.lose(1)
    assert lost == [0, 1]
