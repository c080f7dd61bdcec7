"""The key-value store of one group.

A ttl counts from the last write of its key; a write without a ttl keeps the key for good. The store
remembers the results of each member's last writes. If an answer was lost with the connection, the
member asks again, and the write is not carried out twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from aiodist.membership.effects import SendMessage
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


class _StoreRefused(Exception):
    def __init__(self, kind: Failure, text: str) -> None:
        self.reply = Failed(kind, text[:MAX_TEXT])


@dataclass(slots=True)
class _Listener:
    """A wait (`missing`: the keys that do not exist yet) or a watch (None), since the time
    `since`."""

    conn: int
    request: int
    keys: tuple[str, ...]
    missing: set[str] | None
    since: float


@dataclass(slots=True)
class KeyValueStore:
    """Keys, values, and the requests that wait for them.

    `set_ttl(key, seconds)` has `expire(key)` called that much later; None cancels it. `changed(key,
    value)` is called after each change (None: deleted), and `answered` with the result of each
    write that changed something. `now()` is the time.
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
    ) -> list[SendMessage]:
        """Carry out one request. The reply comes first, then messages to others about the change.

        `member`: the sender, for requests that it may repeat.
        """
        sends: list[SendMessage] = []
        reply: Message | None
        try:
            if member and isinstance(message, StoreWrite):
                reply = self._write_once(conn, request, message, member, sends)
            else:
                reply = self._handle(conn, request, message, sends)
        except _StoreRefused as refused:
            reply = refused.reply
        return sends if reply is None else [SendMessage(conn, request, reply), *sends]

    def _write_once(
        self, conn: int, request: int, message: StoreWrite, member: str, sends: list[SendMessage]
    ) -> Message | None:
        # Request numbers outlive the connection of their member, so the same number means the same
        # write. Only writes that changed something are remembered, because others can safely be
        # tried again.
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
        """Remember the result of a write. No member has more than MAX_WRITES in flight."""
        answers = self.answers.setdefault(member, {})
        answers[request] = result
        if len(answers) > MAX_WRITES:
            del answers[next(iter(answers))]

    def forget(self, member: str) -> None:
        self.answers.pop(member, None)

    def restore(self, key: str, value: bytes | None) -> None:
        """Apply a change from the log, and tell no member."""
        old = self.values.pop(key, None)
        if old is not None:
            self.nbytes -= _size(key, old)
        if value is not None:
            self.values[key] = value
            self.nbytes += _size(key, value)

    def expire(self, key: str) -> list[SendMessage]:
        """Delete `key`, because its ttl is over."""
        sends: list[SendMessage] = []
        self._delete(key, sends)
        return sends

    def waits(self, conn: int) -> list[tuple[float, list[str]]]:
        """The waits of a connection: when each began, and its missing keys."""
        return [
            (one.since, sorted(one.missing))
            for one in self._listeners.get(conn, {}).values()
            if one.missing is not None
        ]

    def drop(self, conn: int) -> None:
        for request in list(self._listeners.get(conn, ())):
            self._unlisten(conn, request)

    def clear(self) -> None:
        for key in self.values:
            self.set_ttl(key, None)
            self.changed(key, None)
        self.values.clear()
        self.answers.clear()
        self._listeners.clear()
        self._by_key.clear()
        self.nbytes = 0

    def _handle(
        self, conn: int, request: int, message: StoreMessage, sends: list[SendMessage]
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
                    raise _StoreRefused(
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
                # The connection was away and missed changes. The present value stands for all of
                # them.
                if again:
                    sends.append(
                        SendMessage(conn, request, StoreChanged(key, self.values.get(key)))
                    )
                return Result(None)
            case _:
                self._unlisten(conn, message.request)
                return None

    def _number(self, key: str) -> int:
        value = self.values.get(key, b"0")
        if _NUMBER.fullmatch(value) is None:
            raise _StoreRefused(
                Failure.NOT_AN_INTEGER,
                f"add needs a decimal number in {key!r}, not the {len(value)} bytes it holds",
            )
        return int(value)

    def _set(self, key: str, value: bytes, ttl: float | None, sends: list[SendMessage]) -> None:
        old = self.values.get(key)
        if old is None and len(self.values) >= self.max_keys:
            raise _StoreRefused(
                Failure.TOO_LARGE,
                f"the store holds {len(self.values)} keys, its limit: delete some",
            )
        grown = _size(key, value) if old is None else len(value) - len(old)
        nbytes = self.nbytes + grown
        if nbytes > self.max_bytes:
            raise _StoreRefused(
                Failure.TOO_LARGE,
                f"setting {key!r} to {len(value)} bytes would make the store {nbytes} bytes, over "
                f"its limit of {self.max_bytes}: delete keys, or keep bulk data elsewhere",
            )
        # Nothing is refused from here on, so a write is done as a whole or not at all.
        self.values[key] = value
        self.nbytes = nbytes
        self.set_ttl(key, ttl)
        self._changes += 1
        self.changed(key, value)
        self._tell(key, value, sends)

    def _delete(self, key: str, sends: list[SendMessage]) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.nbytes -= _size(key, value)
        self.set_ttl(key, None)
        self._changes += 1
        self.changed(key, None)
        self._tell(key, None, sends)
        return True

    def _tell(self, key: str, value: bytes | None, sends: list[SendMessage]) -> None:
        # Each watcher gets the change from here, encoded once for all of them. Members do not
        # forward it to each other, because a watcher would miss it if the forwarding member died.
        # Large data belongs in a broadcast.
        for listener in list(self._by_key.get(key, {}).values()):
            if listener.missing is None:
                sends.append(SendMessage(listener.conn, listener.request, StoreChanged(key, value)))
            elif value is None:
                listener.missing.add(key)
            else:
                listener.missing.discard(key)
                if not listener.missing:
                    sends.append(SendMessage(listener.conn, listener.request, Result(None)))
                    self._unlisten(listener.conn, listener.request)

    def _listen(self, listener: _Listener) -> None:
        # Listeners have two indexes: by connection and request, to cancel them, and by key, so that
        # a write asks only those of its key. A wait for many keys is listed at each of them and
        # knows its missing keys. It is over when that set is empty.
        mine = self._listeners.setdefault(listener.conn, {})
        # Two listeners with one number could not be ended separately.
        if listener.request in mine:
            raise _StoreRefused(
                Failure.INVALID, f"request {listener.request} is already under way here"
            )
        if len(mine) >= self.max_pending:
            raise _StoreRefused(
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
