"""Flow control of point-to-point messages: what each side counts. No I/O in here.

A message costs `cost(tag, nbytes)` from the moment when it is sent until the receiver says that it
was consumed. The unconsumed messages of one sender cost at most a `window` for each tag, and a
`total` over all tags. These are `WINDOW` and `TOTAL`. They are larger if ranks are far apart,
because messages in flight count until the receiver's answer is back. Both sides know the same
limits.

Why does no message wait for ever? There are two facts. Credit that was consumed and not returned
yet is always less than `SHARED_BATCH`, which is more than `BATCH`. And ``window - SHARED_BATCH >=
MOST`` and ``total - SHARED_BATCH >= MOST``.

* A message is held back by the window of its tag. Then the receiver has unconsumed messages of that
  tag, so a receive of it finds one. Taking it returns the credit.
* A message is held back by the total. Once everything in flight has arrived, the receiver's own
  count is over ``total - MOST`` (it is `tight`). A tight receiver tells the sender the tags that it
  waits for. Each of these *wants* allows one message beyond the total. A receive of any tag needs
  no want, because a tight receiver at rest has messages for it.

The sender answers each want once: with the message, or with a denial if the want was taken back. So
both sides know which wants are open. A message beyond the total that was not wanted is a protocol
error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from aiodist.compiled import core
from aiodist.errors import ProtocolError

MessageTag = str | int
Key = str | int | None
"""A tag as a receive names it. None: any tag."""
Source = int | tuple[int, ...] | None
"""The source of a receive: a rank, one of at least two ranks, or any rank (None)."""

KIB: Final = 1024

COST: Final = 256
"""What a message costs in addition to its bytes."""

WINDOW: Final = 256 * KIB
"""The most that unconsumed messages of one sender and tag cost, if ranks are near."""

TOTAL: Final = 4096 * KIB
"""The most that unconsumed messages of one sender cost, without wanted ones, if ranks are near."""

FAR_WINDOW: Final = 8192 * KIB
"""The most for one tag at any distance. All tags together have twice as much."""

BATCH: Final = 64 * KIB
"""How much must be consumed before credit is returned. After a while without traffic, less is
returned, too. It goes with the next frame to the sender, if one follows soon."""

SHARED_BATCH: Final = 160 * KIB
"""The same for messages that the compiled part receives in shared memory, where returning credit
takes longer than such a message."""

EAGER: Final = 65 * KIB
"""The most bytes (metadata and data) of a message that is sent before a receive takes it: 64 KiB of
data, and the description of an array."""

MAX_TAG: Final = 1024
"""The most bytes of a tag in UTF-8."""

MOST: Final = COST + EAGER + MAX_TAG
"""The most that one message costs."""

MAX_WANTS: Final = 16384
"""The most open wants with one sender."""


def cost(tag: MessageTag, nbytes: int) -> int:
    """Return the cost of a message that sends `nbytes` bytes before a receive takes it."""
    return COST + nbytes + (len(tag) if type(tag) is str else 0)


class Limits(NamedTuple):
    """The most that unconsumed messages of one sender cost."""

    window: int
    """For one tag."""
    total: int
    """For all tags."""
    ahead: int = 0
    """The most bytes of a large message that go ahead of its pull. 0: ranks are near. They use at
    most two thirds of the remaining credit, and no message waits for credit for them."""


def limits_for(way: int) -> Limits:
    """Return the limits for a busy wire that has `way` bytes in flight."""
    far = min(way, FAR_WINDOW)
    return Limits(max(WINDOW, far), max(TOTAL, 2 * far), far * 5 // 8)


class Debt:
    """What messages of all tags cost. The compiled part has the same, and adds to it."""

    __slots__ = ("_owed_total", "_total")

    _total: int
    _owed_total: int
    """The part of a receiver's credit that was consumed, and not returned yet."""


if TYPE_CHECKING:
    CoreDebt: TypeAlias = Debt
else:
    CoreDebt = Debt if core is None else core.Debt


class Pushes:
    """Which message of one direction comes next, and whether it may be pushed. The compiled part
    has the same, and changes it."""

    __slots__ = ("may_push", "sid")

    sid: int
    """The id of the last announced message. Ids ascend by one."""
    may_push: bool
    """Whether the receiver has given leave to push the next message."""


if TYPE_CHECKING:
    CorePushes: TypeAlias = Pushes
else:
    CorePushes = Pushes if core is None else core.Pushes


