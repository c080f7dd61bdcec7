"""`aiodist.breakpoint`: one rank is debugged by a script, the others wait."""

from __future__ import annotations

import asyncio
import bdb
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from over_links import until
from sharing import sharing

import aiodist
from aiodist.debugging import TAG

Script = Callable[..., io.StringIO]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """``script("p x", "continue")``: what is typed at the prompt."""

    def type_in(*lines: str) -> io.StringIO:
        typed = io.StringIO("".join([f"{line}\n" for line in lines]))
        monkeypatch.setattr(sys, "stdin", typed)
        return typed

    return type_in


@pytest.fixture(autouse=True)
def untraced():
    before = sys.gettrace()
    yield
    sys.settrace(before)


def test_the_caller_is_debugged_while_the_others_wait(run, script, capsys) -> None:
    order: list[Any] = []
    script("p secret", "p order", "where", "secret = 43", "continue")

    async def main(group: aiodist.Group) -> int:
        secret = 42
        await aiodist.breakpoint(group, rank=1)
        order.append(group.rank)
        return secret

    async def all_of_them() -> None:
        async with aiodist.local(3) as groups:
            assert await asyncio.gather(*[main(group) for group in groups]) == [42, 43, 42]

    run(all_of_them())
    assert order[0] == 1
    out = capsys.readouterr().out
    assert "rank 1 of group 'world'; the others wait" in out
    assert "-> order.append(group.rank)" in out
    assert "(Pdb) 42\n" in out
    assert "(Pdb) []\n" in out


def test_stepping_lets_the_others_go_on(run, script, capsys) -> None:
    script("next", "next", "p total", "continue")

    async def main(group: aiodist.Group) -> int:
        await aiodist.breakpoint(group)
        total = 1
        total = await group.all_reduce(total)
        assert total == group.size
        return total

    async def all_of_them() -> None:
        async with aiodist.local(2) as groups:
            assert await asyncio.gather(*[main(group) for group in groups]) == [2, 2]

    run(all_of_them())
    assert "-> total = await group.all_reduce(total)" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["quit"], []])
def test_quit_and_the_end_of_the_input_abort_the_others(run, script, words) -> None:
    script(*words)

    async def main(group: aiodist.Group) -> None:
        await aiodist.breakpoint(group)
        raise AssertionError("not reached")

    async def all_of_them() -> None:
        async with aiodist.local(2) as groups:
            here, there = await asyncio.gather(
                *[main(group) for group in groups], return_exceptions=True
            )
            assert isinstance(here, bdb.BdbQuit)
            assert isinstance(there, aiodist.CollectiveAbortedError)
            assert there.rank == 0
            # The group is as good as before.
            await asyncio.gather(*[group.barrier() for group in groups])

    run(all_of_them())


@pytest.mark.parametrize("has_input", [True, False])
def test_the_others_are_aborted_though_they_came_first(run, script, monkeypatch, has_input) -> None:
    script("quit")
    monkeypatch.setattr("aiodist.debugging._has_input", lambda: has_input)

    async def main(group: aiodist.Group) -> None:
        await aiodist.breakpoint(group)
        raise AssertionError("not reached")

    async def all_of_them() -> None:
        async with sharing(3) as groups:
            for _ in range(2):  # so that the next one may be over within the call of the last rank
                await asyncio.gather(*[group.barrier(tag=TAG) for group in groups])
            waiting = [asyncio.create_task(main(group)) for group in groups[1:]]
            await until(lambda: all(group._context.calls.pending for group in groups[1:]))
            with pytest.raises(bdb.BdbQuit if has_input else RuntimeError):
                await main(groups[0])
            for there in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(there, aiodist.CollectiveAbortedError)

    run(all_of_them())


def test_as_a_task_of_its_own_it_shows_its_caller(run, script, capsys) -> None:
    script("p marker", "continue")

    async def all_of_them() -> None:
        marker = "seen"
        async with aiodist.local(2) as groups:
            first = aiodist.breakpoint(groups[0])
            await asyncio.gather(first, aiodist.breakpoint(groups[1]))
        assert marker

    run(all_of_them())
    assert "(Pdb) 'seen'\n" in capsys.readouterr().out


def test_twice(run, script, capsys) -> None:
    script("continue", "continue")

    async def main(group: aiodist.Group) -> None:
        for _ in range(2):
            await aiodist.breakpoint(group)
            await group.barrier()

    async def all_of_them() -> None:
        async with aiodist.local(2) as groups:
            await asyncio.gather(*[main(group) for group in groups])

    run(all_of_them())
    assert capsys.readouterr().out.count("the others wait") == 2


def test_without_input_all_ranks_hear_of_it(run, monkeypatch) -> None:
    async def all_of_them() -> None:
        async with aiodist.local(2) as groups:
            here, there = await asyncio.gather(
                *[aiodist.breakpoint(group) for group in groups], return_exceptions=True
            )
            assert isinstance(here, RuntimeError)
            assert "aiodist run --stdin 0" in str(here)
            assert isinstance(there, aiodist.CollectiveAbortedError)

    monkeypatch.setattr(sys, "stdin", None)
    run(all_of_them())
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        run(all_of_them())
    run(all_of_them())  # it is closed now


@pytest.mark.parametrize("rank", [2, -1, True, "0"])
def test_what_is_no_rank(run, rank) -> None:
    async def all_of_them() -> None:
        async with aiodist.local(2) as groups:
            with pytest.raises(
                (TypeError, ValueError), match=r"rank=-?[0-9] is not a rank|rank is a rank"
            ):
                aiodist.breakpoint(groups[0], rank)

    run(all_of_them())
