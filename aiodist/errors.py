"""Exceptions. Every error that aiodist raises on purpose derives from `AiodistError`::

    AiodistError
    ├── JoinError                  this rank did not become a member
    │   ├── RankTakenError         another living member holds the rank
    │   ├── SizeMismatchError      the group was opened with another size
    │   ├── GroupCompleteError     the group is fixed, complete and healthy
    │   └── JoinTimeoutError       (also TimeoutError) not all came, or no coordinator was reached
    ├── AuthenticationError        no or wrong token
    ├── ProtocolError              bytes that no aiodist peer would send; ends one connection
    ├── GroupBrokenError           the group cannot go on as it is; its survivors can: `shrink`
    │   ├── PeerLostError          .ranks died, or their connection broke
    │   └── GroupRevokedError      some rank revoked the group
    ├── CollectiveTimeoutError     (also TimeoutError) .missing did not arrive by the deadline
    │   └── QuorumLostError        an averager had fewer members than its quorum all the time
    ├── CollectiveAbortedError     .rank gave up the operation, for .reason
    ├── StaleError                 a member of an averager has missed more rounds than are kept
    ├── MismatchError              .calls: ranks called different things
    ├── MessageTooLargeError       (also ValueError) a message is over max_message_bytes
    ├── GroupClosedError           the group was closed, here
    └── CoordinatorLostError       the coordinator is gone for good

The fields `group`, `epoch`, `op`, `tag` and `seq` name the operation that failed. They are None if
they have no meaning, and are part of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class AiodistError(Exception):
    """Base of all aiodist errors."""

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        epoch: int | None = None,
        op: str | None = None,
        tag: object = None,
        seq: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.group = group
        self.epoch = epoch
        self.op = op
        self.tag = tag
        self.seq = seq

    def __str__(self) -> str:
        parts = (
            ("group {!r}", self.group),
            ("epoch {}", self.epoch),
            ("{}", self.op),
            # Tags of bytes are aiodist's own, and mean nothing to the program.
            ("tag {!r}", None if isinstance(self.tag, bytes) else self.tag),
            ("#{}", self.seq),
        )
        where = [text.format(value) for text, value in parts if value is not None]
        return f"{self.message} [{', '.join(where)}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Because the default pickling of exceptions loses keyword-only fields.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[AiodistError], message: str, fields: dict[str, Any]) -> AiodistError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class JoinError(AiodistError):
    """This rank did not become a member of the group."""


class RankTakenError(JoinError):
    """Another living member holds the rank that was asked for."""


class SizeMismatchError(JoinError):
    """The group was opened with another size."""


class GroupCompleteError(JoinError):
    """The group is fixed, complete and healthy, so no rank can join."""


class JoinTimeoutError(JoinError, TimeoutError):
    """The coordinator was not reached in time, or the group did not become complete in time.

    `missing` has the ranks that had not come, ascending. It is empty if they are not known: no
    coordinator was reached, the group is elastic, or ranks are assigned.
    """

    def __init__(self, message: str, *, missing: Iterable[int] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.missing: tuple[int, ...] = tuple(sorted(set(missing)))


class AuthenticationError(AiodistError):
    """The coordinator or a peer asked for a token, and this process gave none or a wrong one."""


class ProtocolError(AiodistError):
    """The other side sent bytes that no aiodist peer would send. The connection is closed."""


class GroupBrokenError(AiodistError):
    """The group cannot go on as it is: a rank is lost, or the group was revoked.

    If an operation ends because a member is lost, every rank gets one of the two subclasses. The
    survivors go on with ``group = await group.shrink()``. `ranks` names the lost ranks. It is empty
    if the group was revoked.
    """

    ranks: tuple[int, ...] = ()


class PeerLostError(GroupBrokenError):
    """Ranks died, or the connection to them broke. `ranks` names them, ascending."""

    def __init__(self, message: str, *, ranks: Iterable[int], **where: Any) -> None:
        super().__init__(message, **where)
        self.ranks = tuple(sorted(set(ranks)))


class CollectiveTimeoutError(AiodistError, TimeoutError):
    """Ranks did not arrive by the deadline.

    `missing` has the ranks that had not entered the operation, ascending. If all had entered, it
    has those that do not answer. For an averager it has the names of the members that had not
    contributed. `last_seen` maps missing ranks to what they said they were doing, or to when they
    were last heard of. A rank of which nothing is known is not in it.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[Any] = (),
        last_seen: Mapping[int, str] | None = None,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.missing: tuple[Any, ...] = tuple(sorted(set(missing)))
        self.last_seen: dict[int, str] = dict(last_seen or {})


