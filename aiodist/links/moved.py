"""Counts of payload bytes that no link counts: through shared memory, or over links to peers that
are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from aiodist.compiled import core


class MovedCounts:
    """Counts of bytes. The compiled part has the same, and adds to them."""

    __slots__ = ("received", "sent")

    sent: int
    """Sent to others, or shown to them."""
    received: int
    """Received, or read."""


if TYPE_CHECKING:
    CoreCounts: TypeAlias = MovedCounts
else:
    CoreCounts = MovedCounts if core is None else core.Counts


class Moved(CoreCounts):
    """Counts that begin at 0."""

    __slots__ = ()

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def add(self, sent: int, received: int) -> None:
        """Count further bytes."""
        self.sent += sent
        self.received += received
