"""Who did what, in one clock, with the lines of the program: a record of one run, as text.

A task of the program is looked at in every turn of the loop. As long as it is at the same line and
waits for the same thing, that is one wait. What does not wait is known from the history of
operations.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from aiodist.rank.whereabouts import is_users, wait_of
from aiodist.testing.history import HistoryEntry
from aiodist.testing.virtual_loop import Process
from aiodist.testing.wires import Node

MOST_TEXT = 70
"""Characters of a line of the program, and of a value, at most."""
MOST_LINES = 60
"""Lines of a story, at most."""


@dataclass
class StoryEvent:
    """Something that a rank did, or that happened to it. `rank` is None for the coordinator.

    `how`: how it ended; "" if there is nothing to say. `ended`: when; None if it never did.
    """

    time: float
    rank: int | None
    place: tuple[str, int]
    text: str
    how: str = ""
    ended: float | None = None


@dataclass
class _Wait:
    """What a task waits for now. Nothing of the program is kept longer than until the next turn."""

    event: StoryEvent
    frame: FrameType
    line: int
    awaited: object  # by the line of the program
    future: Any  # that the task waits for, maybe within the library
    names: dict[str, int]


class TaskWatch:
    """Follows the tasks of the program. Call `turn` in every turn of the loop of the ranks, and
    `made` for every new task.

    `begun(rank, number)` is called when a rank begins to wait for the `number`-th time. `tell`:
    whether values are to be described, which takes time.
    """

    def __init__(
        self, nodes: Sequence[Node], begun: Callable[[int, int], None], *, tell: bool
    ) -> None:
        self.events: list[StoryEvent] = []
        self.waits = [0] * len(nodes)
        """How often each rank has begun to wait."""
        self._nodes = nodes
        self._begun = begun
        self._tell = tell
        self._tasks: dict[asyncio.Task[Any], int] = {}  # of the program, with their ranks
        self._waiting: dict[asyncio.Task[Any], _Wait] = {}

    def follow(self, task: asyncio.Task[Any], rank: int) -> None:
        """Follow a task in which the program of `rank` runs."""
        self._tasks[task] = rank

    def made(self, process: Process, task: asyncio.Task[Any]) -> None:
        """Follow a new task of the process of a rank if the program has made it."""
        for rank, node in enumerate(self._nodes):
            if node is process and is_users(task.get_coro()):
                self.follow(task, rank)

    def turn(self) -> None:
        """Look at all tasks of the program."""
        for task, rank in list(self._tasks.items()):
            if self._nodes[rank].alive:
                self._look(rank, task)  # which may kill it
            alive = self._nodes[rank].alive
            if not alive and task in self._waiting:
                self._waiting.pop(task).event.how = "killed meanwhile"
            if task.done() or not alive:
                del self._tasks[task]

    def close(self) -> None:
        """Forget the tasks. The events stay."""
        self._tasks.clear()
        self._waiting.clear()

    def _look(self, rank: int, task: asyncio.Task[Any]) -> None:
        before = self._waiting.get(task)
        if task.done():
            if before is not None:
                self._end(task, before, None)
            return
        found, future = wait_of(task), getattr(task, "_fut_waiter", None)
        frame, awaited = found or (None, None)
        if before is not None:
            line = None if frame is None else frame.f_lineno
            if (frame, awaited, line) == (before.frame, before.awaited, before.line):
                before.future = future
                return
            self._end(task, before, frame)
        if frame is None or _waits_for_tasks(future) or _has_not_begun(task):
            return
        self.waits[rank] += 1
        place = (frame.f_code.co_filename, frame.f_lineno)
        event = StoryEvent(task.get_loop().time(), rank, place, source(place), "never ends")
        self.events.append(event)
        names = {name: id(value) for name, value in frame.f_locals.items()} if self._tell else {}
        self._waiting[task] = _Wait(event, frame, frame.f_lineno, awaited, future, names)
        self._begun(rank, self.waits[rank])

    def _end(self, task: asyncio.Task[Any], wait: _Wait, frame: FrameType | None) -> None:
        del self._waiting[task]
        wait.event.ended = task.get_loop().time()
        wait.event.how = self._how(wait, frame) if self._tell else ""

    def _how(self, wait: _Wait, frame: FrameType | None) -> str:
        future = wait.future
        is_own = not inspect.iscoroutine(wait.awaited)  # else the library may handle its errors
        if is_own and future is not None and future.done():
            if future.cancelled():
                return "cancelled"
            error = getattr(future, "_exception", None)  # `exception` would count as a look
            if error is not None:
                return shown_error(error)
        if frame is not wait.frame:
            return ""
        changed = [
            f"{name} = {shown(value)}"
            for name, value in wait.frame.f_locals.items()
            if wait.names.get(name) != id(value) and not name.startswith("_")
        ]
        return ", ".join(text for text in changed if " object at 0x" not in text)


def merged(
    events: Sequence[StoryEvent],
    entries: Sequence[HistoryEntry],
    ranks: Mapping[str, int],
    start: float,
) -> list[StoryEvent]:
    """Add the operations of `entries` that no wait of `events` shows.

    `ranks` maps processes to ranks. What happened before `start` is left out.
    """
    known = {(event.rank, event.place, event.time) for event in events}
    extra = [
        StoryEvent(
            entry.started, ranks[entry.process], entry.place, source(entry.place), _ended(entry)
        )
        for entry in entries
        if entry.process in ranks
        and entry.place[0]
        and (ranks[entry.process], entry.place, entry.started) not in known
    ]
    # Operations come first, because waits and faults are seen when a turn of the loop is over.
    found = [event for event in [*extra, *events] if event.time >= start]
    return sorted(found, key=lambda event: event.time)


def _waits_for_tasks(awaited: Any) -> bool:
    """Tell whether a task waits for other tasks of the program, which are followed themselves."""
    children = getattr(awaited, "_children", (awaited,))  # those of `gather`
    return all(isinstance(one, asyncio.Task) and is_users(one.get_coro()) for one in children)


def _has_not_begun(task: asyncio.Task[Any]) -> bool:
    coroutine = task.get_coro()
    return inspect.iscoroutine(coroutine) and (
        inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
    )


def _ended(entry: HistoryEntry) -> str:
    if entry.error is not None:
        return shown_error(entry.error)
    return {"start": "never ends", "done": "", "cancelled": "cancelled"}[entry.end]


def until(events: Sequence[StoryEvent], end: float) -> list[StoryEvent]:
    """Leave out what began after `end`, and how waits ended that were not over then."""
    kept = [event for event in events if event.time <= end]
    return [
        replace(event, how="still waits") if (event.ended or 0.0) > end else event for event in kept
    ]


def told(events: Sequence[StoryEvent], start: float) -> list[str]:
    """Return a line for each event. What is done alike at the same time, or one after the other,
    is one line."""
    lines: list[tuple[StoryEvent, list[int | None]]] = []
    for event in events:
        # Packets take time, so what ranks do at the same time has no order among them.
        for last, who in reversed(lines):
            same = (event.place, event.text, event.how) == (last.place, last.text, last.how)
            if same and event.place[0]:
                who.append(event.rank)
                break
            if last.time < event.time or event.rank in who:
                lines.append((event, [event.rank]))
                break
        else:
            lines.append((event, [event.rank]))
    return [_line(event, who, start) for event, who in lines]


def _line(event: StoryEvent, who: list[int | None], start: float) -> str:
    ranks = sorted({rank for rank in who if rank is not None})
    name = "coordinator" if not ranks else f"rank {ranks[0]}"
    if len(ranks) > 1:
        name = f"ranks {', '.join(map(str, ranks))}"
    file, line = event.place
    where = f"{Path(file).name}:{line}  " if file else ""
    how = f"  -> {event.how}" if event.how else ""
    if len(who) > len(ranks) > 0:
        how = f"  ({len(who)} times){how}"
    return f"{(event.time - start) * 1e3:10.1f} ms  {name:<11}  {where}{event.text}{how}"


def source(place: tuple[str, int]) -> str:
    """Return the text of a line of the program."""
    return linecache.getline(*place).strip()[:MOST_TEXT]


def shown(value: Any) -> str:
    """Return a value as a short text."""
    return _short(repr, value)


def shown_error(error: BaseException) -> str:
    """Return an exception as a short text."""
    text = _short(str, error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(describe: Callable[[Any], str], value: object) -> str:
    try:
        text = " ".join(describe(value).split())
    except Exception as error:  # the program's own `__repr__` or `__str__` may raise anything
        text = f"<{type(value).__name__}: {type(error).__name__} in {describe.__name__}>"
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
