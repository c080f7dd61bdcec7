"""Which hosts have a version of files in a folder: what `push --until` waits for.

Each pull says so in the store of the channel, because a pull that takes a single version has left
by the time that the publisher could ask it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Annotated

from aiodist.channels import directory
from aiodist.channels.publisher import Publisher
from aiodist.channels.subscriber import Subscriber
from aiodist.control.store import Store
from aiodist.wire import schema
from aiodist.wire.messages import NonEmptyName

KEY = "files"
"""The key of the store: a list of `Receipt`."""

MOST = 4096
"""Most receipts; the oldest are forgotten then."""


class Receipt(schema.Struct):
    """A host has the content with that id, under that number."""

    version: Annotated[int, schema.integer(0, directory.MAX_VERSION)]
    content: NonEmptyName
    host: NonEmptyName


def added(before: list[Receipt], new: Receipt) -> list[Receipt]:
    """The receipts with a new one, in place of the last one of the same host."""
    return [*(one for one in before if one.host != new.host), new][-MOST:]


def hosts(receipts: list[Receipt], version: int, content: str) -> set[str]:
    """The hosts that have this content under this number."""
    return {one.host for one in receipts if (one.version, one.content) == (version, content)}


async def give(weights: Subscriber, version: int, content: str) -> None:
    """Say that this host has a version; waits for a coordinator that is away. Raises
    CoordinatorLostError, GroupClosedError."""
    participant = weights._participant
    new = Receipt(version, content, participant.host or socket.gethostname())

    async def attempt(store: Store) -> None:
        done = False
        while not done:
            value = await store.get(KEY, timeout=participant.patience)
            after = directory.packed(added(directory.unpacked(Receipt, value), new))
            done = await store.compare_set(KEY, value, after, timeout=participant.patience)

    await participant.until_done(lambda: participant.ask(attempt))


async def until(
    out: Publisher, version: int, content: str, wanted: float, tell: Callable[[int], None]
) -> None:
    """Wait until so many hosts have a version, and `tell` how many have it, each time that there
    are more. Raises CoordinatorLostError, GroupClosedError."""
    participant, found = out._participant, set[str]()

    async def follow(store: Store) -> None:
        async with store.watch(KEY) as changes:
            value = await store.get(KEY, timeout=participant.patience)
            while True:
                before = len(found)
                found.update(hosts(directory.unpacked(Receipt, value), version, content))
                if len(found) > before:
                    tell(len(found))
                if len(found) >= wanted:
                    return
                _, value = await anext(changes)

    await participant.until_done(lambda: participant.ask(follow))
