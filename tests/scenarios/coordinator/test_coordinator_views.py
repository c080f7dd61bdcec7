"""Who is told what has changed in a view holds the whole of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from aiodist.control.events import CoordinatorBack
from aiodist.control.standing import Standing
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import ProtocolError
from aiodist.membership.seating import Seating
from aiodist.wire.messages import EpochView, JoinRequest, MemberInfo, Message
from aiodist.wire.recovery import NextView, Purpose, Vote

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]


async def shrink(members: list[Any], number: int = 0) -> list[EpochView]:
    """All vote to go on: what each is answered."""
    context = members[0].view.context
    votes = [one.client.begin(Vote(context, number, Purpose.SHRINK)) for one in members]
    async with asyncio.timeout(30):
        views = await asyncio.gather(*votes)
    for member, view in zip(members, views, strict=True):
        member.view = view
    return views


async def back(member: Any) -> None:
    while not isinstance(await member.event(), CoordinatorBack):
        pass


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[type[Message]]:
    """The kinds of all that a coordinator sends."""
    kinds: list[type[Message]] = []
    send = Seating.send

    def noted(self: Any, conn: int, request: int, message: Message) -> None:
        kinds.append(type(message))
        send(self, conn, request, message)

    monkeypatch.setattr(Seating, "send", noted)
    return kinds


def test_a_loss_costs_no_view(play: Play, sent: list[type[Message]]) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        members = await site.members(coordinator.address, 4)
        names = {member.id: member for member in members[0].view.members}
        members.pop(1).client.abort()
        for member in members:
            await member.event()
        views = await shrink(members)
        assert views[0] == views[1] == views[2]
        assert [member.rank for member in views[0].members] == [0, 1, 2]
        assert [names[member.id].rank for member in views[0].members] == [0, 2, 3]
        assert (sent.count(EpochView), sent.count(NextView)) == (4, 3)


def test_a_coordinator_that_knows_nothing_learns_the_whole_view(
    play: Play, forgetful: Any, sent: list[type[Message]]
) -> None:
    @play
    async def scenario(site: Any) -> None:
        await forgetful.start()
        members = await site.members(forgetful.address, 3)
        members.pop(0).client.abort()
        for member in members:
            await member.event()
        await shrink(members)
        await forgetful.restart()
        for member in members:
            await back(member)
        [group] = forgetful.coordinator.status()["groups"]
        ids = [member.id for member in members[0].view.members]
        assert (group["epoch"], [one["id"] for one in group["members"]]) == (2, ids)
        assert [view.epoch for view in await shrink(members)] == [3, 3]
        assert sent.count(EpochView) == 3
        await forgetful.coordinator.stop()


def test_a_change_that_makes_no_sense_is_refused() -> None:
    infos = [MemberInfo(rank, f"id-{rank}", "", 0, "", {}, 0.0, "", ()) for rank in range(3)]
    view = EpochView("g", 1, tuple(infos))
    standing = Standing(JoinRequest(group="g", id="id-0", size=3), view)
    change = NextView.between(view, EpochView("g", 2, tuple(infos[:2])))
    assert standing.after(change) == EpochView("g", 2, tuple(infos[:2]))
    with pytest.raises(ProtocolError, match=r"coordinator sends a change .* makes no sense"):
        standing.after(replace(change, digest=bytes(16)))
    standing.take(standing.after(change))
    with pytest.raises(ProtocolError, match="a change of another view"):
        standing.after(change)
