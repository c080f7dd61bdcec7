"""What a member hears from its coordinator: what it is told unasked, and how requests fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiodist.errors import (
    AiodistError,
    AuthenticationError,
    GroupClosedError,
    GroupCompleteError,
    JoinError,
    MessageTooLargeError,
    MismatchError,
    RankTakenError,
    SizeMismatchError,
)
from aiodist.wire.messages import Draining, Failed, Failure, MemberLeft, MemberLost


@dataclass(frozen=True, slots=True)
class CoordinatorGone:
    """The connection to the coordinator ended, not by this side. `orderly`: it said goodbye.
    `evicted`: it ruled this member lost, and told the others so. `final`: it is not looked for."""

    reason: str
    orderly: bool = False
    evicted: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorBack:
    """There is a coordinator again, and this is a member there. `kept`: it has the store of the
    one before; else the store is empty now."""

    kept: bool


ControlEvent = MemberLost | MemberLeft | Draining | CoordinatorGone | CoordinatorBack


class StoreValueError(AiodistError, ValueError):
    """`add` met a value that is no decimal number of at most 64 bits."""


_ERRORS: dict[Failure, Callable[..., AiodistError]] = {
    Failure.RANK_TAKEN: RankTakenError,
    Failure.SIZE_MISMATCH: SizeMismatchError,
    Failure.COMPLETE: GroupCompleteError,
    Failure.DRAINING: JoinError,
    Failure.INVALID: JoinError,
    Failure.VERSION: JoinError,
    Failure.BUSY: JoinError,
    Failure.AUTHENTICATION: AuthenticationError,
    Failure.NOT_A_MEMBER: GroupClosedError,
    Failure.TOO_LARGE: MessageTooLargeError,
    Failure.NOT_AN_INTEGER: StoreValueError,
    Failure.MISMATCH: partial(MismatchError, calls={}),
}


def error_of(failed: Failed, group: str | None) -> AiodistError:
    """What a reply stands for that says why a request of a member of `group` failed."""
    return _ERRORS[failed.kind](failed.text, group=group)
