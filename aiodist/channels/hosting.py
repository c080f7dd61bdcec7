"""Copies arrays on devices to the host, because published versions are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiodist.buffers.paths import Where
from aiodist.buffers.places import leaves_of
from aiodist.channels.trees import mapped
from aiodist.devices import device_of
from aiodist.devices.base import Device, Event
from aiodist.devices.waiting import Looks


def has_device(tree: Any) -> bool:
    """Whether a tree has arrays on devices."""
    return any(device_of(leaf) is not None for leaf in leaves_of(tree))


async def on_host(tree: Any) -> Any:
    """The tree with host copies of its arrays on devices, in the state after all queued work.

    Raises TypeError, naming the place, for arrays that cannot be sent.
    """
    devices: dict[int, Device] = {}

    def copied(leaf: Any, where: Where) -> Any:
        device = device_of(leaf)
        if device is None:
            return leaf
        devices[id(device)] = device
        try:
            copy = device.host(*device.describe(leaf))
        except TypeError as error:
            raise TypeError(f"value{where}: {error}") from error
        # On the user's stream, so that the user's later work comes after the copy.
        device.copy(device.current(), copy, leaf)
        return copy

    try:
        return mapped(tree, copied)
    finally:
        # Even if this is cancelled, because memory of both sides is in use until then.
        events = []
        for device in devices.values():
            event = device.event()
            device.current().record(event)
            events.append(event)
        await _done(events)


async def _done(events: Sequence[Event]) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    looks = Looks(loop, events, lambda: done.set_result(None))
    if not looks.look():
        cancelled = False
        while not done.done():
            try:
                await asyncio.wait({done})
            except asyncio.CancelledError:
                cancelled = True
        looks.look()  # raises if the device has failed
        if cancelled:
            raise asyncio.CancelledError