class QuorumLostError(CollectiveTimeoutError):
    """An averager had fewer members than its quorum, so no round could close. `present`: how many
    there were; `quorum`: how many it takes."""

    def __init__(self, message: str, *, present: int, quorum: int, **where: Any) -> None:
        super().__init__(message, **where)
        self.present = present
        self.quorum = quorum


class StaleError(AiodistError):
    """A member of an averager has missed more than `max_stale` rounds, or no member has the result
    that it needs. Or its last rounds were decided again without it. `round`: the last one. Take the
    state of another member (`Averager.state`), and go on from there. If no member calls
    `publish_state`, leave the averager and enter it again."""

    def __init__(self, message: str, *, round: int, **where: Any) -> None:
        super().__init__(message, **where)
        self.round = round


class CollectiveAbortedError(AiodistError):
    """Another rank gave up the operation. `rank` is that rank, and `reason` says why."""

    def __init__(self, message: str, *, rank: int, reason: str, **where: Any) -> None:
        super().__init__(message, **where)
        self.rank = rank
        self.reason = reason


class MismatchError(AiodistError):
    """Ranks called different things. `calls` maps ranks to what they called, as far as known
    here."""

    def __init__(self, message: str, *, calls: Mapping[int, str], **where: Any) -> None:
        super().__init__(message, **where)
        self.calls: dict[int, str] = dict(calls)


class MessageTooLargeError(AiodistError, ValueError):
    """A peer announced a message over `max_message_bytes`, or a publisher a version over
    `max_bytes`."""


class GroupRevokedError(GroupBrokenError):
    """A rank revoked the group, so pending and later operations fail."""


class GroupClosedError(AiodistError):
    """The group has ended on this rank.

    It was closed or aborted, the coordinator has removed this rank, or a fork has inherited it.
    `in_order` is True if this program has closed the group with `close`.
    """

    def __init__(self, message: str, *, in_order: bool = False, **where: Any) -> None:
        super().__init__(message, **where)
        self.in_order = in_order


class CoordinatorLostError(AiodistError):
    """The coordinator is gone for good, so membership can no longer change."""


def despite_errors(*steps: Callable[[], object]) -> None:
    """Call all of `steps`, even if some of them raise. Raises the first error then.

    This is for the end of a group, because an interrupt may have left any part of it half done.
    """
    errors: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in an exception group, at any depth; `error` itself if it is no
    group."""
    left = [error]
    while left:
        found = left.pop()
        if isinstance(found, BaseExceptionGroup):
            left += reversed(found.exceptions)
        else:
            yield found


def in_words(error: BaseException, *, located: bool = True) -> str:
    """Return the class and the text of an exception in one line, to tell others.

    An exception group gives those of its leaves, because its own text only says how many there are.
    With `located`, aiodist's own errors say the group and operation, too.
    """
    words = []
    for leaf in leaves(error):
        try:
            text = leaf.message if isinstance(leaf, AiodistError) and not located else str(leaf)
            text = " ".join(filter(None, text.splitlines()))
        except Exception:  # of the exception's own __str__
            text = ""
        words.append(f"{type(leaf).__name__}: {text}" if text else type(leaf).__name__)
    return "; ".join(dict.fromkeys(words))


def printable(text: str) -> str:
    """Return text from the network in one line, without characters that control a terminal.

    These are escape sequences, and characters that change the direction of text.
    """
    return "".join([char if char.isprintable() else "?" for char in text])
