"""Building blocks of bulk plans: packing spans into frames, and two ranks that swap frames."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from aiodist.schedules.cuts import AHEAD, Series, edges_of, mapped
from aiodist.schedules.plan import Grant, Recv, Send, Span, Step
from aiodist.schedules.script import Script, ahead

Frame = tuple[Span, ...]


def packed(spans: Iterable[Span], segment: int) -> Series[Frame]:
    """The spans in as few frames as hold them: small spans share a frame, and spans longer than
    `segment` units are cut. Both ends must pack equally long spans in the same order."""
    listed = [span for span in spans if span.length]
    ends = [*accumulate(span.length for span in listed)]
    total = ends[-1] if ends else 0

    def frame(k: int) -> Frame:
        first, stop = k * segment, min((k + 1) * segment, total)
        found: list[Span] = []
        for at in range(bisect_right(ends, first), len(ends)):
            if first == stop:
                break
            upto = min(stop, ends[at])
            shift = listed[at].stop - ends[at]
            found.append(Span(listed[at].buffer, first + shift, upto + shift))
            first = upto
        return tuple(found)

    return Series(-(-total // segment), frame, (end // segment for end in ends))


def alone(spans: Sequence[Span]) -> Series[Frame]:
    """Each span in a frame of its own."""
    return mapped(spans, lambda span: (span,))


def swap(
    to: int,
    outgoing: Sequence[Sequence[Step]],
    source: int,
    incoming: Sequence[Frame],
    then: Callable[[int], Sequence[Step]] = lambda at: (),
    ahead: int = AHEAD,
) -> Script:
    """Send to one rank and receive from another, which may be the same, at the same time.

    ``outgoing[k]`` are the steps for the k-th frame to `to`, the last of which is its Send. The
    steps ``then(k)`` follow the k-th Recv. `ahead` frames are sent before the first Recv, so that
    the wire is not idle while a rank works on what it has received.
    """

    def turn(k: int) -> list[Step]:
        steps: list[Step] = [*outgoing[k]] if k < len(outgoing) else []
        if 0 <= k - ahead < len(incoming):
            steps += [Recv(source, incoming[k - ahead]), *then(k - ahead)]
        return steps

    script = Script()
    edges = [*edges_of(outgoing), *(edge + ahead for edge in (0, *edges_of(incoming)))]
    script.repeat(max(len(outgoing), len(incoming) + ahead), turn, edges)
    return script


def sends(to: int, frames: Sequence[Frame]) -> Series[Sequence[Step]]:
    """Frames to one rank, as `swap` takes them."""
    return mapped(frames, lambda frame: (Send(to, frame),))


def sent(to: int, frames: Sequence[Frame]) -> Script:
    """Send all frames to one rank."""
    script = Script()
    script.repeat(len(frames), lambda k: (Send(to, frames[k]),), edges_of(frames))
    return script


def received(source: int, frames: Sequence[Frame]) -> Script:
    """Receive all frames from one rank."""
    script = Script()
    script.repeat(len(frames), lambda k: (Recv(source, frames[k]),), edges_of(frames))
    return script


def granted(steps: Script) -> Script:
    """The steps, after a grant to each peer for all frames that come from it.

    This is for plans that receive into memory that is free from the start and not written again.
    """
    due: dict[int, int] = {}
    for step, times in ahead(steps.steps()):
        if isinstance(step, Recv):
            due[step.peer] = due.get(step.peer, 0) + times
    script = Script(Grant(peer, count) for peer, count in due.items())
    script += steps
    return script
