"""Control messages about what members are doing: for who looks for the cause of a standstill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

from aiodist.wire import schema
from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME, MAX_PLACES, MAX_WAITS
from aiodist.wire.messages import Epoch, Message, Name, Ranks

LONG_WAIT: Final = 10.0
"""Seconds after which a wait is told of: in a log, and to the coordinator."""

Places = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_PLACES)]


class Wait(schema.Struct):
    """An operation of `group` in `epoch` that is pending. `context` names that for all its ranks.

    `tag`, as Python writes it, and `seq` tell it apart there; messages have no `seq`. `missing`:
    the ranks of the view that it waits for, as far as known there: see `packed`.
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
    """Asks a member what it is doing. Answer: Activity, as a message of its own."""


class Activity(Message, code=71):
    """What the sender is doing. No reply; also said unasked by whose event loop does not turn.

    `busy`: for so many seconds its loop has had no turn (0: it has). `places`: the lines of its
    program that keep the loop busy, innermost first; else those that its tasks wait at. `last`:
    what became of its last collective. `waits`: what is pending, the oldest first; of who is busy,
    none is told. Since it joined, in all groups and epochs: `collectives`, how many it has called;
    `sent` and `received`, bytes of payload over all transports.
    """

    busy: Annotated[float, schema.seconds(0.0)] = 0.0
    places: Places = ()
    last: Name = ""
    waits: Annotated[tuple[Wait, ...], schema.sequence(schema.struct(Wait), MAX_WAITS)] = ()
    collectives: Annotated[int, schema.integer(0, 2**62)] = 0
    sent: Annotated[int, schema.integer(0, 2**62)] = 0
    received: Annotated[int, schema.integer(0, 2**62)] = 0


class SeenRequest(Message, code=72):
    """Asks what others of the sender's view are doing. The sender has so many `seconds` to wait for
    those that do not say so at once. Reply: Seen."""

    ranks: Ranks
    seconds: Annotated[float, schema.seconds(0.0)] = 1.0


class Seen(Message, code=73):
    """The answer to SeenRequest: what `ranks` are doing, in words, one text for each."""

    ranks: Ranks
    texts: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_MEMBERS)]


class Stalled(Message, code=76):
    """Says that the sender has waited for `seconds`, in a join or in an operation; 0: it waits for
    nothing so long any more, which has no reply.

    `waits`: the operations, the longest wait first. Votes and requests to the store are not among
    them, because the coordinator knows these itself. Reply: Seen, of the ranks that the first of
    them waits for; Withdrawn, if the sender waits to join.
    """

    seconds: Annotated[float, schema.seconds(0.0)]
    waits: Annotated[tuple[Wait, ...], schema.sequence(schema.struct(Wait), MAX_WAITS)] = ()


def bits_of(ranks: Iterable[int]) -> int:
    """A set of ranks as the bits of an int."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_in(bits: int) -> tuple[int, ...]:
    """The ranks in a set of bits, ascending."""
    return tuple([rank for rank, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"])


def packed(ranks: Iterable[int]) -> bytes:
    """A set of ranks as it is sent: rank r is bit r % 8 of byte r // 8."""
    bits = bits_of(ranks)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpacked(data: bytes) -> int:
    """The bits of the ranks in what `packed` gave."""
    return int.from_bytes(data, "little")


def shortened(text: str) -> str:
    """`text`, so short that it can be sent as a name."""
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 3]}..."
