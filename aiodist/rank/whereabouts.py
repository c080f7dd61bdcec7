"""Which lines of the user's program a thread, and the tasks of an event loop, are at."""

from __future__ import annotations

import asyncio
import bdb
import linecache
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from aiodist.composing import CoroutineRest
from aiodist.work import Work

MOST_LINES = 4
"""How many places are told of one thread, or of the tasks of one loop."""

MOST_TEXT = 200
"""The most characters of one place."""

_OWN = f"{Path(__file__).parents[1]}/"
_LIBRARY = Path(bdb.__file__).parent
_ASYNCIO = f"{Path(asyncio.__file__).parent}/"
_LOOPS = tuple([f"{_ASYNCIO}{name}.py" for name in ("base_events", "events", "runners")])
"""The files of event loops. Their callers are not what the loop is busy with."""
_HIDDEN = tuple(
    [f"{_LIBRARY}/{name}.py" for name in ("bdb", "cmd", "contextlib", "pdb", "selectors")]
)


def of_thread(ident: int) -> tuple[str, ...]:
    """Return what a thread executes now: the lines of the callback that its loop runs, innermost
    first.

    Returns nothing if the thread waits. Call this from another thread, or from a signal handler.
    """
    frame = sys._current_frames().get(ident)
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_LINES:
        code = frame.f_code
        if code.co_filename in _LOOPS:
            break
        if not _is_ours(code):
            lines.append(_place(code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def of_tasks(loop: asyncio.AbstractEventLoop, pending: Sequence[Work[Any]] = ()) -> tuple[str, ...]:
    """Return what the tasks of a loop wait for: the user's innermost line in each.

    Call this from the thread of the loop. Tasks that wait for the operations `pending` come first,
    in that order, because a reader looks for these, and not for the main loop of a web server. If
    no task awaits an operation itself (it is shielded, or a thread waits for it), the line of its
    call is given. Then come tasks that wait for something else of aiodist, and then all others.
    """
    waiting, inside, outside = _tasks(loop)
    wholes = _wholes(loop)
    lines = [place for work in pending if (place := _of_work(work, waiting, wholes))]
    distinct = list(dict.fromkeys([*lines, *inside, *outside]))
    if len(distinct) > MOST_LINES:
        distinct[MOST_LINES - 1 :] = [f"and {len(distinct) - MOST_LINES + 1} other places"]
    return tuple(distinct)


def of_work(loop: asyncio.AbstractEventLoop, work: Work[Any]) -> str:
    """Return the line that waits for an operation, or has called it; "" if that is not known.

    Call this from the thread of the loop.
    """
    return _of_work(work, _tasks(loop)[0], _wholes(loop))


def of_caller() -> str:
    """Return the line of the program that has called into aiodist, for the end of a text:
    "; at app/main.py:7 in main", or "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"; at {_place(frame.f_code, frame.f_lineno)}"


def caller() -> tuple[str, int]:
    """Return the file and the line that has called into aiodist in this turn of the loop; ("", 0)
    if aiodist has done so itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        if frame.f_code.co_filename in _LOOPS:
            return "", 0
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _of_work(work: Work[Any], waiting: dict[int, str], wholes: dict[int, Work[Any]]) -> str:
    if id(work) in waiting:
        return waiting[id(work)]
    called = getattr(work, "_made_at", None)
    if called is not None and not _is_ours(called[0]):
        return _place(*called)
    return _of_work(wholes[id(work)], waiting, wholes) if id(work) in wholes else ""


def _wholes(loop: asyncio.AbstractEventLoop) -> dict[int, Work[Any]]:
    """Return the Works of `split` and the like, by the id of what their tasks wait for."""
    rests = [(task, task.get_coro()) for task in asyncio.all_tasks(loop)]
    return {id(_awaits(task)): rest.work for task, rest in rests if isinstance(rest, CoroutineRest)}


def _awaits(task: asyncio.Task[Any]) -> Any:
    """Return what a task waits for."""
    return getattr(task, "_fut_waiter", None)


def _tasks(loop: asyncio.AbstractEventLoop) -> tuple[dict[int, str], list[str], list[str]]:
    """Return the lines that wait for a Work, by its id; for something else of aiodist; for other
    things."""
    waiting: dict[int, str] = {}
    inside: list[str] = []
    outside: list[str] = []
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    # The main task is the oldest. Names like "Task-12" count upwards.
    for task in sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name())):
        place, is_inside = _waits_at(task.get_coro())
        if place is not None:
            awaited = _awaits(task)
            children = getattr(awaited, "_children", None)  # those of asyncio.gather
            for future in children if isinstance(children, list) else (awaited,):
                waiting.setdefault(id(future), place)
            is_inside = is_inside or isinstance(awaited, Work)
            (inside if is_inside else outside).append(place)
    return waiting, inside, outside


def of_task(task: asyncio.Task[Any]) -> str:
    """Return the user's innermost line that a task waits at, with its text; "" if there is none."""
    found = wait_of(task)
    if found is None:
        return ""
    code, line = found[0].f_code, found[0].f_lineno
    text = linecache.getline(code.co_filename, line).strip()[:MOST_TEXT]
    return f"{_place(code, line)}: {text}" if text else _place(code, line)


def wait_of(task: asyncio.Task[Any]) -> tuple[FrameType, object] | None:
    """Return the user's innermost frame that a task waits in, and what that frame awaits; None if
    there is none."""
    found = None
    for frame, awaited in _frames(task.get_coro()):
        if not _is_ours(frame.f_code):
            found = frame, awaited
    return found


def is_users(coroutine: Any) -> bool:
    """Tell whether a coroutine is the user's, and neither aiodist's nor asyncio's."""
    code = getattr(coroutine, "cr_code", None)
    return code is not None and not _is_ours(code)


def _waits_at(coroutine: Any) -> tuple[str | None, bool]:
    """Return the user's innermost place in a task, and whether it waits there for aiodist."""
    place, is_inside = None, False
    for code, line in _awaited(coroutine):
        if not _is_ours(code):
            place, is_inside = _place(code, line), False
        elif code.co_filename.startswith(_OWN):
            is_inside = True
    return place, is_inside


def _awaited(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield the places of a coroutine and of what it awaits, outermost first."""
    for frame, _ in _frames(coroutine):
        yield frame.f_code, frame.f_lineno


def _frames(coroutine: Any) -> Iterator[tuple[FrameType, object]]:
    """Yield the frames of a coroutine and of what it awaits, outermost first, each with what it
    awaits."""
    for _ in range(100):
        for kind in ("cr", "gi", "ag"):
            frame: FrameType | None = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                coroutine = getattr(coroutine, f"{kind}_await" if kind != "gi" else "gi_yieldfrom")
                yield frame, coroutine
                break
        else:
            return


def _is_ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith((_OWN, _ASYNCIO)) or name in _HIDDEN or "/uvloop/" in name


def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{line} in {code.co_qualname}"[:MOST_TEXT]
