"""What plans are made of: the steps of one rank, and the spans of buffers that they work on.

A `Plan` is the program of one rank. Its steps are executed in order:

- `Send` hands a frame to the link and goes on; it waits only until the peer has granted it.
- `Recv` waits until its frame has arrived.
- `Reduce` and `Copy` are done at once.
- `Grant` allows a peer to send `count` more frames. The first `Plan.pushes` frames may go without.

The n-th `Send` of rank a to rank b is received by the n-th `Recv` at b from a: n is the frame's
*slot*. An eager plan has no grants, because its frames are small: frames that come before the plan
has started are kept aside.

Frames move on their own. The bytes of a `Send` may be read at any time until the peer's `Recv` is
done. The bytes of a `Recv` may be written at any time from the peer's `Send` on. A plan is right if
no other access to the same memory can come in between, however long frames take:
`aiodist.testing.plan_simulator` proves that. When the last step is done, frames may still be on
their way out, so memory is not the user's own until they have left.

Memory is named by spans of three logical buffers. `X` is the input, which no step writes, `OUT` the
result, and `TMP` private scratch of `Plan.scratch` units. The plan's user chooses the units:
elements, bytes, or whole blobs. `X` and `OUT` may be the same memory (an operation in place),
unless the docstring of the algorithm says otherwise.

*Pull* plans, of ranks that share memory, have `Publish` and `Await` steps in place of frames. There
`SHARED + r` names memory of rank r that all ranks see and r alone writes: `Plan.shared` units, all
free when the plan starts. All steps before the n-th `Publish` of a rank have happened for a rank
that has awaited it. All ranks of such a plan publish equally often, so that all know which
publications belong to it. After its last step other ranks may still read what the rank has
published.

*Mixed* plans, of groups that span hosts, have both. Ranks see the shared memory, and await the
publications, of their own host only.

In plans that exchange partial results of reductions, these lie in `TMP` and are sent from there, so
that `TMP` may have a wider type than `X` and `OUT`. Each such docstring says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

X, OUT, TMP, SHARED = 0, 1, 2, 3
"""The logical buffers; ``SHARED + r`` is that of rank r."""

UNLIMITED = sys.maxsize
"""More frames than any plan has."""


class Span(NamedTuple):
    """Units `start` to `stop` of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Send(NamedTuple):
    """One frame to `peer`: the contents of `spans`, in order. A frame without spans is empty; it
    says that all steps before are done."""

    peer: int
    spans: tuple[Span, ...]


class Recv(NamedTuple):
    """One frame from `peer` into `spans`, in order."""

    peer: int
    spans: tuple[Span, ...]


class Reduce(NamedTuple):
    """``into = operands[0] op operands[1] op …``, in that order.

    Operands stand in rank order, unless the plan is for operators that commute. `into` may be one
    of the operands; the others are not altered. All have one length. `final` marks the last
    reduction of these units, which rounds a wider accumulator and, for AVG, divides. Each unit of a
    result has come through exactly one final Reduce, if need be of a single operand.
    """

    into: Span
    operands: tuple[Span, ...]
    final: bool = True


class Copy(NamedTuple):
    """``into = source``."""

    into: Span
    source: Span


@dataclass(frozen=True, slots=True)
class Grant:
    """Allow `peer` to send `count` more frames."""

    peer: int
    count: int


class Publish(NamedTuple):
    """Tell the ranks that await it that all steps of this rank so far are done."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until each of `peers` has published at least `count` times in this plan. With no peers
    there is nothing to wait for, but the plan may pause."""

    peers: tuple[int, ...]
    count: int


Step = Send | Recv | Reduce | Copy | Grant | Publish | Await


class Plan(NamedTuple):
    """The program of `rank` among `size`."""

    name: str
    rank: int
    size: int
    steps: Sequence[Step]
    """A tuple, or for huge arrays what `aiodist.schedules.script` makes."""
    eager: bool
    scratch: int = 0
    shared: int = 0
    publishes: int = 0
    pushes: int = UNLIMITED
    """The most frames to one peer that may leave before their grants, if ranks are far apart. A
    plan that writes again what it has sent needs the later grants, because only they say that the
    earlier frames have arrived."""
