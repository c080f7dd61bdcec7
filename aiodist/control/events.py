"""What the coordinator tells a member unasked, and how requests fail."""

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
    """The connection to the coordinator ended, and this side did not close it.

    `orderly`: the coordinator said goodbye. `evicted`: it ruled this member lost, and told the
    others. `final`: this member does not look for it any more.
    """

    reason: str
    orderly: bool = False
    evicted: bool = False
    final: bool = False

    def eviction(self, address: str) -> str:
        """Return the error text for the calls of a member that was evicted."""
        return (
            f"this rank is no longer a member: the coordinator at {address} says that "
            f"{self.reason}; connect again to join"
        )


@dataclass(frozen=True, slots=True)
class CoordinatorBack:
    """There is a coordinator again, and this process is a member there.

    `kept`: it has the store of the one before. Otherwise the store is empty now.
    """

    kept: bool


ControlEvent = MemberLost | MemberLeft | Draining | CoordinatorGone | CoordinatorBack


class ShutdownError(JoinError):
    """The coordinator is shutting down. Another one may follow at its address."""


class StoreValueError(AiodistError, ValueError):
    """`add` met a value that is not a decimal number of at most 64 bits."""


_ERRORS: dict[Failure, Callable[..., AiodistError]] = {
    Failure.RANK_TAKEN: RankTakenError,
    Failure.SIZE_MISMATCH: SizeMismatchError,
    Failure.COMPLETE: GroupCompleteError,
    Failure.DRAINING: ShutdownError,
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
    """Return the error that a Failed reply to a member of `group` stands for."""
    return _ERRORS[failed.kind](failed.text, group=group)
