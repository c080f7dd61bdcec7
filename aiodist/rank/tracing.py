"""Traces: what a rank did, and when, written to a file at its end, for `aiodist trace` to join.

Nothing is measured unless the environment variable AIODIST_TRACE names a directory when the rank
connects. Each rank then keeps its last operations in memory. It also compares its clock with the
coordinator's again and again, so that the files of all ranks can be put on one clock. The file says
with which coordinator, because the groups of one process may have different ones. The rank asks for
the time, and assumes that the coordinator read its clock halfway between question and answer. The
error is at most half of the time between the two.
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
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone
from aiodist.environment import TRACE
from aiodist.errors import AiodistError
from aiodist.files import quoted, replace
from aiodist.rank.actor import RankActor
from aiodist.recorder import Entry
from aiodist.trace import Scope
from aiodist.transports.surroundings import tell_time_exactly
from aiodist.wire.messages import Clock, ClockRequest
from aiodist.work import Work

log = logging.getLogger("aiodist.trace")

VARIABLE = TRACE
"""The environment variable: the directory for the files of all ranks."""

FORMAT = 3
"""Raised with every change of the files' format."""

MOST = 200_000
"""How many operations of a rank are kept: the last ones."""

BURST = 8
"""How often in a row the coordinator is asked for the time. The fastest answer counts."""
PAUSE = 5.0
"""Seconds between two bursts. The clocks of hosts drift by microseconds in that time."""
PATIENCE = 2.0
"""Seconds after which an answer is useless for comparing clocks."""

_tracers: set[Tracer] = set()
_numbers = itertools.count(1)


def watch(actor: RankActor) -> None:
    """Trace `actor`, which has joined a group, if the environment asks for traces."""
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
    """What one rank does, from what its recorder keeps."""

    def __init__(self, actor: RankActor, directory: Path) -> None:
        self._actor = actor
        self._directory = directory
        self._number = next(_numbers)
        self._events: list[tuple[float, str]] = []  # what happened to the group, and when
        self._told: set[str] = set()  # the events that were noted
        self._clock: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        """By the start of a coordinator: time, offset of the coordinator's clock, and greatest
        error of that, in seconds."""
        tell_time_exactly(actor.loop)
        actor.endpoint.recorder.keep(MOST)
        actor.endpoint.spawn(self._compare_clocks(), "aiodist trace: clock")
        actor.changed[self._look] = None
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
        """Note changes of the members, or that this rank is about to leave."""
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
            start = self._actor.control.start
            samples = [one for _ in range(BURST) if (one := await self._compared()) is not None]
            # The next start of a coordinator may be on another host.
            if samples and self._actor.control.start == start:
                name, number = start
                self._clock[f"{name} {number}"].append(min(samples, key=lambda one: one[2]))
            await asyncio.sleep(PAUSE)

    async def _compared(self) -> tuple[float, float, float] | None:
        """Compare clocks once; None if the coordinator is away or slow."""
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
        """Write the file, once. Never raises, because the rank has ended."""
        if self not in _tracers:
            return
        _tracers.discard(self)
        actor = self._actor
        rank = actor.people[actor.endpoint.rank].rank
        name = f"{quoted(actor.view.group)}-rank{rank}-pid{os.getpid()}-{self._number}.json"
        try:
            replace(self._directory / name, json.dumps(self._contents()))
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
        """Return the transports to the ranks of a group; None: no link was needed."""
        endpoint = self._actor.endpoint
        return [endpoint.transport_to(root) for root in endpoint.recorder.roots.get(scope.id, ())]

    def _pending(self) -> Iterator[Work[Any]]:
        for context in self._actor.contexts:
            yield from [*context.calls.pending, *context.p2p.pending, *context.requests]


def _row(one: Entry) -> tuple[Any, ...]:
    """Make the row of an operation: op, tag, number, call, peer, bytes, start, end, state, error,
    plans."""
    tag = one.tag if one.tag is None or isinstance(one.tag, (str, int)) else repr(one.tag)
    return (
        one.op, tag, one.seq, one.call, one.peer, one.nbytes, one.started,
        one.started + one.seconds, one.state, one.error, one.plans,
    )  # fmt: skip


def _write_all() -> None:
    for tracer in list(_tracers):
        tracer.write()


def _write_when_terminated() -> None:
    """Write the traces on SIGTERM, unless the program handles it.

    Launchers stop the ranks of a failed run by SIGTERM, which would end this process before it has
    written its trace. A program that handles the signal ends in order, and its trace is written
    then.
    """
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
