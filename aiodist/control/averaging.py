"""What a member of an averager asks of the coordinator."""

from __future__ import annotations

from typing import TypeVar

from aiodist.control.client import ControlClient
from aiodist.wire.averaging import (
    AverageElect,
    AverageElected,
    AverageEnter,
    AverageEntered,
    Reached,
)
from aiodist.wire.messages import Message

R = TypeVar("R", bound=Message)


async def enter(
    client: ControlClient, message: AverageEnter, timeout: float | None
) -> AverageEntered:
    """Take part. Raises as `ControlClient.request` does, MismatchError for rules that differ, and
    JoinError if a member of that name is alive."""
    return await _ask(client, message, AverageEntered, timeout)


async def elect(client: ControlClient, state: tuple[Reached, ...], timeout: float) -> bool:
    """Whether this member is the one that keeps a copy of its state for others. `state`: the last
    result of each of its parts. Raises as `ControlClient.request` does."""
    return (await _ask(client, AverageElect(state), AverageElected, timeout)).elected


async def _ask(client: ControlClient, message: Message, kind: type[R], timeout: float | None) -> R:
    reply = await client.request(message, timeout)
    if not isinstance(reply, kind):
        raise client.unexpected(reply)
    return reply
