"""The flight recorder: the last operations of every rank of this process, as text.

Recording is always on. `enable` says where dumps go after an error and on a signal. `dump` writes
one now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from aiodist.engine import deadlines
from aiodist.environment import FLIGHT_RECORDER
from aiodist.errors import in_words
from aiodist.files import quoted, replace, write_all
from aiodist.membership.group import ranks_text
from aiodist.rank import whereabouts
from aiodist.rank.actor import RankActor
from aiodist.recorder import Entry, name_of
from aiodist.wire.averaging import averager_of
from aiodist.wire.channels import channel_of
from aiodist.work import Work

log = logging.getLogger("aiodist.flight_recorder")

VARIABLE = FLIGHT_RECORDER
"""The environment variable: a directory, or "stderr"."""

SHORT = 20
"""How many of the last operations an error shows on stderr."""

PAUSE = 10.0
"""Seconds between two dumps of a rank after errors, because errors come in crowds."""

__all__ = ["VARIABLE", "disable", "dump", "enable"]


class _Dumps:
    """The target of dumps. One for each process, because signals are."""

    def __init__(self) -> None:
        self.where: str | None = None  # as given to `enable`; None: no dumps
        self.directory: Path | None = None  # None: dumps go to stderr
        self.handles_signal = False  # we handle SIGUSR1
        self.before: Any = None  # the handler before ours
        self.decided = False  # the environment is not asked any more


_settings = _Dumps()
_actors: weakref.WeakSet[RankActor] = weakref.WeakSet()


def enable(where: str | os.PathLike[str] = "stderr", *, on_signal: bool = True) -> None:
    """Dump the last operations after errors, and when SIGUSR1 arrives (with `on_signal`).

    The errors are PeerLostError, CollectiveTimeoutError, MismatchError and ProtocolError of an
    operation, and an Exception by which the program leaves the group of `connect`. Each rank writes
    at most one dump in 10 seconds. Errors inside a channel or an averager do not count, because
    these expect others to leave. `where` is a directory or "stderr". In a directory each rank
    writes one file "GROUP-rankR-pidP.txt" with its newest dump. On stderr an error shows the last
    20 operations, and the signal shows all.

    A handler for SIGUSR1 that your program had installed is called after ours. The environment
    variable AIODIST_FLIGHT_RECORDER, if it is not empty, does the same at the first `connect`.

    Raises OSError if the directory cannot be made, and ValueError for `on_signal` outside of the
    main thread.

    For example::

        aiodist.flight_recorder.enable(on_signal=False)
        aiodist.flight_recorder.disable()
    """
    directory = None
    if str(where) != "stderr":
        directory = Path(where)
        directory.mkdir(parents=True, exist_ok=True)
    if on_signal and not _settings.handles_signal and hasattr(signal, "SIGUSR1"):
        before = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, _on_signal)
        _settings.before, _settings.handles_signal = before, True
    _settings.where, _settings.directory = str(where), directory
    _settings.decided = True


def disable() -> None:
    """Stop dumping, and put back a signal handler that `enable` has replaced."""
    _settings.where = _settings.directory = None
    _settings.decided = True
    if _settings.handles_signal:
        if signal.getsignal(signal.SIGUSR1) is _on_signal:
            signal.signal(signal.SIGUSR1, _settings.before or signal.SIG_DFL)
        _settings.handles_signal = False


def dump(file: TextIO | None = None) -> None:
    """Write what was recorded of all ranks of this process to `file` (None: sys.stderr).

    For example::

        await group.barrier()
        text = io.StringIO()
        aiodist.flight_recorder.dump(text)
        assert "barrier" in text.getvalue()
    """
    text = "".join([_text(actor, "asked for") for actor in _all_actors()])
    (sys.stderr if file is None else file).write(text or "no rank of aiodist in this process\n")


def watch(actor: RankActor) -> None:
    """Make `actor`, which has joined a group, part of dumps. For the engine."""
    _actors.add(actor)
    recorder, group = actor.endpoint.recorder, actor.view.group
    # These expect others to leave, and take what is missing from someone else.
    recorder.is_own = bool(channel_of(group) or averager_of(group))
    if not _settings.decided:
        _settings.decided = True
        _enable_by_environment(os.environ.get(VARIABLE, ""))
    weak = weakref.ref(actor)
    last = -PAUSE

    def failed(error: BaseException) -> None:
        nonlocal last
        owner = weak()
        if owner is None or _settings.where is None or owner.loop.time() - last < PAUSE:
            return
        last = owner.loop.time()
        _write(owner, in_words(error))

    recorder.failed = failed


def _enable_by_environment(where: str) -> None:
    if not where:
        return
    in_main = threading.current_thread() is threading.main_thread()
    try:
        enable(where, on_signal=in_main)
    except OSError as error:
        log.warning("%s=%s: %s; dumps go to stderr", VARIABLE, where, error)
        enable("stderr", on_signal=in_main)


def _all_actors() -> list[RankActor]:
    alive = [actor for actor in _actors if not actor.is_over]
    return sorted(
        alive, key=lambda actor: (actor.view.group, actor.view.epoch, actor.endpoint.rank)
    )


def _on_signal(number: int, frame: FrameType | None) -> None:
    for actor in _all_actors():
        _write(actor, signal.Signals(number).name, everything=True)
    if callable(_settings.before):
        _settings.before(number, frame)


def _write(actor: RankActor, reason: str, *, everything: bool = False) -> None:
    """Write a dump. Never raises, because the caller is in the middle of something else."""
    try:
        if _settings.directory is not None:
            replace(_settings.directory / _file_name(actor), _text(actor, reason))
        else:
            text = _text(actor, reason, most=None if everything else SHORT)
            # Not sys.stderr, because a signal may come while the program writes to it.
            write_all(2, text.encode(errors="replace"))
    except Exception as error:
        log.warning("the flight recorder could not be written: %s: %s", type(error).__name__, error)


def _file_name(actor: RankActor) -> str:
    return f"{quoted(actor.view.group)}-rank{_rank(actor)}-pid{os.getpid()}.txt"


def _rank(actor: RankActor) -> int:
    """Return the rank in the newest epoch. While the first epoch begins, the root is the rank."""
    return actor.endpoint.rank if actor.context is None else actor.context.rank


def _text(actor: RankActor, reason: str, *, most: int | None = None) -> str:
    """Describe one rank, for people."""
    now = actor.loop.time()
    clock = time.time() - now
    size = len(actor.view.members)
    lines = [
        f"aiodist flight recorder: group {actor.view.group!r} epoch {actor.view.epoch} rank "
        f"{_rank(actor)} of {size}, pid {os.getpid()}, at {_time(clock + now)}: {reason}"
    ]
    recorded = list(actor.endpoint.recorder.entries(now, _pending(actor)))
    waiting = _waiting(actor)
    shown = _last(recorded, most)
    if len(shown) < len(recorded):
        lines.append(f"  ({len(recorded) - len(shown)} operations before are not shown)")
    lines += [f"  {_line(actor, entry, clock, waiting)}" for entry in shown]
    if not recorded:
        lines.append("  no operation")
    for title, places in _places(actor):
        lines += [f"  {title} {place}" for place in places]
    return "\n".join(lines) + "\n"


def _last(entries: list[Entry], most: int | None) -> list[Entry]:
    """Return the last entries, and earlier ones that still wait."""
    if most is None or len(entries) <= most:
        return entries
    before = [entry for entry in entries[:-most] if entry.state == "waits"]
    return before + entries[-most:]


def _line(
    actor: RankActor, entry: Entry, clock: float, waiting: dict[tuple[bytes, str], list[int]]
) -> str:
    root = actor.view.context
    where = (
        "" if entry.scope.id == root else f"  in {entry.scope.group!r} epoch {entry.scope.epoch}"
    )
    text = f"{_time(clock + entry.started)}  {_duration(entry.seconds):>9}  {entry.state:<9}"
    text += f"  {entry.name}{where}"
    if entry.call:
        text += f"  {entry.call}"
    if entry.nbytes:
        text += f"  {entry.nbytes} bytes"
    if entry.error:
        text += f"  {entry.error}"
    missing = waiting.get((entry.scope.id, entry.name)) if entry.state == "waits" else None
    if missing:
        text += f"  not heard of: {ranks_text(missing)}"
    return text


def _pending(actor: RankActor) -> list[Work[Any]]:
    with contextlib.suppress(RuntimeError):  # the loop may go on meanwhile, in its own thread
        return [
            work
            for one in actor.contexts
            for work in [*one.pending, *one.p2p.pending, *one.requests]
        ]
    return []


def _waiting(actor: RankActor) -> dict[tuple[bytes, str], list[int]]:
    """Return which ranks have not entered the collectives that wait, as far as known."""
    found = {}
    with contextlib.suppress(RuntimeError):  # the loop may go on meanwhile, in its own thread
        for one in actor.contexts:
            for op in list(one.calls.ops.values()):
                name = name_of(op.work.op, op.tag, op.seq)
                found[one.id, name] = deadlines.missing(one.calls, op)
    return found


def _places(actor: RankActor) -> list[tuple[str, tuple[str, ...]]]:
    places = [("its event loop is at", whereabouts.of_thread(actor.thread))]
    with contextlib.suppress(RuntimeError):
        found = whereabouts.of_tasks(actor.loop, _pending(actor))
        places.append(("a task waits at", found))
    return places


def _time(seconds: float) -> str:
    whole = time.strftime("%H:%M:%S", time.localtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}"


def _duration(seconds: float) -> str:
    if seconds < 5e-5:  # it would show as 0.0 ms
        return "at once"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_actors.clear)  # they are the parent's
