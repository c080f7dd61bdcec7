"""The receiver's side of flow control: it returns credit, and tells senders what it waits for.

`aiodist.p2p.credit` has the rules, and shows that no message waits for ever. This module keeps the
traffic low. A sender hears of its credit once for each batch. It hears what the receiver waits for
only while it is close to its limit, because only then may that hold it back.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiodist.p2p import frames as wire
from aiodist.p2p.credit import Key, Limits, MessageTag, ReceiverCredit, Source
from aiodist.p2p.mailbox import PendingReceives, covers

SETTLE_AFTER: Final = 0.02
"""Seconds after which less than a batch of credit is returned, so that no state of a tag stays
behind."""


class Flow:
    """The credit of all senders at this rank. `posted`: the receives and probes that wait."""

    def __init__(
        self,
        out: wire.Wire,
        loop: asyncio.AbstractEventLoop,
        size: int,
        posted: tuple[PendingReceives[Any], ...],
        limits: Limits,
    ) -> None:
        self._wire = out  # takes CREDIT, WANT and UNWANT
        self._loop = loop
        self._posted = posted
        # By rank. None: the rank is lost, or the group has ended.
        self._credits: list[ReceiverCredit | None] = [ReceiverCredit(limits) for _ in range(size)]
        self._tight: set[int] = set()  # senders that the total may hold back
        self._asking: set[int] = set()  # these, and senders with an open want
        self.owed: set[int] = set()
        """Senders to which credit is owed."""
        self._timer: asyncio.TimerHandle | None = None  # returns less than a batch

    @property
    def idle(self) -> bool:
        """Whether no state is kept for any tag."""
        idle = all(credit is None or credit.idle for credit in self._credits)
        return idle and not self._asking

    def close(self) -> None:
        self._credits = [None] * len(self._credits)
        self._tight.clear()
        self._asking.clear()
        self.owed.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def books(self, src: int) -> tuple[Any, ...] | None:
        """Return the credit of `src` and its parts. None: it is lost."""
        credit = self._credits[src]
        return None if credit is None else (credit, *credit.books)

    def lose(self, src: int) -> None:
        """Stop counting for `src`, which is gone."""
        self._credits[src] = None
        self._tight.discard(src)
        self._asking.discard(src)
        self.owed.discard(src)

    # -- credit -----------------------------------------------------------------------------------

    def charge(self, src: int, tag: MessageTag, price: int, wanted: bool) -> None:
        """Count a message that begins to come. Raises ProtocolError if there is no credit for
        it."""
        credit = self._credits[src]
        if credit is not None:
            credit.charge(tag, price, wanted)

    def arrived(self, src: int, wanted: bool) -> None:
        """Note that the message is here, and was matched if a receive waited for it."""
        if wanted:
            self._uncrowd(src)
        self._check(src)

    def consumed(self, src: int, tag: MessageTag, price: int) -> None:
        """Note that the message uses no memory any more."""
        credit = self._credits[src]
        if credit is None:
            return
        self._owe(src, credit, credit.consume(tag, price))

    def passed(self, src: int, tag: MessageTag, price: int, batch: int | None = None) -> None:
        """Count a message that was consumed as soon as it came. Raises ProtocolError as `charge`
        does. `batch`: see `ReceiverCredit.consume`."""
        credit = self._credits[src]
        if credit is not None:
            self._owe(src, credit, credit.pass_through(tag, price, batch))

    def _owe(self, src: int, credit: ReceiverCredit, is_much: bool) -> None:
        if is_much:
            self._settle(src, credit)
            return
        # Little credit is held until there is more, because a frame for each small message would
        # cost as much as the message. The timer is for the end of a series.
        self.owed.add(src)
        if self._timer is None:
            self._timer = self._loop.call_later(SETTLE_AFTER, self._settle_all)

    def _settle(self, src: int, credit: ReceiverCredit) -> None:
        self.owed.discard(src)
        entries = credit.settle()
        for at in range(0, len(entries), wire.CREDITS):
            flat = [field for entry in entries[at : at + wire.CREDITS] for field in entry]
            self._wire.hold(src, (wire.CREDIT, *flat))
        self._check(src)

    def _settle_all(self) -> None:
        self._timer = None
        for src in tuple(self.owed):
            credit = self._credits[src]
            if credit is not None:
                self._settle(src, credit)
        self._wire.flush()

    # -- wants ------------------------------------------------------------------------------------

    def review(self, source: Source, tag: Key) -> None:
        """Tell the senders that need to know that receives of `tag` from `source` have changed."""
        if tag is None or not self._asking:
            return
        for src, credit in self._concerned(source):
            if self._needs(src, tag):
                if credit.ask(tag):
                    self._wire.send(src, (wire.WANT, tag), urgent=True)
            elif credit.take_back(tag):
                self._wire.send(src, (wire.UNWANT, tag), urgent=True)

    def question(self, source: Source, tag: Key) -> None:
        """Get a message that the total holds back, if there is one, without waiting: send a want,
        and take it back at once."""
        if tag is None or not self._asking:
            return
        for src, credit in self._concerned(source):
            if not self._needs(src, tag) and credit.ask(tag):
                self._wire.send(src, (wire.WANT, tag), urgent=True)
                self.review(src, tag)

    def denied(self, src: int, tag: MessageTag) -> None:
        """Note that the sender had no such message when the want was taken back."""
        credit = self._credits[src]
        if credit is not None:
            credit.answered(tag, denied=True)
            self.review(src, tag)
            self._uncrowd(src)
            self._check(src)

    def _concerned(self, source: Source) -> list[tuple[int, ReceiverCredit]]:
        return [
            (src, credit)
            for src in self._asking
            if covers(source, src) and (credit := self._credits[src]) is not None
        ]

    def _needs(self, src: int, tag: MessageTag) -> bool:
        return any(posted.waits(src, tag) for posted in self._posted)

    def _uncrowd(self, src: int) -> None:
        """Note that a want was answered, so there may be room for another one."""
        credit = self._credits[src]
        if credit is not None and credit.crowded:
            self._review_all(src)

    def _review_all(self, src: int) -> None:
        for posted in self._posted:
            for tag in posted.tags(src):
                self.review(src, tag)

    def _check(self, src: int) -> None:
        """Check whether the sender is now so close to its limit that it may be held back, or not
        any more."""
        credit = self._credits[src]
        if credit is None:
            return
        if credit.tight:
            if src not in self._tight:
                self._tight.add(src)
                self._asking.add(src)
                self._review_all(src)
        elif self._asking:
            self._tight.discard(src)
            if not credit.asking:
                self._asking.discard(src)
