"""Control messages with what members count: for who watches a coordinator over time.

Counts are of a member since it joined, in all of its groups and epochs, and never go back.
"""

from __future__ import annotations

from typing import Annotated, Final

from aiodist.wire import schema
from aiodist.wire.messages import Message, Name

FAILURES: Final = ("lost", "timeout", "aborted", "mismatch")
"""Why operations fail: PeerLostError, CollectiveTimeoutError, CollectiveAbortedError,
MismatchError."""

SIZES: Final = (1 << 10, 1 << 16, 1 << 20, 1 << 26)
"""Operations are told apart by bytes of this rank: up to each of these, and more."""

SECONDS: Final = tuple([1e-5 * 4**k for k in range(11)])
"""Operations are told apart by how long they took as well: up to each of these, and more."""

MOST_TRANSPORTS: Final = 16
MOST_TIMES: Final = 256
"""Most rows of each kind."""

_Count = Annotated[int, schema.integer(0, 2**62)]


class Payload(schema.Struct):
    """Bytes `sent` and `received` by a transport; "memory" is memory that the ranks of a host
    share."""

    transport: Name
    sent: _Count
    received: _Count


class Times(schema.Struct):
    """How many operations `op` of a class of `SIZES` took how long, by `SECONDS`; and the sum of
    these, in seconds."""

    op: Name
    size: Annotated[int, schema.integer(0, len(SIZES))]
    counts: Annotated[tuple[int, ...], schema.sequence(schema.integer(0, 2**62), len(SECONDS) + 1)]
    seconds: Annotated[float, schema.seconds(0.0)]


class CountsRequest(Message, code=74):
    """Asks a member for its counts, and to measure operations from now on. Answer: Counts."""


class Counts(Message, code=75):
    """What the sender has counted. Also said before it leaves. `failures`: operations that have
    failed, by `FAILURES`."""

    failures: Annotated[
        tuple[int, ...], schema.sequence(schema.integer(0, 2**62), len(FAILURES))
    ] = (0,) * len(FAILURES)
    payload: Annotated[
        tuple[Payload, ...], schema.sequence(schema.struct(Payload), MOST_TRANSPORTS)
    ] = ()
    times: Annotated[tuple[Times, ...], schema.sequence(schema.struct(Times), MOST_TIMES)] = ()
