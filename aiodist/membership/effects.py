"""The inputs and outputs of the membership state machine.

The caller numbers connections, and never uses a number again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiodist.membership.records import Record
from aiodist.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Received:
    """A message with this request number came from connection `conn`."""

    conn: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: see `Membership.deadline`."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more joins, and refuse those that wait.

    `gave_up`: tell them how far their group had come, because the rank that serves the coordinator
    waits no longer.
    """

    gave_up: bool = False


Event = Received | Disconnected | Tick | Drain


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send `message` to `conn`, in reply to `request` (0: to none)."""

    conn: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close `conn` after all earlier messages to it are sent. The machine has forgotten it."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the log file of people.

    `member`: the id of the member that has gone, if one has. It is not for the log, because ids are
    secret.
    """

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    member: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """Write `record` to the state log before the next effect is carried out."""

    record: Record


Effect = SendMessage | Close | Note | Keep
