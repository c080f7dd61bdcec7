"""How a group fares: what `Group.views` gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiodist.errors import AiodistError
from aiodist.rank.actor import Seat, as_member
from aiodist.types import View
from aiodist.wire.messages import Message
from aiodist.wire.recovery import Waiting, WatchWaiting


async def views(seat: Seat) -> AsyncIterator[View]:
    """The membership now, and again after every change; what changes while nobody asks is seen
    in one. Ends when this rank leaves."""
    news = asyncio.Event()
    waiting = 0

    def told(reply: Message | AiodistError) -> None:
        nonlocal waiting
        if isinstance(reply, Waiting):
            waiting = reply.count
            first.set()
            news.set()
        else:  # there is no coordinator any more
            first.set()

    first = asyncio.Event()
    if seat.control.is_away:
        first.set()  # how many wait is seen once it is back
    number = seat.control.subscribe(WatchWaiting(), told)
    seat.changed.add(news.set)
    seen: View | None = None
    try:
        await first.wait()
        while not seat.is_over:
            news.clear()
            view = _view(seat, waiting)
            if view != seen:
                seen = view
                yield view
            else:
                await news.wait()
    finally:
        seat.changed.discard(news.set)
        seat.control.unsubscribe(number)


def _view(seat: Seat, waiting: int) -> View:
    gone = {*seat.lost, *seat.left}
    return View(
        epoch=seat.view.epoch,
        members=tuple(as_member(one) for one in seat.view.members if one.rank not in gone),
        lost=dict(seat.lost),
        left=tuple(sorted(seat.left)),
        waiting=waiting,
    )
