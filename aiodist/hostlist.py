"""Slurm's hostlist expressions, as in SLURM_JOB_NODELIST. Pure.

``gpu[001-003,7],login`` stands for the hosts gpu001, gpu002, gpu003, gpu7 and login.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ELEMENT = re.compile(r"((?:[^\s,\[\]]|\[[^\[\]]*\])+)(,|\Z)")
"""The text before a comma that is in no brackets, or before the end."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def hosts(expression: str) -> Iterator[str]:
    """Yield the hosts that `expression` names, in order, one at a time because a range may be long.

    Numbers keep the leading zeros of their range. With several brackets in one name, the last one
    counts fastest. Raises ValueError, on reaching it, for a part that is invalid.
    """
    at = 0
    while element := _ELEMENT.match(expression, at):
        yield from _expanded(re.split(r"\[(.*?)\]", element[1]), expression)
        at = element.end()
        if not element[2]:
            return
    raise _invalid(expression)


def _expanded(parts: list[str], expression: str) -> Iterator[str]:
    """Yield the names that `parts` make: text, then in turn the content of brackets, and text."""
    text, *rest = parts
    if not rest:
        yield text
        return
    for number in _numbers(rest[0], expression):
        for end in _expanded(rest[1:], expression):
            yield f"{text}{number}{end}"


def _numbers(ranges: str, expression: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _invalid(expression)
        first, last = found[1], found[2] or found[1]
        if int(first) > int(last):
            raise _invalid(expression)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def _invalid(expression: str) -> ValueError:
    return ValueError(f"{expression!r} is no list of hosts: expected such as 'node[01-04,7],login'")
