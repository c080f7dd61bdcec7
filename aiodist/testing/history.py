"""What happened to every operation of every rank, and checks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiodist.buffers.encoding import encode
from aiodist.buffers.tokens import NO_ARRAYS
from aiodist.errors import AiodistError
from aiodist.rank.whereabouts import caller
from aiodist.trace import Scope

SAME_EVERYWHERE = frozenset({"all_reduce", "broadcast", "all_gather", "barrier", "split"})
"""Collectives whose result is the same on all ranks."""

NOT_DUE = frozenset({"recv", "probe"})
"""Operations that may wait for ever without a deadline."""


@dataclass(slots=True)
class HistoryEntry:
    """One operation of one rank. Times are in seconds of the loop.

    `place` is the file and the line of the program that called it; ("", 0) if that is not known.
    `end` is "start" while it goes on, then "done", "failed" or "cancelled".
    """

    process: str
    scope: Scope
    op: str
    tag: object
    seq: int | None
    started: float
    number: int
    place: tuple[str, int]
    end: str = "start"
    ended: float | None = None
    digest: str = ""
    error: BaseException | None = None
    deadline: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Names the collective: the same on all ranks that take part."""
        return self.scope.group, self.scope.epoch, self.scope.id, self.op, self.tag, self.seq

    def __str__(self) -> str:
        until = "…" if self.ended is None else f"{self.ended:.6f}"
        what = f"{self.error!r}" if self.error is not None else self.digest
        return (
            f"{self.started:.6f} to {until} rank {self.scope.rank} of {self.scope.group!r} epoch "
            f"{self.scope.epoch}: {self.op} tag {self.tag!r} #{self.seq} {self.end} {what}"
        )


@dataclass
class History:
    """A trace hook (see `aiodist.trace`) that records operations, and checks of the record.

    `now` tells the time, and `process` the running process. A dead process has the name "", and is
    not recorded.
    """

    now: Callable[[], float]
    process: Callable[[], str] = lambda: "here"
    entries: list[HistoryEntry] = field(default_factory=list)
    _pending: dict[Any, HistoryEntry] = field(default_factory=dict)

    def __call__(self, scope: Scope, point: str, work: Any, value: Any) -> None:
        process = self.process()
        if not process:
            return
        if point == "start":
            number, place = len(self.entries), caller()
            entry = HistoryEntry(
                process, scope, work.op, work.tag, work.seq, self.now(), number, place
            )
            self.entries.append(entry)
            self._pending[work] = entry
            return
        if work not in self._pending:
            return
        entry = self._pending[work]
        entry.seq = work.seq
        # The value is not kept, for it may be the user's array, which changes: a digest of it is.
        if point in ("before_complete", "failed", "cancelled"):
            del self._pending[work]
            entry.end = "done" if point == "before_complete" else point
            entry.ended = self.now()
            if point == "before_complete":
                entry.tag = work.tag
                entry.digest = digest_of(value)
            entry.error = value if point == "failed" else None

    def expect(self, work: Any, seconds: float) -> None:
        """Require `work` to end within `seconds` of its start."""
        entry = self._pending.get(work)
        if entry is not None:
            entry.deadline = entry.started + seconds

    def digest(self) -> str:
        """Return a digest of the record: two runs with the same digest went the same way."""
        summary = hashlib.blake2b(digest_size=8)
        for entry in self.entries:
            line = (entry.process, entry.scope[:4], entry.op, entry.tag, entry.seq, entry.started,
                    entry.end, entry.ended, entry.digest, type(entry.error).__name__)  # fmt: skip
            summary.update(repr(line).encode())
        return summary.hexdigest()

    def problems(
        self,
        *,
        is_alive: Callable[[str], bool] = lambda process: True,
        stopped: Callable[[str], float] = lambda process: 0.0,
        injected: Iterable[object] = (),
    ) -> list[str]:
        """Return what must not have happened: see `docs/testing.md`.

        `is_alive` tells for which processes everything must have ended. `stopped` tells for how
        many seconds a process could not run. `injected` has errors that a test has raised.
        """
        return [
            *self._different(),
            *self._foreign(set(map(id, injected))),
            *self._unended(is_alive),
            *self._late(stopped),
            *self._reused(),
        ]

    def _different(self) -> Iterator[str]:
        """Yield collectives that ranks completed with different values."""
        # The core of what collectives promise. This needs no model of the result, because ranks
        # that completed the same operation are compared with each other.
        first: dict[tuple[object, ...], HistoryEntry] = {}
        for entry in self.entries:
            if entry.end == "done" and entry.op in SAME_EVERYWHERE and entry.seq is not None:
                other = first.setdefault(entry.key, entry)
                if other.digest != entry.digest:
                    yield f"ranks completed with different values: {other}; {entry}"

    def _reused(self) -> Iterator[str]:
        """Yield numbers that one rank used twice."""
        # Operations match by (tag, number). If a rank used one twice, its second call could get
        # what others have sent for the first: a wrong result that looks right.
        seen: dict[tuple[object, ...], HistoryEntry] = {}
        for entry in self.entries:
            if entry.seq is not None and entry.seq >= 0 and entry.op not in NOT_DUE:
                tag = (type(entry.tag), entry.tag)
                key = entry.process, entry.scope, tag, entry.seq
                other = seen.setdefault(key, entry)
                if other is not entry:
                    yield f"one number for two operations: {other}; {entry}"

    def _unended(self, is_alive: Callable[[str], bool]) -> Iterator[str]:
        for entry in self.entries:
            if entry.end == "start" and is_alive(entry.process):
                yield f"never ended: {entry}"

    def _late(self, stopped: Callable[[str], float]) -> Iterator[str]:
        for entry in self.entries:
            if entry.deadline is not None and entry.ended is not None:
                late = entry.ended - entry.deadline - stopped(entry.process)
                if late > 0:
                    yield f"ended {late:.6f} s after its deadline: {entry}"

    def _foreign(self, injected: set[int]) -> Iterator[str]:
        """Yield errors that are not aiodist's. `injected`: the ids of others that may come."""
        for entry in self.entries:
            is_known = isinstance(entry.error, AiodistError) or id(entry.error) in injected
            if entry.error is not None and not is_known:
                yield f"an error that is not one of aiodist's: {entry}"


