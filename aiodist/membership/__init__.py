"""Who is a member of which group: a state machine without I/O, clock or randomness."""

from aiodist.membership.effects import (
    Close,
    Disconnected,
    Drain,
    Effect,
    Event,
    Keep,
    Note,
    Received,
    Send,
    Tick,
)
from aiodist.membership.machine import Membership

__all__ = [
    "Close",
    "Disconnected",
    "Drain",
    "Effect",
    "Event",
    "Keep",
    "Membership",
    "Note",
    "Received",
    "Send",
    "Tick",
]
