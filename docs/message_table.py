"""The table in architecture.md of the messages that the two actors take.

The coordinator's are those for which its state machine has a handler, the two of its greeting, and
those that its actor answers itself; all other control messages are for a rank. What peers tell each
other is in the docstring of `aiodist.wire.kinds`. What a message is for is the first sentence of
its docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

from aiodist.membership.machine import Membership
from aiodist.wire import counts, kinds, messages
from aiodist.wire.returning import Rejoin

Kind = type[messages.Message]

GREETING: frozenset[Kind] = frozenset({messages.Hello, messages.Proof})
"""What the coordinator takes before its state machine sees a connection."""

STATELESS: frozenset[Kind] = frozenset({messages.ClockRequest, counts.Counts})
"""What its actor sees to: no state of groups hangs on these."""

_EVERYBODY = "a member, or a rank that waits to join"
SENDERS: dict[Kind, str] = {
    messages.Hello: "a new connection",
    messages.Proof: "a new connection",
    messages.JoinRequest: "a rank that wants to join",
    messages.Withdraw: "a rank that waits to join",
    messages.Leave: _EVERYBODY,
    messages.Renew: _EVERYBODY,
    messages.StatusRequest: "any connection, after its greeting",
    Rejoin: "a member that comes back",
}
"""Who sends the coordinator what, where it is not a member."""

RANK_SIDE = ("aiodist/averaging", "aiodist/control", "aiodist/rank")
"""Where the control messages are read that a rank takes."""

UNREAD: frozenset[Kind] = frozenset({messages.Left})
"""Answers whose name nobody needs to read: to have any answer is enough."""

NOT_KINDS = frozenset({"VERSION"})
"""Numbers of `aiodist.wire.kinds` that are no kinds of frames."""

ROW = re.compile(r"^([A-Z0-9_]+) +\[[^\]]*\](?: \+ payload)?: ", re.MULTILINE)


def render(root: Path) -> Iterator[str]:
    """One table: receiver, message, sender, and what the message is for."""
    yield "| receiver | message | sender | what it is for |\n| --- | --- | --- | --- |\n"
    handled = coordinator_kinds()
    for kind in by_code():
        if kind in handled:
            yield _row("coordinator", kind.__name__, SENDERS.get(kind, "a member"), purpose(kind))
    unasked = unasked_kinds(root)
    for kind in by_code():
        if kind not in handled:
            way = "unasked" if kind.__name__ in unasked else "as an answer"
            yield _row("rank", kind.__name__, f"the coordinator, {way}", purpose(kind))
    for name, text in frame_kinds().items():
        yield _row("rank", name, "a peer", sentence(text))


def problems(root: Path) -> list[str]:
    """Messages that nobody takes, and those that do not say what they are for."""
    found = [
        f"aiodist/wire: {kind.__name__} has no docstring that says what it is for"
        for kind in by_code()
        if not purpose(kind)
    ]
    read = names_read(root)
    found += [
        f"aiodist/wire: nobody takes {kind.__name__}: the coordinator has no handler for it, and "
        f"nothing in {' or '.join(RANK_SIDE)} reads it"
        for kind in by_code()
        if kind not in coordinator_kinds() | UNREAD and kind.__name__ not in read
    ]
    told = frame_kinds()
    found += [
        f"aiodist/wire/kinds.py: the table of the docstring does not say what {name} is for"
        for name, value in vars(kinds).items()
        if type(value) is int and name not in NOT_KINDS and name not in told
    ]
    return found


def by_code() -> list[Kind]:
    """All control messages, by their numbers."""
    return sorted(messages.message_types(), key=lambda kind: kind.code)


def coordinator_kinds() -> frozenset[Kind]:
    """The control messages that the coordinator takes."""
    return GREETING | STATELESS | frozenset(Membership()._handlers)


def unasked_kinds(root: Path) -> set[str]:
    """What a rank is told without having asked: the cases of `Line._on_told`."""
    tree = ast.parse((root / "aiodist/control/line.py").read_text())
    (told,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_on_told"
    ]
    return {
        node.cls.id
        for node in ast.walk(told)
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }


def names_read(root: Path) -> set[str]:
    """All names that the code of a rank's side uses."""
    paths = [path for folder in RANK_SIDE for path in (root / folder).glob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    names = (
        node.id if isinstance(node, ast.Name) else node.attr  # `AverageWithdrawn`, or of a module
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute))
    )
    return {*names}


def frame_kinds() -> dict[str, str]:
    """What each kind of frame is for, by its name."""
    docstring = kinds.__doc__ or ""
    table = re.split(r"^=[= ]+$", docstring, flags=re.MULTILINE)[1]
    _, *parts = ROW.split(table)
    return {name: _line(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def purpose(kind: Kind) -> str:
    """The first sentence of what a message says of itself. Empty: it says nothing."""
    docstring = kind.__doc__ or ""
    if is_dataclass(kind) and docstring.startswith(f"{kind.__name__}("):
        return ""  # made by `dataclass`, where there is none
    return sentence(docstring)


def sentence(text: str) -> str:
    """The first sentence of a text, up to a semicolon or a reference."""
    first = re.split(r"(?<=\.)\s", _line(text), maxsplit=1)[0]
    return re.sub(r"(?:;|, (?=see)| \(see) .*$", ".", first)


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _row(*cells: str) -> str:
    taker, name, *rest = cells
    return f"| {taker} | `{name}` | {' | '.join(rest)} |\n"