def digest_of(value: Any) -> str:
    """Return a short digest of a value: arrays by dtype and content, all else as it is.

    Ranks may rightly get one result in different forms, so these do not count. A list is as good as
    a tuple, a torch tensor as a numpy array, and a list of arrays as one array of their elements.
    Objects that travel as pickles count by their type only. Pickles of equal objects differ,
    because they depend on which strings are interned, and on the order of sets.
    """
    parts: list[memoryview] = []
    try:
        encoded = encode(_formless(value, parts))
    except (TypeError, ValueError, RecursionError):  # it is too deep, or contains itself
        return type(value).__name__
    summary = hashlib.blake2b(encoded.meta, digest_size=8)
    for part in parts:
        summary.update(part)
    return summary.hexdigest()


def _formless(value: Any, parts: list[memoryview]) -> Any:
    """Return a tree as lists, and append the contents of its arrays to `parts`.

    Tuples stand for all else: ``(dtype, bytes)`` for arrays, ``("dict", key, value, …)`` for dicts.
    """
    if isinstance(value, dict):
        items = [part for item in value.items() for part in item]
        return ("dict", *_formless_items(items, parts))
    if isinstance(value, (list, tuple)):  # an Envelope, too
        made = _formless_items(value, parts)
        if made and all(type(item) is tuple and len(item) == 2 for item in made):
            dtypes, sizes = zip(*made, strict=True)
            return (dtypes[0], sum(sizes)) if len({*dtypes}) == 1 else made
        return made
    try:
        encoded = encode(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if not encoded.specs:
        return value
    parts += encoded.buffers
    return encoded.specs[0].name, encoded.nbytes


def _formless_items(items: Iterable[Any], parts: list[memoryview]) -> list[Any]:
    return [item if type(item) in NO_ARRAYS else _formless(item, parts) for item in items]
