"""Links that outlast their connection: when what was sent has come."""

from __future__ import annotations

from aiodist.transports.lasting import LastingLink
from aiodist.transports.outbox import Outbox
from aiodist.transports.retransmission import RetransmissionBuffer


class Sending:
    """A link that has sent two frames; of what it says itself only how often it asks counts."""

    deliver = LastingLink.deliver

    def __init__(self) -> None:
        self._kept: RetransmissionBuffer | None = RetransmissionBuffer()
        self._kept.frames += (b"a", b"b")
        self._outbox = Outbox()
        self._closed = False
        self.asked = 0

    def _ask(self) -> None:
        self.asked += 1


def test_who_waits_hears_once_all_has_come_that_was_sent() -> None:
    link = Sending()
    called: list[int] = []
    kept = link._kept
    assert kept is not None
    assert not link.deliver(lambda: called.append(1))
    assert link.asked == 1
    kept.frames.append(b"c")  # what is sent later is not waited for
    assert kept.acknowledge(1) == []
    for done in kept.acknowledge(2):
        done()
    assert called == [1]


def test_nothing_is_asked_where_all_has_come() -> None:
    link = Sending()
    assert link._kept is not None
    link._kept.acknowledge(2)
    assert link.deliver(lambda: None)
    assert not link.asked
