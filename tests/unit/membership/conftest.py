"""A membership machine with its time and its mail in hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from averager_members import Members

from aiodist.membership.effects import (
    Close,
    Disconnected,
    Drain,
    Event,
    Keep,
    Note,
    Received,
    SendMessage,
    Tick,
)
from aiodist.membership.machine import Membership
from aiodist.membership.records import encode_record
from aiodist.wire.messages import EpochView, JoinRequest, Message
from aiodist.wire.recovery import NextView


class World:
    """`mail`: what each connection was sent and has not been read; `closed`: why it was closed. A
    change of a view is there as the view that it leads to, made of the one that was sent before."""

    def __init__(self, **options: Any) -> None:
        self.machine = Membership(**options)
        self.now = 0.0
        self.mail: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        self.views: dict[bytes, EpochView] = {}
        self.closed: dict[int, str] = {}
        self.notes: list[str] = []
        self.kept = b""

    def step(self, event: Event) -> None:
        for effect in self.machine.step(event, self.now):
            if isinstance(effect, SendMessage):
                message = effect.message
                if isinstance(message, NextView):
                    message = message.after(self.views[message.before])
                if isinstance(message, EpochView):
                    self.views[message.digest] = message
                self.mail[effect.conn].append((effect.request, message))
            elif isinstance(effect, Close):
                self.closed[effect.conn] = effect.reason
            elif isinstance(effect, Note):
                self.notes.append(effect.event)
            else:
                assert isinstance(effect, Keep)
                self.kept += encode_record(effect.record)

    def say(self, conn: int, message: Message, request: int = 1) -> Any:
        """What `conn` gets for `message`: the one message, or the list of them."""
        self.step(Received(conn, request, message))
        return self.read(conn)

    def join(self, conn: int, group: str = "g", **fields: Any) -> Any:
        fields.setdefault("id", f"id-{conn}")
        fields.setdefault("pid", conn)
        if not {"size", "min_size", "max_size"} & set(fields):
            fields["size"] = 2
        return self.say(conn, JoinRequest(group=group, **fields), request=100 + conn)

    def read(self, conn: int) -> Any:
        messages = [message for _, message in self.mail.pop(conn, [])]
        return messages[0] if len(messages) == 1 else messages

    def cut(self, conn: int, reason: str = "it broke") -> None:
        self.step(Disconnected(conn, reason))

    def drain(self) -> None:
        self.step(Drain())

    def pass_time(self, seconds: float) -> None:
        """Let time go by, with a tick whenever the machine wants one."""
        end = self.now + seconds
        while (due := self.machine.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.step(Tick())
        self.now = end

    def group(self, name: str = "g") -> dict[str, Any]:
        [found] = [one for one in self.machine.status()["groups"] if one["name"] == name]
        return found


@pytest.fixture
def world() -> World:
    return World(wall_offset=1000.0)


@pytest.fixture
def members() -> Members:
    return Members(World(wall_offset=1000.0, keep=True))
