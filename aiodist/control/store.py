"""The store of a group, as its members use it: keys and bytes that the coordinator keeps."""

from __future__ import annotations

import asyncio
import copy
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from aiodist import timeouts
from aiodist.composing import started
from aiodist.control.client import ControlClient
from aiodist.errors import AiodistError, CollectiveTimeoutError, MessageTooLargeError
from aiodist.wire import schema
from aiodist.wire.limits import MAX_VALUE
from aiodist.wire.messages import (
    Message,
    Result,
    StoreAdd,
    StoreChanged,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreSet,
    StoreWait,
    StoreWatch,
)
from aiodist.work import Unseen

MAX_UNREAD = 1024
"""How many changes a `Watch` keeps for its reader. If more come, the oldest are dropped."""

T = TypeVar("T")


class Store:
    """Bytes by key, shared by the members of one group, and deleted with the group.

    Every call starts at once and returns a `Work`. Every call takes `timeout` in seconds (None: the
    group's `op_timeout`, `math.inf`: none).

    Calls raise CollectiveTimeoutError (a TimeoutError) after the timeout, GroupClosedError if the
    group is closed, and CoordinatorLostError if the coordinator is gone. They raise ValueError for
    a timeout that is not above 0, and for a key that does not have 1 to 1024 characters. They raise
    MessageTooLargeError (a ValueError) above the limits: 1 MiB for a value, 64 MiB for all keys and
    values of a group, and 65536 keys. In another event loop or thread they raise RuntimeError; use
    `group.blocking().store` there.

    A write that you cancel, or whose timeout ends, may still be carried out.

    `ttl` is how many seconds after the write the key is deleted. A write without `ttl` keeps it.

    For example::

        store = group.store
        if group.rank == 0:
            await store.set("answer", b"42", ttl=60)
        await store.wait("answer", timeout=10)
        assert await store.get("answer") == b"42"
        await store.add("visits", 1)  # atomic, as compare_set is
    """

    def __init__(self, client: ControlClient, *, timeout: float = 300.0) -> None:
        self._client = client
        self._timeout = timeout
        self._unseen = Unseen()

    @started
    async def set(
        self,
        key: str,
        value: bytes | bytearray | memoryview,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Set `key` to `value`."""
        timeouts.check_timeout(ttl, "ttl")
        message = StoreSet(key, self._value("set", key, value), ttl)
        await self._ask("set", key, message, type(None), timeout)

    @started
    async def get(self, key: str, *, timeout: float | None = None) -> bytes | None:
        """Return the value of `key`; None if there is none."""
        result = await self._call("get", key, StoreGet(key), timeout)
        return None if result is None else self._of_type(bytes, result)

    @started
    async def wait(self, keys: str | Iterable[str], *, timeout: float | None = None) -> None:
        """Wait until all of `keys` (or the one key) exist at the same time."""
        wanted = (
            tuple(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else (keys,)
        )
        what = ", ".join(map(str, wanted))
        await self._ask("wait", what, StoreWait(wanted), type(None), timeout)

    @started
    async def add(
        self, key: str, amount: int = 1, *, ttl: float | None = None, timeout: float | None = None
    ) -> int:
        """Add to the decimal number that `key` holds (0 if there is none), and return the sum.

        Raises StoreValueError (a ValueError) if the key holds anything else, or if the sum does not
        fit into 64 bits.
        """
        try:
            number = operator.index(amount)  # of any type, such as a numpy one
        except TypeError:
            raise TypeError(f"amount is an int, not {amount!r}") from None
        timeouts.check_timeout(ttl, "ttl")
        return await self._ask("add", key, StoreAdd(key, number, ttl), int, timeout)

    @started
    async def compare_set(
        self,
        key: str,
        expected: bytes | None,
        desired: bytes | bytearray | memoryview,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Set `key` to `desired` if it holds `expected` (None: does not exist). Returns whether it
        was set."""
        timeouts.check_timeout(ttl, "ttl")
        op = "compare_set"
        old = None if expected is None else self._value(op, key, expected)
        message = StoreCompareSet(key, old, self._value(op, key, desired), ttl)
        return await self._ask(op, key, message, bool, timeout)

    @started
    async def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Delete `key`. Returns False if there was none."""
        return await self._ask("delete", key, StoreDelete(key), bool, timeout)

    def watch(self, key: str, *, timeout: float | None = math.inf) -> Watch:
        """Watch the changes of `key` from now on: ``async for key, value in store.watch("k")``.

        The value is None if the key was deleted. You see every change that the coordinator carries
        out after this call. To begin with the present value, call `watch` first and `get` second.
        `timeout` bounds the wait for each change. A reader that is more than 1024 changes behind
        misses the oldest.
        """
        schema.check_field(StoreWatch, "key", key)
        timeouts.check_timeout(timeout)
        return Watch(self._client, key, math.inf if timeout is None else timeout)

    async def _ask(
        self, op: str, what: str, message: Message, kind: type[T], timeout: float | None
    ) -> T:
        return self._of_type(kind, await self._call(op, what, message, timeout))

    async def _call(
        self, op: str, what: str, message: Message, timeout: float | None
    ) -> bytes | int | bool | None:
        name = "keys" if isinstance(message, StoreWait) else "key"
        schema.check_field(type(message), name, getattr(message, name))
        timeouts.check_timeout(timeout)
        seconds = self._timeout if timeout is None else timeout
        try:
            reply = await self._client.request(message, None if seconds == math.inf else seconds)
        except TimeoutError:
            raise _too_late(op, what, seconds, self._client) from None
        if not isinstance(reply, Result):
            raise self._client.unexpected(reply)
        return reply.value

    def _value(self, op: str, key: str, value: bytes | bytearray | memoryview) -> bytes:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"the store keeps bytes, not {type(value).__name__}: encode the value")
        data = bytes(value)
        if len(data) > MAX_VALUE:
            raise MessageTooLargeError(
                f"the value of {_shown(key)} has {len(data)} bytes, over the {MAX_VALUE} that the "
                "store keeps: use a broadcast for bulk data",
                group=self._client.group,
                op=f"store.{op}",
            )
        return data

    def _of_type(self, kind: type[T], value: object) -> T:
        if type(value) is not kind:
            raise self._client.unexpected(Result(None))
        return value


class Watch:
    """An async iterator over the changes of one key.

    `await` it to be sure that the coordinator has begun to watch. It ends with `close`, with `async
    with`, or when it is dropped.
    """

    def __init__(self, client: ControlClient, key: str, timeout: float) -> None:
        self._client = client
        self._key = key
        self._timeout = timeout
        # Unread changes. The oldest are dropped.
        self._changes: deque[tuple[str, bytes | None]] = deque(maxlen=MAX_UNREAD)
        # Why there are no more. Raised after the changes before it.
        self._error: AiodistError | None = None
        self._begun = False  # the coordinator has confirmed the watch
        self._closed = False  # by the user
        self._news = asyncio.Event()  # one of these four has changed
        # The client must not keep a watch alive that its user has dropped, so all references to the
        # watch here are weak::
        #
        #     user ──> Watch ──> client ──subscriptions──> on_reply ──weak──> Watch
        #                                        ▲
        #     finalize (Watch is gone) ──────────┘ unsubscribes, by the loop: garbage is collected
        #                                            in whatever thread happens to run
        weak = weakref.WeakMethod(self._on_reply)

        def on_reply(reply: Message | AiodistError) -> None:
            method = weak()
            if method is not None:
                method(reply)

        self._number = client.subscribe(StoreWatch(key), on_reply)  # the number of the subscription
        # Ends the subscription if the watch was dropped.
        self._drop = weakref.finalize(self, client.unsubscribe_from_anywhere, self._number)
        self._drop.atexit = False  # at the end of the process there is no loop to tell

    def close(self) -> None:
        """End the watch; iteration stops. Idempotent."""
        self._client.check_loop()
        self._drop.detach()
        self._closed = True
        self._client.unsubscribe(self._number)
        self._news.set()

    def __await__(self) -> Generator[object, None, Watch]:
        return self._until_begun().__await__()

    async def __aenter__(self) -> Watch:
        return await self._until_begun()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> tuple[str, bytes | None]:
        await self._until(lambda: bool(self._changes or self._closed))
        if self._closed:
            raise StopAsyncIteration
        return self._changes.popleft()

    def _put_back(self, change: tuple[str, bytes | None]) -> None:
        """Make `change`, which was taken last, the next one, because the program did not get it."""
        if len(self._changes) < MAX_UNREAD:
            self._changes.appendleft(change)
            self._news.set()

    async def _until_begun(self) -> Watch:
        await self._until(lambda: self._begun or self._closed)
        return self

    async def _until(self, ready: Callable[[], bool]) -> None:
        self._client.check_loop()
        try:
            async with asyncio.timeout(None if self._timeout == math.inf else self._timeout):
                while not ready():
                    if self._error is not None:
                        raise copy.copy(self._error)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise _too_late("watch", self._key, self._timeout, self._client) from None

    def _on_reply(self, reply: Message | AiodistError) -> None:
        if isinstance(reply, AiodistError):
            self._error = reply
        elif isinstance(reply, StoreChanged):
            self._changes.append((reply.key, reply.value))
        else:
            self._begun = True
        self._news.set()


def _too_late(op: str, what: str, seconds: float, client: ControlClient) -> CollectiveTimeoutError:
    why = "not all of the keys exist" if op == "wait" else "nothing came from the coordinator"
    text = f"store.{op}({_shown(what)}) did not end within {seconds:g} s: {client.absence or why}"
    return CollectiveTimeoutError(text, group=client.group, op=f"store.{op}")


def _shown(keys: str) -> str:
    return keys if len(keys) <= 200 else keys[:200] + "..."
