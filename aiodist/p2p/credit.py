"""Flow control of point-to-point messages, as each side keeps the books. No I/O in here.

A message costs `cost(tag, nbytes)` from the moment it is sent until the receiver says that it was
consumed. Unconsumed messages of one sender cost at most a `window` for each tag, and a `total` over
all tags: `WINDOW` and `TOTAL`, and more where ranks are far from each other, as what is on the way
counts until its receiver's answer is back. Both sides know the same limits.

Why nobody waits for ever. Two facts: what was consumed and not yet returned is always less than
`BATCH`, and ``window - BATCH >= MOST``, ``total - BATCH >= MOST``.

* A message held back by the window of its tag: the receiver has unconsumed messages of that tag,
  so a receive of it has something to take; taking them returns the credit.
* A message held back by the total: once all that travels has arrived, the receiver's own count is
  over ``total - MOST`` (it is `tight`). A tight receiver tells the sender the tags that it waits
  for, and each of these *wants* lets one message go beyond the total. (A receive of any tag needs
  none: as long as the receiver is tight at rest, it has messages that such a receive would take.)
  The sender answers a want once: with the message, or, when it was taken back, with a denial. So
  both sides know what is outstanding, and a message beyond the total that nobody wanted is a
  protocol error.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aiodist.errors import ProtocolError

MessageTag = str | int
Key = str | int | None
"""A tag as a receive names it; None: any."""
Source = int | tuple[int, ...] | None
"""The source of a receive: a rank, one of several ranks (at least two), or any (None)."""

KIB: Final = 1024

COST: Final = 256
"""What a message costs beside its bytes."""

WINDOW: Final = 256 * KIB
"""Most that unconsumed messages of one sender and tag cost, where ranks are near."""

TOTAL: Final = 4096 * KIB
"""Most that unconsumed messages of one sender cost, wanted ones aside, where ranks are near."""

FAR_WINDOW: Final = 8192 * KIB
"""Most of one tag, however far they are. All tags together have twice as much."""

BATCH: Final = 64 * KIB
"""Credit is returned when this much was consumed, or when nothing happened for a while: with the
next frame to the sender, if there soon is one."""

EAGER: Final = 65 * KIB
"""Most bytes (metadata and data) of a message that travels before a receive is there: 64 KiB of
data, and what describes an array."""

MAX_TAG: Final = 1024
"""Most bytes of a tag in UTF-8."""

MOST: Final = COST + EAGER + MAX_TAG
"""Most that one message costs."""

MAX_WANTS: Final = 16384
"""Most wants outstanding with one sender."""


def cost(tag: MessageTag, nbytes: int) -> int:
    """What a message costs of which `nbytes` bytes travel before a receive is there."""
    return COST + nbytes + (len(tag) if type(tag) is str else 0)


class Limits(NamedTuple):
    """Most that unconsumed messages of one sender cost."""

    window: int
    """Of one tag."""
    total: int
    """Of all tags."""
    ahead: int = 0
    """Most bytes of a large message that go ahead of being asked for: 0 where ranks are near. They
    take two thirds of what is left at most, and no message waits for credit for them."""


def limits_for(way: int) -> Limits:
    """The limits where `way` bytes have left and are not answered for, while the wire is busy."""
    far = min(way, FAR_WINDOW)
    return Limits(max(WINDOW, far), max(TOTAL, 2 * far), far * 5 // 8)


class SenderCredit:
    """What one receiver lets this rank send."""

    __slots__ = ("_most", "_stalled", "_total", "_used", "_wants", "_window")

    def __init__(self, limits: Limits | None = None) -> None:
        self._window, self._most, _ = limits or limits_for(0)
        self._used: dict[MessageTag, int] = {}  # what messages cost that were not consumed
        self._total = 0
        self._wants: set[MessageTag] = set()  # tags of which one may go beyond the total
        # Tags whose next message waits for the total (and for nothing else), first come first
        # served: a message of another tag does not slip past them.
        self._stalled: dict[MessageTag, None] = {}

    @property
    def idle(self) -> bool:
        """Whether no state is kept for any tag."""
        return not (self._used or self._wants or self._stalled)

    def first_stalled(self) -> MessageTag | None:
        """The tag that is next to go when the total allows."""
        return next(iter(self._stalled), None)

    def forget(self, tag: MessageTag) -> None:
        """Nothing of `tag` waits any more."""
        # It waits for its own window from now on, and must not hold back the tags that stand in
        # line behind it for the total.
        self._stalled.pop(tag, None)

    def admit(self, tag: MessageTag, price: int) -> bool | None:
        """Pay for the next message of `tag`: whether it answers a want. None: it has to wait."""
        used = self._used.get(tag, 0) + price
        if used > self._window:
            self._stalled.pop(tag, None)
            return None
        stalled = self._stalled
        wanted = tag in self._wants
        if wanted:
            self._wants.remove(tag)
        elif self._total + price > self._most or (stalled and next(iter(stalled)) != tag):
            stalled.setdefault(tag)
            return None
        if stalled:
            stalled.pop(tag, None)
        self._used[tag] = used
        self._total += price
        return wanted

    def spare(self, tag: MessageTag) -> int:
        """What a message of `tag` that was admitted may cost more: two thirds of what is left, for
        others are to find some, too."""
        if self._stalled or self._wants:
            return 0
        left = min(self._window - self._used.get(tag, 0), self._most - self._total)
        return max(0, left * 2 // 3)

    def pay(self, tag: MessageTag, price: int) -> bool:
        """Pay for the next message of `tag`, where it answers no want and nothing else waits.
        False: `admit` has to decide."""
        used = self._used.get(tag, 0) + price
        total = self._total + price
        if used > self._window or total > self._most or self._wants or self._stalled:
            return False
        self._used[tag] = used
        self._total = total
        return True

    def refund(self, tag: MessageTag, amount: int) -> None:
        """The receiver has consumed messages of `tag`. Raises ProtocolError if it had none."""
        used = self._used.get(tag, 0) - amount
        if amount <= 0 or used < 0:
            raise ProtocolError(f"{amount} bytes of credit came back for tag {tag!r}, over its use")
        if used:
            self._used[tag] = used
        else:
            del self._used[tag]
        self._total -= amount

    def want(self, tag: MessageTag) -> None:
        """The receiver waits for `tag`. Raises ProtocolError if it has said so already."""
        if tag in self._wants or len(self._wants) >= MAX_WANTS:
            raise ProtocolError(f"a want for tag {tag!r} that is there, or one too many")
        self._wants.add(tag)

    def unwant(self, tag: MessageTag) -> bool:
        """The receiver takes a want back. False: it was answered already."""
        if tag in self._wants:
            self._wants.remove(tag)
            return True
        return False


class ReceiverCredit:
    """What one sender has used of the credit it has here."""

    __slots__ = ("_held", "_most", "_owed", "_owed_total", "_told", "_total", "_window")

    def __init__(self, limits: Limits | None = None) -> None:
        self._window, self._most, _ = limits or limits_for(0)
        self._held: dict[MessageTag, int] = {}  # what messages cost whose credit is here
        self._total = 0
        self._owed: dict[MessageTag, int] = {}  # of that, what was consumed
        self._owed_total = 0
        # Wants that the sender has not answered: True while they hold, False once taken back.
        self._told: dict[MessageTag, bool] = {}

    @property
    def idle(self) -> bool:
        """Whether no state is kept for any tag."""
        return not (self._held or self._told)

    @property
    def tight(self) -> bool:
        """Whether the sender may be held back by the total."""
        return self._total > self._most - MOST

    @property
    def asking(self) -> bool:
        """Whether a want is outstanding, or may be needed."""
        return bool(self._told) or self.tight

    @property
    def crowded(self) -> bool:
        """Whether `ask` may have refused for the number of wants alone, before the last answer."""
        return len(self._told) >= MAX_WANTS - 1

    def charge(self, tag: MessageTag, price: int, wanted: bool) -> None:
        """A message came. Raises ProtocolError if the sender had no credit for it, or if it was
        not `wanted`, as it says."""
        if wanted:
            self.answered(tag, denied=False)
        elif self._total + price > self._most:
            raise ProtocolError(f"a message of tag {tag!r} beyond the total credit of {self._most}")
        held = self._held.get(tag, 0) + price
        if held > self._window:
            raise ProtocolError(
                f"a message of tag {tag!r} beyond the credit of {self._window} for a tag"
            )
        self._held[tag] = held
        self._total += price

    def consume(self, tag: MessageTag, price: int) -> bool:
        """A message was consumed. True: it is time to `settle`."""
        self._owed[tag] = self._owed.get(tag, 0) + price
        self._owed_total += price
        return self._owed_total >= BATCH

    def pass_through(self, tag: MessageTag, price: int) -> bool:
        """A message came and was consumed at once: `charge`, then `consume`."""
        self.charge(tag, price, wanted=False)
        return self.consume(tag, price)

    def settle(self) -> list[tuple[MessageTag, int]]:
        """The credit to give back: (tag, amount)."""
        owed, self._owed = self._owed, {}
        self._total -= self._owed_total
        self._owed_total = 0
        for tag, amount in owed.items():
            held = self._held[tag] - amount
            if held:
                self._held[tag] = held
            else:
                del self._held[tag]
        return list(owed.items())

    def ask(self, tag: MessageTag) -> bool:
        """Whether to tell the sender now that `tag` is waited for."""
        if tag in self._told or not self.tight or len(self._told) >= MAX_WANTS:
            return False
        self._told[tag] = True
        return True

    def take_back(self, tag: MessageTag) -> bool:
        """`tag` is not waited for: whether to tell the sender now."""
        if self._told.get(tag):
            self._told[tag] = False
            return True
        return False

    def answered(self, tag: MessageTag, *, denied: bool) -> None:
        """The sender has answered a want. Raises ProtocolError if there was none, or if it denied
        one that still holds."""
        holds = self._told.pop(tag, None)
        if holds is None or (denied and holds):
            raise ProtocolError(f"an answer to a want for tag {tag!r} that is not there")
