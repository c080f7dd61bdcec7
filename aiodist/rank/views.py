"""The state of a group: what `Group.views` gives."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator

from aiodist.errors import AiodistError
from aiodist.rank.actor import RankActor, as_member
from aiodist.types import View
from aiodist.wire.messages import Message
from aiodist.wire.recovery import Waiting, WatchWaiting


async def views(actor: RankActor) -> AsyncIterator[View]:
    """Yield the membership now, and again after every change. Ends when this rank leaves in order.

    Changes between two steps are seen as one. Raises GroupClosedError if this rank leaves in
    another way.
    """
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
    if actor.control.is_away:
        first.set()  # the number of waiting ranks comes once it is back
    number = actor.control.subscribe(WatchWaiting(), told)
    actor.changed[news.set] = None
    seen: View | None = None
    try:
        await first.wait()
        while not actor.is_over:
            news.clear()
            view = _view(actor, waiting)
            if view != seen:
                seen = view
                yield view
            else:
                await news.wait()
        assert actor.ended is not None
        if not actor.ended.in_order:
            raise copy.copy(actor.ended)
    finally:
        actor.changed.pop(news.set, None)
        actor.control.unsubscribe(number)


def _view(actor: RankActor, waiting: int) -> View:
    gone = {*actor.lost, *actor.left}
    return View(
        epoch=actor.view.epoch,
        members=tuple(as_member(one) for one in actor.view.members if one.rank not in gone),
        lost=dict(actor.lost),
        left=tuple(sorted(actor.left)),
        waiting=waiting,
    )
