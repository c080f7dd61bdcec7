"""A rank that waits for long says so: in its log, and to the coordinator.

One timer for each rank looks every few seconds at what is pending. So this costs an operation
nothing. Only operations with a deadline count, because a receive may wait for ever without trouble.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from aiodist.engine import deadlines, failures
from aiodist.errors import AiodistError
from aiodist.rank import whereabouts
from aiodist.rank.actor import RankActor
from aiodist.rank.doings import Pending, missing_in, pending_in, wait_of
from aiodist.recorder import name_of
from aiodist.wire.activity import LONG_WAIT, Seen, Stalled
from aiodist.wire.channels import channel_of
from aiodist.wire.limits import MAX_WAITS
from aiodist.wire.messages import Message, StoreWait
from aiodist.wire.recovery import Vote
from aiodist.work import SENDS

log = logging.getLogger("aiodist.group")

PERIOD = 2.5
"""Seconds between two looks."""

ASK_SECONDS = 1.0
"""Seconds for ranks that seem to be missing to say that they have called it."""

ANSWER_SECONDS = 2.0
"""Seconds for the coordinator to say what others are doing. It gives them one second to answer."""

MOST_TOLD = 4
"""How many of the missing ranks are told with what they are doing."""


class _Long(NamedTuple):
    """A wait: of an operation, or (`request`) for the coordinator."""

    seconds: float
    pending: Pending | None = None
    request: Message | None = None


class Patience:
    """Watches the waits of one rank, over all of its groups and epochs."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self._loop = actor.loop
        self._told: set[Hashable] = set()  # the waits that were told: Works, numbers of requests
        self._reports = False  # the coordinator has heard of one
        self._moved = actor.endpoint.traffic.payload  # what has moved by now
        self._moved_at = self._loop.time()  # when that last changed
        self._timer = self._loop.call_later(PERIOD, self._look)
        actor.changed[self._changed] = None

    def _changed(self) -> None:
        if self._actor.is_over:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(PERIOD, self._look)
        found = self._found()
        stuck = {key for key, one in found.items() if self._is_stuck(one)}
        self._told &= found.keys()
        if fresh := stuck - self._told:
            self._told |= fresh
            waits = {key: found[key] for key in fresh}
            self._actor.endpoint.spawn(self._tell(waits), "aiodist patience")
        elif self._reports and not stuck:
            self._reports = False
            self._actor.control.tell(Stalled(0.0))

    def _found(self) -> dict[Hashable, _Long]:
        """Return what has waited for long and has a deadline. Also note whether data has moved."""
        moved = self._actor.endpoint.traffic.payload
        if moved != self._moved:
            self._moved, self._moved_at = moved, self._loop.time()
        found: dict[Hashable, _Long] = {}
        for context in self._actor.contexts:
            for one in pending_in(context):
                seconds = one.work.elapsed
                if seconds >= LONG_WAIT and _has_deadline(one):
                    found[one.work] = _Long(seconds, pending=one)
        for number, message in self._actor.control.older_than(LONG_WAIT).items():
            found[number] = _Long(LONG_WAIT, request=message)
        return found

    def _is_stuck(self, one: _Long) -> bool:
        """Tell whether it waits for another rank to call it, or no data moves.

        A large array that still moves on a slow line does not count.
        """
        if one.pending is None or self._loop.time() - self._moved_at >= LONG_WAIT:
            return True
        work, context, op, _ = one.pending
        return context.p2p.is_unmatched(work) if op is None else bool(missing_in(one.pending))

    async def _tell(self, fresh: Mapping[Hashable, _Long]) -> None:
        try:
            await self._find_out(fresh)
        except Exception as error:  # a rank must not leave because it cannot say why it waits
            log.error("group %r: no news of a long wait", self._actor.view.group, exc_info=error)

    async def _find_out(self, fresh: Mapping[Hashable, _Long]) -> None:
        """Log what has waited for long and is still stuck, and tell the coordinator."""
        # Others may have called it without this rank knowing, because a tree of ranks tells one
        # rank little about most others.
        for one in fresh.values():
            if one.pending is not None and one.pending.op is not None and one.pending.op.seq >= 0:
                deadlines.ask_whether_entered(one.pending.context.calls, one.pending.op)
        await asyncio.sleep(ASK_SECONDS)
        found = {key: one for key, one in self._found().items() if self._is_stuck(one)}
        self._told -= fresh.keys() - found.keys()  # it goes on, and may wait again
        left = sorted(
            (found[key] for key in fresh.keys() & found.keys()), key=lambda one: -one.seconds
        )
        if left and not self._actor.is_over:
            # Before the answer, because the wait may be over by then.
            first = left[0].pending
            roots = [] if first is None else [first.context.ranks[one] for one in missing_in(first)]
            where = self._where(first)
            seen = await self._report(left)
            texts = seen if first is None else {root: seen.get(root, "") for root in roots}
            if first is not None and first.op is not None and not roots:
                texts = await self._silent(first)  # all have called it, so one may have stopped
            log.warning("%s%s", self._text(left, texts), where)

    async def _report(self, waits: list[_Long]) -> Mapping[int, str]:
        """Tell the coordinator. Returns what the ranks are doing that the first wait is for, by
        root."""
        control = self._actor.control
        if control.is_away or not control.is_open:
            return {}
        ranks = {root: rank for rank, root in enumerate(self._actor.roots)}
        told = [wait_of(one.pending, ranks) for one in waits if one.pending is not None]
        try:
            reply = control.begin(Stalled(waits[0].seconds, tuple(told[:MAX_WAITS])))
            self._reports = True
            await asyncio.wait({reply}, timeout=ANSWER_SECONDS)
            seen = reply.result() if reply.done() else None
        except AiodistError:  # this rank or the coordinator goes meanwhile
            return {}
        if not isinstance(seen, Seen):
            return {}
        roots = self._actor.roots
        pairs = zip(seen.ranks, seen.texts, strict=False)
        return {roots[rank]: text for rank, text in pairs if rank < len(roots)}

    async def _silent(self, pending: Pending) -> Mapping[int, str]:
        """Ask the coordinator which ranks of a group do not answer. Returns what is known of them,
        by root."""
        told: asyncio.Future[Mapping[int, str]] = self._loop.create_future()

        def tell(texts: Mapping[int, str]) -> None:
            if not told.done():
                told.set_result(texts)

        self._actor.ask(pending.context.ranks, tell, ANSWER_SECONDS)
        await asyncio.wait({told}, timeout=ANSWER_SECONDS)
        return failures.silent(told.result()) if told.done() else {}

    def _text(self, waits: list[_Long], texts: Mapping[int, str]) -> str:
        """Compose the text. `texts`: what the missing ranks of the first wait do, by root ("": not
        known)."""
        first, actor = waits[0], self._actor
        if first.pending is not None:
            work, context, _, _ = first.pending
            group, epoch, roots = context.group, context.epoch, context.ranks
            called = name_of(work.op, work.tag, work.seq)
            otherwise = ": all ranks have called it, and no data moves"
        else:
            group, epoch, roots = actor.view.group, actor.view.epoch, actor.roots
            called, otherwise = _request_text(first.request), ""
        ranks = {rank: texts[root] for rank, root in enumerate(roots) if root in texts}
        text = f"group {group!r} epoch {epoch}: {called} has waited for {first.seconds:.0f} s"
        text += f" for {_ranks_text(ranks)}" if ranks else otherwise
        if absence := actor.control.absence:
            text += f"; {absence}"
        if len(waits) > 1:
            text += f"; {len(waits) - 1} more of this rank wait, too"
        return text

    def _where(self, pending: Pending | None) -> str:
        """Return the line of the program that waits."""
        if pending is not None:
            place = whereabouts.of_work(self._loop, pending.work)
        else:
            place = next(iter(whereabouts.of_tasks(self._loop)), "")
        return f"; at {place}" if place else ""


def watch(actor: RankActor) -> None:
    """Watch the waits of `actor`, which has joined a group.

    Participants of channels are left out, because they wait for each other by design.
    """
    if not channel_of(actor.view.group):
        Patience(actor)


def _has_deadline(one: Pending) -> bool:
    """Receives and probes have none."""
    if one.op is not None:
        return one.op.timer is not None
    return one.work.op in SENDS or one.work in one.context.requests


def _request_text(message: Message | None) -> str:
    if isinstance(message, Vote):
        return f"{message.purpose} #{message.number}"
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__.removeprefix("Store")).lower()
    keys = message.keys if isinstance(message, StoreWait) else (getattr(message, "key", ""),)
    return f"store.{name}({', '.join(map(repr, keys[:MOST_TOLD]))})"


def _ranks_text(ranks: Mapping[int, str]) -> str:
    """ "rank 2 (in no operation), rank 3"."""
    shown = [
        f"rank {rank} ({text})" if text else f"rank {rank}"
        for rank, text in sorted(ranks.items())[:MOST_TOLD]
    ]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranks" if more > 0 else "")
