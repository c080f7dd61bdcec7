"""The key-value store of one group.

A ttl is counted from the last write of its key; a write without one keeps the key for good.

What a member's last writes gave is remembered: one that is asked for again, since the answer was
lost with the connection, is not carried out again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from aiodist.membership.effects import Send
from aiodist.wire.limits import (
    MAX_PENDING,
    MAX_STORE_BYTES,
    MAX_STORE_KEYS,
    MAX_TEXT,
    MAX_WRITES,
)
from aiodist.wire.messages import (
    Failed,
    Failure,
    Message,
    Result,
    StoreAdd,
    StoreCancel,
    StoreChanged,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreRequest,
    StoreSet,
    StoreWait,
    StoreWatch,
    StoreWrite,
)

StoreMessage = StoreRequest | StoreCancel

_NUMBER = re.compile(rb"-?[0-9]{1,19}")


class _Refused(Exception):
    def __init__(self, kind: Failure, text: str) -> None:
        self.reply = Failed(kind, text[:MAX_TEXT])


@dataclass(slots=True)
class _Listener:
    """A wait (`missing`: keys that do not exist yet) or a watch (`missing` is None), from the time
    `since` on."""

    conn: int
    request: int
    keys: tuple[str, ...]
    missing: set[str] | None
    since: float


@dataclass(slots=True)
class KeyValueStore:
    """Values, and who waits for them.

    `set_ttl(key, seconds)` is called to have `expire(key)` called that much later; None calls
    that off. `changed(key, value)` is called after each change (None: deleted), and `answered`
    with what a write gave that changed something. `now()` is the time.
    """

    set_ttl: Callable[[str, float | None], None]
    changed: Callable[[str, bytes | None], None] = lambda key, value: None
    answered: Callable[[str, int, Result], None] = lambda member, request, result: None
    now: Callable[[], float] = lambda: 0.0
    max_bytes: int = MAX_STORE_BYTES
    max_keys: int = MAX_STORE_KEYS
    max_pending: int = MAX_PENDING
    nbytes: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, dict[int, Result]] = field(default_factory=dict)
    _changes: int = 0
    _listeners: dict[int, dict[int, _Listener]] = field(default_factory=dict)
    _by_key: dict[str, dict[tuple[int, int], _Listener]] = field(default_factory=dict)

    def handle(
        self, conn: int, request: int, message: StoreMessage, member: str = ""
    ) -> list[Send]:
        """Carry out one request; the reply comes first, then what others are told of it.

        `member`: who asks, for requests that may be asked again.
        """
        sends: list[Send] = []
        reply: Message | None
        try:
            if member and isinstance(message, StoreWrite):
                reply = self._write_once(conn, request, message, member, sends)
            else:
                reply = self._handle(conn, request, message, sends)
        except _Refused as refused:
            reply = refused.reply
        return sends if reply is None else [Send(conn, request, reply), *sends]

    def _write_once(
        self, conn: int, request: int, message: StoreWrite, member: str, sends: list[Send]
    ) -> Message | None:
        # Numbers of requests are the member's own and outlive its connection, so the same number
        # means the same write, said again. Only what changed something is remembered: a write that
        # failed, or a compare_set that did not match, may as well be tried again.
        known = self.answers.get(member, {}).get(request)
        if known is not None:
            return known
        before = self._changes
        reply = self._handle(conn, request, message, sends)
        if self._changes != before and isinstance(reply, Result):
            self.remember(member, request, reply)
            self.answered(member, request, reply)
        return reply

    def remember(self, member: str, request: int, result: Result) -> None:
        """What a write gave. No member has more than MAX_WRITES of them under way."""
        answers = self.answers.setdefault(member, {})
        answers[request] = result
        if len(answers) > MAX_WRITES:
            del answers[next(iter(answers))]

    def forget(self, member: str) -> None:
        """`member` is gone for good."""
        self.answers.pop(member, None)

    def restore(self, key: str, value: bytes | None) -> None:
        """A change from the log: nobody is told."""
        old = self.values.pop(key, None)
        if old is not None:
            self.nbytes -= _size(key, old)
        if value is not None:
            self.values[key] = value
            self.nbytes += _size(key, value)

    def expire(self, key: str) -> list[Send]:
        """The ttl of `key` is over."""
        sends: list[Send] = []
        self._delete(key, sends)
        return sends

    def waits(self, conn: int) -> list[tuple[float, list[str]]]:
        """The waits of a connection: since when, and for which keys, which do not exist."""
        return [
            (one.since, sorted(one.missing))
            for one in self._listeners.get(conn, {}).values()
            if one.missing is not None
        ]

    def drop(self, conn: int) -> None:
        """Forget the waits and watches of a connection."""
        for request in list(self._listeners.get(conn, ())):
            self._unlisten(conn, request)

    def clear(self) -> None:
        """Forget everything, the ttls included."""
        for key in self.values:
            self.set_ttl(key, None)
            self.changed(key, None)
        self.values.clear()
        self.answers.clear()
        self._listeners.clear()
        self._by_key.clear()
        self.nbytes = 0

    def _handle(
        self, conn: int, request: int, message: StoreMessage, sends: list[Send]
    ) -> Message | None:
        match message:
            case StoreGet(key):
                return Result(self.values.get(key))
            case StoreSet(key, value, ttl):
                self._set(key, value, ttl, sends)
                return Result(None)
            case StoreAdd(key, amount, ttl):
                total = self._number(key) + amount
                if not -(2**63) <= total < 2**63:
                    raise _Refused(
                        Failure.NOT_AN_INTEGER,
                        f"adding {amount} to {key!r} gives {total}, which is over 64 bits",
                    )
                self._set(key, b"%d" % total, ttl, sends)
                return Result(total)
            case StoreCompareSet(key, expected, desired, ttl):
                if self.values.get(key) != expected:
                    return Result(False)
                self._set(key, desired, ttl, sends)
                return Result(True)
            case StoreDelete(key):
                return Result(self._delete(key, sends))
            case StoreWait(keys):
                missing = {key for key in keys if key not in self.values}
                if not missing:
                    return Result(None)
                self._listen(_Listener(conn, request, keys, missing, self.now()))
                return None
            case StoreWatch(key, again):
                self._listen(_Listener(conn, request, (key,), None, self.now()))
                # The connection was away: what has changed meanwhile was told to nobody. The value
                # that there is now stands for all of it.
                if again:
                    sends.append(Send(conn, request, StoreChanged(key, self.values.get(key))))
                return Result(None)
            case _:
                self._unlisten(conn, message.request)
                return None

    def _number(self, key: str) -> int:
        value = self.values.get(key, b"0")
        if _NUMBER.fullmatch(value) is None:
            raise _Refused(
                Failure.NOT_AN_INTEGER,
                f"add needs a decimal number in {key!r}, not the {len(value)} bytes it holds",
            )
        return int(value)

    def _set(self, key: str, value: bytes, ttl: float | None, sends: list[Send]) -> None:
        old = self.values.get(key)
        if old is None and len(self.values) >= self.max_keys:
            raise _Refused(
                Failure.TOO_LARGE,
                f"the store holds {len(self.values)} keys, its limit: delete some",
            )
        grown = _size(key, value) if old is None else len(value) - len(old)
        nbytes = self.nbytes + grown
        if nbytes > self.max_bytes:
            raise _Refused(
                Failure.TOO_LARGE,
                f"setting {key!r} to {len(value)} bytes would make the store {nbytes} bytes, over "
                f"its limit of {self.max_bytes}: delete keys, or keep bulk data elsewhere",
            )
        # From here on nothing is refused: a write is done as a whole, or not at all.
        self.values[key] = value
        self.nbytes = nbytes
        self.set_ttl(key, ttl)
        self._changes += 1
        self.changed(key, value)
        self._tell(key, value, sends)

    def _delete(self, key: str, sends: list[Send]) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.nbytes -= _size(key, value)
        self.set_ttl(key, None)
        self._changes += 1
        self.changed(key, None)
        self._tell(key, None, sends)
        return True

    def _tell(self, key: str, value: bytes | None, sends: list[Send]) -> None:
        # The change is sent to each watcher, encoded once for all of them. It is not handed on from
        # one member of a host to the others: whoever handed it on may die with it, and a watcher
        # must miss no change. What is large belongs in a broadcast.
        for listener in list(self._by_key.get(key, {}).values()):
            if listener.missing is None:
                sends.append(Send(listener.conn, listener.request, StoreChanged(key, value)))
            elif value is None:
                listener.missing.add(key)
            else:
                listener.missing.discard(key)
                if not listener.missing:
                    sends.append(Send(listener.conn, listener.request, Result(None)))
                    self._unlisten(listener.conn, listener.request)

    def _listen(self, listener: _Listener) -> None:
        # Listeners are found by two ways: by connection and request, for who cancels or goes away,
        # and by key, for a write, which must not ask thousands of watchers of other keys. A wait
        # for many keys stands at each of them, and knows those that are missing: a write costs what
        # waits for that key, and a wait is over when its set is empty, without a look at the
        # others.
        mine = self._listeners.setdefault(listener.conn, {})
        # Numbers tell the answers apart: two of one number could not be ended one by one.
        if listener.request in mine:
            raise _Refused(Failure.INVALID, f"request {listener.request} is already under way here")
        if len(mine) >= self.max_pending:
            raise _Refused(
                Failure.TOO_LARGE,
                f"{len(mine)} waits and watches are under way here, the limit: end some first",
            )
        mine[listener.request] = listener
        for key in listener.keys:
            self._by_key.setdefault(key, {})[listener.conn, listener.request] = listener

    def _unlisten(self, conn: int, request: int) -> None:
        mine = self._listeners.get(conn, {})
        listener = mine.pop(request, None)
        if listener is None:
            return
        if not mine:
            del self._listeners[conn]
        for key in set(listener.keys):
            others = self._by_key[key]
            del others[conn, request]
            if not others:
                del self._by_key[key]


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)
