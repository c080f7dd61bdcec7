"""A table for people of what each rank called. Equal calls share a line, and differences are
marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiodist.membership.group import ranks_text

WIDEST = 90
"""The most characters of a call that are shown."""

CONTEXT = 24
"""How many equal characters stay before a difference, if a call is too long."""

MOST_LINES = 16
"""The most different calls that are shown."""


def table(calls: Mapping[int, str]) -> str:
    """Return a table with a line for each different call, and the ranks that made it.

    The call of most ranks comes first. Below the others, ``^`` marks what differs from it::

        ranks 0-2, 5  all_reduce(SUM, float32[1024])
        rank 3        all_reduce(SUM, float32[1025])
                                                 ^
        rank 4        barrier()
                      ^^^^^^^^^
    """
    ranks: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(rank)
    by_count = sorted(ranks, key=lambda call: (-len(ranks[call]), ranks[call]))
    if not by_count:
        return ""
    shown = by_count[:MOST_LINES]
    spans = [_difference(call, by_count[0]) for call in shown]
    start = max(0, min([start for start, _ in spans[1:]], default=0) - CONTEXT)
    if max(map(len, shown)) <= WIDEST:
        start = 0
    who = [ranks_text(ranks[call]) for call in shown]
    width = max(map(len, who))
    lines = []
    for name, call, span in zip(who, shown, spans, strict=True):
        text, low, high = _excerpt(call, span, start)
        lines.append(f"  {name:<{width}}  {text}")
        if call is not shown[0]:
            lines.append(" " * (width + 4 + low) + "^" * (high - low))
    if len(by_count) > len(shown):
        rest = [rank for call in by_count[MOST_LINES:] for rank in ranks[call]]
        lines.append(f"  {ranks_text(rest)}: {len(by_count) - len(shown)} other calls")
    return "\n".join(lines)


def _difference(call: str, other: str) -> tuple[int, int]:
    """Return which part of `call` differs from `other`. It is empty only if they are equal."""
    if call == other:
        return 0, 0
    if call.partition("(")[0] != other.partition("(")[0]:
        return 0, len(call)
    shorter = min(len(call), len(other))
    start = next((at for at in range(shorter) if call[at] != other[at]), shorter)
    longest = shorter - start
    end = 0
    while end < longest and call[-1 - end] == other[-1 - end]:
        end += 1
    return _whole_word(call, start, max(len(call) - end, start + 1))


def _whole_word(call: str, start: int, stop: int) -> tuple[int, int]:
    """Move `start` and `stop` outwards to the ends of numbers and names."""
    while start > 0 and call[start - 1].isalnum() and start < len(call) and call[start].isalnum():
        start -= 1
    while stop < len(call) and call[stop - 1].isalnum() and call[stop].isalnum():
        stop += 1
    return start, min(stop, len(call))


def _excerpt(call: str, span: Sequence[int], start: int) -> tuple[str, int, int]:
    """Return `call` from `start` on, shortened, and the place of `span` in it."""
    low, high = span
    text, shift = call, 0
    if start:
        text, shift = "..." + call[start:], 3 - start
    if len(text) > WIDEST:
        text = text[: WIDEST - 3] + "..."
    low = min(max(low + shift, 0), len(text) - 1)
    return text, low, max(min(high + shift, len(text)), low + 1)
