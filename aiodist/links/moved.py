"""Counts of payload bytes that no link counts: through shared memory, or over links to peers that
are gone."""

from __future__ import annotations


class Moved:
    """Counts of bytes: `sent` to others or shown to them, and `received` or read."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def add(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received
