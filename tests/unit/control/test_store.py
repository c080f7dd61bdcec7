"""The store of a group, as its members use it: what is asked of the coordinator, and what not."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodist.control.store import MAX_UNREAD, Store, Watch
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    MessageTooLargeError,
    ProtocolError,
)
from aiodist.wire.limits import MAX_VALUE
from aiodist.wire.messages import (
    Left,
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

Reply = Message | AiodistError


class Client:
    """A member's line to a coordinator, which answers all requests by `reply`."""

    group = "g"
    absence = ""

    def __init__(self) -> None:
        self.reply: Any = Result(None)
        self.asked: list[tuple[Message, float | None]] = []
        self.listeners: dict[int, Callable[[Reply], None]] = {}
        self.ended: list[int] = []

    async def request(self, message: Message, timeout: float | None) -> Message:
        self.asked.append((message, timeout))
        if isinstance(self.reply, Exception):
            raise self.reply
        reply: Message = self.reply
        return reply

    def check_loop(self) -> None: ...

    def unexpected(self, reply: Message) -> AiodistError:
        return ProtocolError(f"unexpected: {reply}")

    def subscribe(self, message: Message, on_reply: Callable[[Reply], None]) -> int:
        self.asked.append((message, None))
        self.listeners[len(self.asked)] = on_reply
        return len(self.asked)

    def unsubscribe(self, number: int) -> None:
        self.ended.append(number)

    unsubscribe_from_anywhere = unsubscribe


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def store(client: Client) -> Store:
    line: Any = client
    return Store(line, timeout=7.0)


@pytest.mark.parametrize(
    ("call", "message", "result"),
    [
        (lambda s: s.set("k", bytearray(b"v"), ttl=2.0), StoreSet("k", b"v", 2.0), None),
        (lambda s: s.get("k"), StoreGet("k"), b"v"),
        (lambda s: s.get("k"), StoreGet("k"), None),
        (lambda s: s.wait("k"), StoreWait(("k",)), None),
        (lambda s: s.wait(iter("ab")), StoreWait(("a", "b")), None),
        (lambda s: s.add("k", -2), StoreAdd("k", -2, None), 40),
        (lambda s: s.add("k", np.int64(3)), StoreAdd("k", 3, None), 43),
        (lambda s: s.compare_set("k", None, b"v"), StoreCompareSet("k", None, b"v", None), True),
        (lambda s: s.delete("k"), StoreDelete("k"), False),
    ],
)
async def test_what_is_asked(
    client: Client, store: Store, call: Any, message: Message, result: Any
) -> None:
    client.reply = Result(result)
    assert await call(store) == result
    assert client.asked == [(message, 7.0)]


@pytest.mark.parametrize("amount", [1.0, "1", None])
async def test_an_amount_that_is_none(client: Client, store: Store, amount: Any) -> None:
    with pytest.raises(TypeError, match=f"amount is an int, not {amount!r}"):
        await store.add("k", amount)
    assert client.asked == []


async def test_deadlines(client: Client, store: Store) -> None:
    await store.get("k", timeout=1.0)
    await store.get("k", timeout=math.inf)
    assert [seconds for _, seconds in client.asked] == [1.0, None]
    client.reply = TimeoutError()
    with pytest.raises(CollectiveTimeoutError, match=r"store.get\(k\) did not end within 7 s"):
        await store.get("k")
    with pytest.raises(CollectiveTimeoutError, match="not all of the keys exist") as caught:
        await store.wait(["x" * 150] * 2)
    assert len(str(caught.value)) < 300
    assert (caught.value.group, caught.value.op) == ("g", "store.wait")
    client.absence = "the coordinator is away: it sleeps"
    for call in (store.get, store.wait):
        with pytest.raises(CollectiveTimeoutError, match="7 s: the coordinator is away: it sleeps"):
            await call("k")


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, 10**400])
async def test_a_timeout_that_is_none(client: Client, store: Store, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await store.get("k", timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        store.watch("k", timeout=timeout)
    assert client.asked == []


@pytest.mark.parametrize("reply", [Left(), Result("text"), Result(1)])
async def test_an_answer_that_makes_no_sense(client: Client, store: Store, reply: Any) -> None:
    client.reply = reply
    for call in (store.get("k"), store.delete("k"), store.set("k", b"")):
        with pytest.raises(ProtocolError):
            await call


async def test_a_value_that_cannot_be_kept_is_not_sent(client: Client, store: Store) -> None:
    words: Any = "text"
    with pytest.raises(TypeError, match="keeps bytes, not str"):
        await store.set("k", words)
    with pytest.raises(MessageTooLargeError, match=r"of k has .*use a broadcast") as caught:
        await store.compare_set("k", None, bytes(MAX_VALUE + 1))
    assert (caught.value.group, caught.value.op) == ("g", "store.compare_set")
    assert client.asked == []


def watching(client: Client, store: Store) -> tuple[Watch, Callable[[Reply], None]]:
    watch = store.watch("k")
    assert client.asked[-1][0] == StoreWatch("k")
    return watch, client.listeners[len(client.asked)]


async def test_changes_come_in_order_and_then_the_end(client: Client, store: Store) -> None:
    watch, tell = watching(client, store)
    tell(Result(None))
    assert await watch is watch
    tell(StoreChanged("k", b"1"))
    tell(StoreChanged("k", None))
    tell(CoordinatorLostError("gone"))
    assert [await anext(watch), await anext(watch)] == [("k", b"1"), ("k", None)]
    for _ in range(2):
        with pytest.raises(CoordinatorLostError, match="gone"):
            await anext(watch)


async def test_who_is_too_slow_misses_the_oldest(client: Client, store: Store) -> None:
    watch, tell = watching(client, store)
    for number in range(MAX_UNREAD + 2):
        tell(StoreChanged("k", b"%d" % number))
    assert await anext(watch) == ("k", b"2")


async def test_closing_ends_who_waits(client: Client, store: Store) -> None:
    watch, tell = watching(client, store)
    async with asyncio.TaskGroup() as tasks:
        seen = tasks.create_task(anext(watch, "nothing more"))
        await asyncio.sleep(0)
        watch.close()
    assert seen.result() == "nothing more"
    assert client.ended == [1]
    tell(StoreChanged("k", b"late"))
    assert await anext(watch, None) is None


async def test_a_watch_that_nobody_has_is_over(client: Client, store: Store) -> None:
    watch, tell = watching(client, store)
    del watch
    gc.collect()
    assert client.ended == [1]
    tell(StoreChanged("k", b"late"))  # nobody hears it
