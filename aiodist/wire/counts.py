"""Control messages with what members count, for monitoring.

A member counts since it joined, over all of its groups and epochs. Counts never go back.
"""

from __future__ import annotations

from typing import Annotated, Final

from aiodist.wire import schema
from aiodist.wire.messages import Message, Name

FAILURES: Final = ("lost", "timeout", "aborted", "mismatch")
"""Why operations fail: PeerLostError, CollectiveTimeoutError, CollectiveAbortedError,
MismatchError."""

SIZES: Final = (1 << 10, 1 << 16, 1 << 20, 1 << 26)
"""Classes of operations by their bytes: up to each of these, and above the last."""

SECONDS: Final = tuple([1e-5 * 4**k for k in range(11)])
"""Classes of operations by their duration: up to each of these, and above the last."""

MOST_TRANSPORTS: Final = 16
MOST_TIMES: Final = 256
"""The most rows of each kind."""

_Count = Annotated[int, schema.integer(0, 2**62)]


class Payload(schema.Struct):
    """Bytes `sent` and `received` by a transport. "memory" is shared memory of the ranks of a
    host."""

    transport: Name
    sent: _Count
    received: _Count


class Times(schema.Struct):
    """How long operations `op` of one class of `SIZES` took: how many in each class of `SECONDS`.

    `seconds` is the sum of their durations.
    """

    op: Name
    size: Annotated[int, schema.integer(0, len(SIZES))]
    counts: Annotated[tuple[int, ...], schema.sequence(schema.integer(0, 2**62), len(SECONDS) + 1)]
    seconds: Annotated[float, schema.seconds(0.0)]


class CountsRequest(Message, code=74):
    """Asks a member for its counts, and to measure operations from now on. Answer: Counts."""


class Counts(Message, code=75):
    """What the sender has counted. It is also sent before it leaves.

    `failures` counts failed operations, by `FAILURES`.
    """

    failures: Annotated[
        tuple[int, ...], schema.sequence(schema.integer(0, 2**62), len(FAILURES))
    ] = (0,) * len(FAILURES)
    payload: Annotated[
        tuple[Payload, ...], schema.sequence(schema.struct(Payload), MOST_TRANSPORTS)
    ] = ()
    times: Annotated[tuple[Times, ...], schema.sequence(schema.struct(Times), MOST_TIMES)] = ()
