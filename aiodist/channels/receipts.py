"""Which hosts have acknowledged a version.

Each subscriber says so in the store of the channel, because one that takes a single version has
left by the time that the publisher could ask it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgpack

from aiodist.channels import directory
from aiodist.control.store import Store
from aiodist.wire import schema
from aiodist.wire.limits import MAX_NAME
from aiodist.wire.messages import Name, NonEmptyName

KEY = "receipts"
"""The key of the store: a list of `Receipt`."""

MOST = 4096
"""Most receipts; the oldest are forgotten then."""


class Receipt(schema.Struct):
    """A host has the content with that id, under that number."""

    version: Annotated[int, schema.integer(0, directory.MAX_VERSION)]
    content: Name
    host: NonEmptyName


def check_content(content: object) -> None:
    """Raise TypeError or ValueError unless `content` can be that of a receipt."""
    text = f"content is a str of at most {MAX_NAME} characters, not {content!r}"
    if type(content) is not str:
        raise TypeError(text)
    if len(content) > MAX_NAME:
        raise ValueError(text)


def read(value: bytes | None) -> list[Receipt]:
    """The receipts of the store, without those that cannot be read, because one bad receipt must
    not hide those of all others."""
    found: list[Receipt] = []
    with suppress(Exception):  # msgpack raises half a dozen unrelated types
        for one in [] if value is None else msgpack.unpackb(value):
            with suppress(Exception):
                found.append(schema.build(Receipt, one))
    return found


def added(before: list[Receipt], new: Receipt) -> list[Receipt]:
    """The receipts with a new one, in place of the last one of the same host."""
    return [*(one for one in before if one.host != new.host), new][-MOST:]


def hosts(receipts: list[Receipt], version: int, content: str) -> set[str]:
    """The hosts that have this content under this number."""
    return {one.host for one in receipts if (one.version, one.content) == (version, content)}


async def give(store: Store, new: Receipt, patience: float) -> None:
    """Say that a host has a version. Raises what the store does."""
    done = False
    while not done:
        value = await store.get(KEY, timeout=patience)
        after = directory.packed(added(read(value), new))
        done = await store.compare_set(KEY, value, after, timeout=patience)


async def more(
    store: Store, version: int, content: str, known: set[str], patience: float
) -> set[str]:
    """The hosts that have a version, once there are others than those that are `known`. Raises what
    the store does."""
    async with store.watch(KEY) as changes:
        value = await store.get(KEY, timeout=patience)
        while True:
            found = hosts(read(value), version, content)
            if not found <= known:
                return found
            _, value = await anext(changes)
