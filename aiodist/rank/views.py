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
    another way, and CoordinatorLostError if the coordinator is gone for good.
    """
    news = asyncio.Event()
    waiting: int | None = None  # the number of waiting ranks; None: not told yet
    failed: AiodistError | None = None  # why the coordinator tells nothing more

    def told(reply: Message | AiodistError) -> None:
        nonlocal waiting, failed
        if isinstance(reply, Waiting):
            waiting = reply.count
        elif isinstance(reply, AiodistError):
            failed = reply
        news.set()

    number = actor.control.subscribe(WatchWaiting(), told)
    actor.changed[news.set] = None
    seen: View | None = None
    try:
        while not actor.is_over:
            news.clear()
            view = _view(actor, waiting or 0)
            # A coordinator that is away tells the number once it is back.
            if view != seen and (waiting is not None or actor.control.is_away):
                seen = view
                yield view
            elif failed is not None:
                raise failed
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