class SenderCredit(CoreDebt):
    """What one receiver allows this rank to send."""

    __slots__ = ("_most", "_stalled", "_used", "_wants", "_window")

    def __init__(self, limits: Limits | None = None) -> None:
        self._window, self._most, _ = limits or limits_for(0)
        self._used: dict[MessageTag, int] = {}  # the cost of unconsumed messages
        self._total = 0
        self._wants: set[MessageTag] = set()  # tags with an open want
        # Tags whose next message waits only for the total, in order. Messages of other tags do not
        # overtake them.
        self._stalled: dict[MessageTag, None] = {}

    @property
    def idle(self) -> bool:
        """Whether no state is kept for any tag."""
        return not (self._used or self._wants or self._stalled)

    @property
    def books(self) -> tuple[dict[MessageTag, int], set[MessageTag], dict[MessageTag, None]]:
        """What is used, wanted and stalled, for the compiled part."""
        return self._used, self._wants, self._stalled

    def first_stalled(self) -> MessageTag | None:
        """Return the tag that goes next when the total allows it."""
        return next(iter(self._stalled), None)

    def forget(self, tag: MessageTag) -> None:
        """Note that no message of `tag` waits any more."""
        # Otherwise the tag would hold back those behind it in the line for the total.
        self._stalled.pop(tag, None)

    def admit(self, tag: MessageTag, price: int) -> bool | None:
        """Pay for the next message of `tag`. Return whether it answers a want. None: it has to
        wait."""
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
        """Return how much more an admitted message of `tag` may cost. That is two thirds of the
        rest, so that other messages find some credit, too."""
        if self._stalled or self._wants:
            return 0
        left = min(self._window - self._used.get(tag, 0), self._most - self._total)
        return max(0, left * 2 // 3)

    def pay(self, tag: MessageTag, price: int) -> bool:
        """Pay for the next message of `tag`, if it answers no want and no other message waits.

        False: `admit` has to decide.
        """
        used = self._used.get(tag, 0) + price
        total = self._total + price
        if used > self._window or total > self._most or self._wants or self._stalled:
            return False
        self._used[tag] = used
        self._total = total
        return True

    def refund(self, tag: MessageTag, amount: int) -> None:
        """Note that the receiver consumed messages of `tag`. Raises ProtocolError if it had
        none."""
        used = self._used.get(tag, 0) - amount
        if amount <= 0 or used < 0:
            raise ProtocolError(f"{amount} bytes of credit came back for tag {tag!r}, too many")
        if used:
            self._used[tag] = used
        else:
            del self._used[tag]
        self._total -= amount

    def want(self, tag: MessageTag) -> None:
        """Note that the receiver waits for `tag`. Raises ProtocolError if it already said so."""
        if tag in self._wants or len(self._wants) >= MAX_WANTS:
            raise ProtocolError(f"a want for tag {tag!r} came twice, or was one too many")
        self._wants.add(tag)

    def unwant(self, tag: MessageTag) -> bool:
        """Note that the receiver takes a want back. False: it was answered already."""
        if tag in self._wants:
            self._wants.remove(tag)
            return True
        return False


class ReceiverCredit(CoreDebt):
    """How much of its credit one sender has used."""

    __slots__ = ("_held", "_most", "_owed", "_told", "_window")

    def __init__(self, limits: Limits | None = None) -> None:
        self._window, self._most, _ = limits or limits_for(0)
        self._held: dict[MessageTag, int] = {}  # the cost of messages that hold credit
        self._total = 0
        self._owed: dict[MessageTag, int] = {}  # the consumed part of it
        self._owed_total = 0
        # Wants without an answer. True: still wanted. False: taken back.
        self._told: dict[MessageTag, bool] = {}

    @property
    def idle(self) -> bool:
        """Whether no state is kept for any tag."""
        return not (self._held or self._told)

    @property
    def books(self) -> tuple[dict[MessageTag, int], dict[MessageTag, int]]:
        """What is held and owed, for the compiled part."""
        return self._held, self._owed

    @property
    def tight(self) -> bool:
        """Whether the total may hold back the sender."""
        return self._total > self._most - MOST

    @property
    def asking(self) -> bool:
        """Whether a want is open, or may be needed."""
        return bool(self._told) or self.tight

    @property
    def crowded(self) -> bool:
        """Whether `ask` may have refused because of the number of wants, before the last answer."""
        return len(self._told) >= MAX_WANTS - 1

    def charge(self, tag: MessageTag, price: int, wanted: bool) -> None:
        """Count a message that comes. Raises ProtocolError if the sender had no credit for it, or
        if the message says that it was `wanted` and it was not."""
        if wanted:
            self.answered(tag, denied=False)
        elif self._total + price > self._most:
            raise ProtocolError(
                f"a message of tag {tag!r} is beyond the total credit: {self._most}"
            )
        held = self._held.get(tag, 0) + price
        if held > self._window:
            raise ProtocolError(
                f"a message of tag {tag!r} is beyond the credit of {self._window} for a tag"
            )
        self._held[tag] = held
        self._total += price

    def consume(self, tag: MessageTag, price: int, batch: int | None = None) -> bool:
        """Count a message that was consumed. True: a `batch` is owed, so it is time to
        `settle`."""
        self._owed[tag] = self._owed.get(tag, 0) + price
        self._owed_total += price
        return self._owed_total >= (batch or BATCH)

    def pass_through(self, tag: MessageTag, price: int, batch: int | None = None) -> bool:
        """Count a message that was consumed as soon as it came: `charge`, then `consume`."""
        self.charge(tag, price, wanted=False)
        return self.consume(tag, price, batch)

    def settle(self) -> list[tuple[MessageTag, int]]:
        """Return the credit to give back, as (tag, amount)."""
        owed = list(self._owed.items())
        self._owed.clear()  # the same dict, because the compiled part has it
        self._total -= self._owed_total
        self._owed_total = 0
        for tag, amount in owed:
            held = self._held[tag] - amount
            if held:
                self._held[tag] = held
            else:
                del self._held[tag]
        return owed

    def ask(self, tag: MessageTag) -> bool:
        """Return whether to tell the sender now that this rank waits for `tag`."""
        if tag in self._told or not self.tight or len(self._told) >= MAX_WANTS:
            return False
        self._told[tag] = True
        return True

    def take_back(self, tag: MessageTag) -> bool:
        """Return whether to tell the sender now that this rank does not wait for `tag` any more."""
        if self._told.get(tag):
            self._told[tag] = False
            return True
        return False

    def answered(self, tag: MessageTag, *, denied: bool) -> None:
        """Note that the sender answered a want. Raises ProtocolError if there was none, or if it
        denied one that is still open."""
        holds = self._told.pop(tag, None)
        if holds is None or (denied and holds):
            raise ProtocolError(f"an answer to a want for tag {tag!r} came, but none is open")
