"""Building blocks of bulk plans: what goes into one frame, and two ranks that swap frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiodist.schedules.cuts import AHEAD
from aiodist.schedules.plan import Grant, Recv, Send, Span, Step

Frame = tuple[Span, ...]


def packed(spans: Iterable[Span], segment: int) -> list[Frame]:
    """The spans in as few frames as hold them: small ones share a frame, and what is longer than
    `segment` units is cut. Both ends must pack equally long spans in the same order."""
    frames: list[Frame] = []
    frame: list[Span] = []
    room = segment
    for buffer, start, end in spans:
        while start < end:
            stop = min(start + room, end)
            frame.append(Span(buffer, start, stop))
            room -= stop - start
            start = stop
            if not room:
                frames.append(tuple(frame))
                frame, room = [], segment
    return [*frames, tuple(frame)] if frame else frames


def alone(spans: Iterable[Span]) -> list[Frame]:
    """Each span in a frame of its own."""
    return [(span,) for span in spans]


def swap(
    to: int,
    outgoing: Sequence[Sequence[Step]],
    source: int,
    incoming: Sequence[Frame],
    then: Callable[[int], Sequence[Step]] = lambda at: (),
) -> list[Step]:
    """Send to one rank and receive from another, which may be the same, at the same time.

    ``outgoing[k]`` is what comes before the k-th frame to `to` with that frame's Send at its end;
    ``then(k)`` follows the k-th Recv. AHEAD frames leave before the first that comes is waited for:
    so the wire is not idle while a rank works on what has come.
    """
    steps: list[Step] = []
    for k in range(max(len(outgoing), len(incoming) + AHEAD)):
        if k < len(outgoing):
            steps += outgoing[k]
        if 0 <= k - AHEAD < len(incoming):
            steps.append(Recv(source, incoming[k - AHEAD]))
            steps += then(k - AHEAD)
    return steps


def sends(to: int, frames: Iterable[Frame]) -> list[Sequence[Step]]:
    """Frames to one rank, as `swap` takes them."""
    return [(Send(to, frame),) for frame in frames]


def granted(steps: Sequence[Step]) -> list[Step]:
    """The steps, after a grant to each peer for all that is received from it.

    For plans that receive into memory that is free from the start and not written again.
    """
    due: dict[int, int] = {}
    for step in steps:
        if isinstance(step, Recv):
            due[step.peer] = due.get(step.peer, 0) + 1
    return [*(Grant(peer, count) for peer, count in due.items()), *steps]
