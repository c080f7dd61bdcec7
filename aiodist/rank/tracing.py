"""Traces: what a rank did, and when, written to a file at its end, for `aiodist trace` to join.

Nothing is measured unless the environment variable AIODIST_TRACE names a directory when the rank
connects. Each rank then keeps its last operations in memory, and compares its clock with the
coordinator's again and again, so that the files of all ranks can be brought into one clock: it asks
for the time, and takes it that the coordinator has read its clock halfway between question and
answer. That is wrong by at most half of the time between the two.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone
from aiodist.errors import AiodistError
from aiodist.rank.actor import RankActor
from aiodist.recorder import Entry
from aiodist.trace import Scope
from aiodist.transports.surroundings import tell_time_exactly
from aiodist.wire.messages import Clock, ClockRequest
from aiodist.work import Work

log = logging.getLogger("aiodist.trace")

VARIABLE = "AIODIST_TRACE"
"""The environment variable: the directory that ranks write their files into."""

FORMAT = 2
"""Raised with every change of the files."""

MOST = 200_000
"""How many operations of a rank are kept at most: the last ones."""

BURST = 8
"""So many times in a row the coordinator is asked for the time; the fastest answer counts."""
PAUSE = 5.0
"""Seconds between two such bursts: clocks of hosts drift by microseconds in that time."""
PATIENCE = 2.0
"""Seconds after which an answer says nothing about clocks any more."""

_tracers: set[Tracer] = set()
_numbers = itertools.count(1)


def watch(actor: RankActor) -> None:
    """`actor` has joined a group: where the environment asks for traces, it is traced."""
    where = os.environ.get(VARIABLE)
    if not where:
        return
    try:
        Path(where).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s=%s: %s; nothing is traced", VARIABLE, where, error)
        return
    if not _tracers:
        _write_when_terminated()
    _tracers.add(Tracer(actor, Path(where)))


class Tracer:
    """What one rank does, from what its recorder remembers."""

    def __init__(self, actor: RankActor, directory: Path) -> None:
        self._actor = actor
        self._directory = directory
        self._number = next(_numbers)
        self._events: list[tuple[float, str]] = []  # what became of the group, and when
        self._told: set[str] = set()  # those of them that were told
        self._clock: list[tuple[float, float, float]] = []
        """When, what the coordinator's clock is ahead by, and by how much that is wrong at most."""
        tell_time_exactly(actor.loop)
        actor.endpoint.recorder.keep(MOST)
        actor.endpoint.spawn(self._compare_clocks(), "aiodist trace: clock")
        actor.changed.add(self._look)
        self._pass_on = actor.control.on_event
        actor.control.on_event = self._on_event
        self._look()

    def _on_event(self, event: ControlEvent) -> None:
        if isinstance(event, CoordinatorGone):
            self._events.append((self._actor.loop.time(), f"coordinator away: {event.reason}"))
        elif isinstance(event, CoordinatorBack):
            self._events.append((self._actor.loop.time(), "coordinator back"))
        self._pass_on(event)

    def _look(self) -> None:
        """The members of the group have changed, or this rank is about to leave."""
        actor = self._actor
        epoch = actor.view.epoch
        texts = [f"epoch {epoch} of {actor.view.group!r}: {len(actor.view.members)} ranks"]
        texts += [f"rank {rank} lost: {reason}" for rank, reason in actor.lost.items()]
        texts += [f"rank {rank} left" for rank in sorted(actor.left)]
        if actor.is_over:
            texts.append("leaves")
            actor.when_gone(self.write)
        for text in texts:
            if (key := f"{epoch} {text}") not in self._told:
                self._told.add(key)
                self._events.append((actor.loop.time(), text))

    async def _compare_clocks(self) -> None:
        while True:
            samples = [one for _ in range(BURST) if (one := await self._compared()) is not None]
            if samples:
                self._clock.append(min(samples, key=lambda one: one[2]))
            await asyncio.sleep(PAUSE)

    async def _compared(self) -> tuple[float, float, float] | None:
        """One comparison; None: the coordinator is away, or slow."""
        now = self._actor.loop.time
        asked = now()
        try:
            reply = await self._actor.control.request(ClockRequest(), PATIENCE)
        except (AiodistError, TimeoutError):
            return None
        answered = now()
        assert isinstance(reply, Clock)
        return answered, reply.seconds - (asked + answered) / 2, (answered - asked) / 2

    def write(self) -> None:
        """Write the file, once and for all. Never raises: the rank has ended by now."""
        if self not in _tracers:
            return
        _tracers.discard(self)
        actor = self._actor
        group = quote(actor.view.group, safe="")[:100]
        rank = actor.people[actor.endpoint.rank].rank
        name = f"{group}-rank{rank}-pid{os.getpid()}-{self._number}.json"
        new = self._directory / f"{name}.new"
        try:  # beside, and put in place at once: so no file is half of one
            new.write_text(json.dumps(self._contents()), encoding="utf-8")
            new.replace(self._directory / name)
        except OSError as error:
            log.warning("the trace of rank %d could not be written: %s", rank, error)

    def _contents(self) -> dict[str, Any]:
        actor = self._actor
        recorder, now = actor.endpoint.recorder, actor.loop.time()
        scopes: dict[bytes, tuple[int, Scope]] = {}
        rows = [
            [scopes.setdefault(one.scope.id, (len(scopes), one.scope))[0], *_row(one)]
            for one in recorder.entries(now, self._pending(), MOST)
        ]
        own = actor.people[actor.endpoint.rank]
        return {
            "aiodist": FORMAT,
            "group": actor.view.group,
            "rank": own.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": own.host_id,
            "name": own.name,
            "complete": len(rows) < MOST,
            "clock": self._clock,
            "events": self._events,
            "scopes": [
                [*scope[:4], scope.id.hex(), self._transports(scope)]
                for _, scope in scopes.values()
            ],
            "operations": rows,
        }

    def _transports(self, scope: Scope) -> list[str | None]:
        """What leads to the ranks of a group; None: nothing was needed."""
        endpoint = self._actor.endpoint
        return [endpoint.transport_to(root) for root in endpoint.recorder.roots.get(scope.id, ())]

    def _pending(self) -> Iterator[Work[Any]]:
        for context in self._actor.contexts:
            yield from [*context.calls.pending, *context.p2p.pending]


def _row(one: Entry) -> tuple[Any, ...]:
    """An operation: op, tag, number, call, peer, bytes, start, end, state, error, plans."""
    tag = one.tag if one.tag is None or isinstance(one.tag, (str, int)) else repr(one.tag)
    return (
        one.op, tag, one.seq, one.call, one.peer, one.nbytes, one.started,
        one.started + one.seconds, one.state, one.error, one.plans,
    )  # fmt: skip


def _write_all() -> None:
    for tracer in list(_tracers):
        tracer.write()


def _write_when_terminated() -> None:
    """SIGTERM, by which launchers stop the ranks of a run that has failed, would end this process
    before it has written what everybody wants to see. Where the program handles it, it ends in an
    orderly way, and so does the trace."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    _write_all()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


atexit.register(_write_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tracers.clear)  # they are the parent's
