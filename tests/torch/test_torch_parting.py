"""Ranks part from the store they met at before it goes, so that they can meet there again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import aiodist
from aiodist_torch import parting
from aiodist_torch.parting import Parting

Ranks = Callable[..., list[Any]]
Start = Callable[..., Any]


class Kept:
    """Stands for torch's store."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    stores: list[Any] = []
    monkeypatch.setattr(parting, "_kept", stores)
    return stores


async def test_who_leaves_waits_until_rank_0_has_let_go(kept: list[Any]) -> None:
    async with aiodist.local(3) as groups:
        store = Kept()
        partings = [Parting(group, store) for group in groups]
        alive = weakref.ref(store)
        del store
        waiting = [asyncio.ensure_future(each.settle()) for each in partings[1:]]
        for group in groups[1:]:
            await group.store.get("x")  # asked after, answered before
        assert not any(each.done() for each in waiting)
        assert alive() is not None
        await partings[0].settle()
        assert alive() is None
        await asyncio.gather(*waiting)
        assert not kept


async def test_rank_0_keeps_the_store_for_who_did_not_wait(
    kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiodist.local(3) as groups:
        store = Kept()
        partings = [Parting(group, store) for group in groups]
        monkeypatch.setattr(parting, "PATIENCE", 0.001)
        for each in (*partings[1:], partings[0]):
            await each.settle()
        assert kept == [store]


async def test_a_rank_whose_patience_ends_while_rank_0_lets_go_waits_for_that(
    kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiodist.local(2) as groups:
        partings = [Parting(group, Kept()) for group in groups]
        asked = asyncio.Event()
        mine, hers = (group.store for group in groups)
        settle, look = mine.set, hers.get

        async def when_asked(*args: Any, **kwargs: Any) -> None:
            await asked.wait()
            await settle(*args, **kwargs)

        async def asking(*args: Any, **kwargs: Any) -> bytes | None:
            found = await look(*args, **kwargs)
            asked.set()
            return found

        monkeypatch.setattr(mine, "set", when_asked)
        monkeypatch.setattr(hers, "get", asking)
        first = asyncio.ensure_future(partings[0].settle())
        while await look(parting._FATE) is None:
            pass
        monkeypatch.setattr(parting, "PATIENCE", 0.001)
        await partings[1].settle()
        assert (asked.is_set(), await look(parting._SETTLED)) == (True, b"")
        await first
        assert not kept


async def test_who_has_lost_the_group_does_not_wait(kept: list[Any]) -> None:
    async with aiodist.local(2) as groups:
        partings = [Parting(group, Kept()) for group in groups]
        for group in groups:
            group.abort("no more")
        for each in partings:
            await each.settle()
        assert not kept


def test_the_file_where_ranks_met_is_there_when_they_meet_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Torch removes it with the last store, and may do so while a quick rank opens it again."""
    file = tmp_path / "meeting"

    def meet() -> dist.Store:
        return dist.FileStore(str(file), 2)

    for _ in range(2):
        ranks(2, lambda group: group.barrier().wait(), store=meet)
        assert file.exists()
    ranks(2, lambda group: group.barrier().wait())  # they meet elsewhere
    assert not file.exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_groups_at_one_port(job: Start, tmp_path: Path) -> None:
    assert job("rounds.py", 4, str(tmp_path)).finish() == ["met\n"] * 4
