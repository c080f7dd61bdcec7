"""What goes into the membership state machine, and what comes out.

A connection is known by a number that the caller chose and never uses again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiodist.membership.records import Record
from aiodist.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from connection `conn`, with this request number."""

    conn: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection is gone."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: see `Membership.deadline`."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more joins, and turn those away that wait."""


Event = Received | Disconnected | Tick | Drain


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `conn`, in reply to `request` (0: to none)."""

    conn: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close `conn` once what was sent before is out. The machine has already forgotten it."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in a log."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Keep:
    """Write `record` to the log, before what comes behind it is carried out."""

    record: Record


Effect = Send | Close | Note | Keep
