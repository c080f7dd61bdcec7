"""Control messages about what members are doing, to find the cause of a standstill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

from aiodist.wire import schema
from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME, MAX_PLACES, MAX_WAITS
from aiodist.wire.messages import Epoch, Message, Name, Ranks

LONG_WAIT: Final = 10.0
"""Seconds after which a wait is logged, and told to the coordinator."""

Places = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_PLACES)]


class Wait(schema.Struct):
    """A pending operation of `group` in `epoch`.

    `context` is the same for all ranks of that group. `tag`, as Python writes it, and `seq` name
    the operation; messages have no `seq`. `missing` are the ranks of the view that it waits for, as
    far as known: see `packed`.
    """

    context: Annotated[bytes, schema.blob(8)]
    group: Name
    epoch: Epoch
    op: Name
    tag: Name
    seq: Annotated[int | None, schema.optional(schema.integer(0, 2**62))]
    seconds: Annotated[float, schema.seconds(0.0)]
    missing: Annotated[bytes, schema.blob(MAX_MEMBERS // 8)]


class Inquire(Message, code=70):
    """Asks a member what it is doing. Its answer is an Activity, as a message of its own."""


class Activity(Message, code=71):
    """What the sender is doing. No reply. A member whose event loop does not turn sends it unasked.

    `busy`: for how many seconds the loop has had no turn (0: it turns). `places`: the lines of the
    program that keep the loop busy, innermost first; if the loop turns, those at which its tasks
    wait. `last`: the end of its last collective. `waits`: pending operations, the oldest first; a
    busy member tells of none. Since the member joined, in all groups and epochs: `collectives`
    counts its calls, and `sent` and `received` the payload bytes of all transports. `saved` counts
    the bytes that it did not have to send, because codecs made them fewer.
    """

    busy: Annotated[float, schema.seconds(0.0)] = 0.0
    places: Places = ()
    last: Name = ""
    waits: Annotated[tuple[Wait, ...], schema.sequence(schema.struct(Wait), MAX_WAITS)] = ()
    collectives: Annotated[int, schema.integer(0, 2**62)] = 0
    sent: Annotated[int, schema.integer(0, 2**62)] = 0
    received: Annotated[int, schema.integer(0, 2**62)] = 0
    saved: Annotated[int, schema.integer(0, 2**62)] = 0


class SeenRequest(Message, code=72):
    """Asks what others of the sender's view are doing.

    The sender waits at most `seconds` for those that do not answer at once. Reply: Seen.
    """

    ranks: Ranks
    seconds: Annotated[float, schema.seconds(0.0)] = 1.0


class Seen(Message, code=73):
    """The answer to SeenRequest: what `ranks` are doing, in words, one text for each."""

    ranks: Ranks
    texts: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_MEMBERS)]


class Stalled(Message, code=76):
    """Says that the sender has waited for `seconds`, in a join or in an operation.

    0 seconds: it does not wait so long any more; this has no reply. `waits` are the operations, the
    longest wait first. Votes and store requests are not among them, because the coordinator knows
    these itself. Reply: Seen, about the ranks that the first operation waits for, or Withdrawn if
    the sender waits to join.
    """

    seconds: Annotated[float, schema.seconds(0.0)]
    waits: Annotated[tuple[Wait, ...], schema.sequence(schema.struct(Wait), MAX_WAITS)] = ()


def bits_of(ranks: Iterable[int]) -> int:
    """Return a set of ranks as the bits of an int."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_in(bits: int) -> tuple[int, ...]:
    """Return the ranks in a set of bits, ascending."""
    return tuple([rank for rank, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"])


def packed(ranks: Iterable[int]) -> bytes:
    """Return a set of ranks as it is sent: rank r is bit r % 8 of byte r // 8."""
    bits = bits_of(ranks)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpacked(data: bytes) -> int:
    """Return the bits of the ranks that `packed` made."""
    return int.from_bytes(data, "little")


def shortened(text: str) -> str:
    """Return `text`, cut to the length of a name."""
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 3]}..."
