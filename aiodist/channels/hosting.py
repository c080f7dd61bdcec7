"""Arrays on devices, brought to the host: what is published lies there."""

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
    """Whether there are arrays on devices in it."""
    return any(device_of(leaf) is not None for leaf in leaves_of(tree))


async def on_host(tree: Any) -> Any:
    """The tree with copies of its arrays on devices, as they are after what is queued there now.
    Raises TypeError, naming the place, for those that do not travel."""
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
        # On the stream of the user, so that what he queues from here on comes after it.
        device.copy(device.current(), copy, leaf)
        return copy

    try:
        return mapped(tree, copied)
    finally:
        # Even if this is cancelled: memory of both sides is in use until then.
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
        if cancelled:
            raise asyncio.CancelledError
