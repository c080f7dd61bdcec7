"""Verdicts: why a collective was given up, in a form that other ranks can read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from aiodist.engine import differences
from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    in_words,
)
from aiodist.links.party import Party

MAX_DETAILS = 24 << 10
"""The most bytes of all texts in the details of a verdict, so that it fits in the header of a
frame."""
_CUT = "…"
"""The end of a text that is not told in full."""

LOST = "lost"
BELIEVED = "believed lost"
"""The rank that gave up has no link to these ranks. The coordinator may still rule that it is the
lost one."""


_DIFFERENT = "ranks called different things:"
"""The beginning of the text of a mismatch of calls."""


class OperatorError(Exception):
    """Code of the user has raised `error`: `what`, an operator or a codec.

    It is wrapped, because some exceptions mean something else if aiodist raises them, and others
    would end the event loop instead of the operation.
    """

    def __init__(self, error: BaseException, what: str = "operator") -> None:
        super().__init__(error)
        self.error = error
        self.what = what


def raised_by(error: BaseException) -> BaseException:
    """Return the exception that the user gets for `error`."""
    return error.error if isinstance(error, OperatorError) else error


_FORGONE = "_aiodist_forgone"


def mark_forgone(error: BaseException) -> None:
    """Mark `error` as raised by a call whose collective has used up its number."""
    error.__dict__[_FORGONE] = True


def is_forgone(error: BaseException) -> bool:
    return _FORGONE in error.__dict__


class Verdict(NamedTuple):
    """Why `rank` gave a collective up.

    `reason`: "cancelled", "error", "aborted", "timeout", "mismatch", `LOST` or `BELIEVED`.
    `details`, by rank: the missing ranks and what they were doing, the calls, or the lost ranks.
    """

    reason: str
    text: str
    rank: int
    details: Mapping[int, str] = MappingProxyType({})

    def fields(self) -> tuple[Any, ...]:
        """Return the fields for an ABORT frame. One more follows them: the ranks that were not
        told."""
        return self.reason, sayable(self.text)[:1000], self.rank, _shortened(self.details)

    @staticmethod
    def parse(fields: Sequence[Any], size: int) -> tuple[Verdict, list[int]]:
        """Return the verdict in an ABORT frame, and the ranks that were not told. Raises
        ProtocolError."""
        if len(fields) == 5:
            reason, text, rank, details, untold = fields
            ranks = range(size)
            if (
                type(reason) is str
                and type(text) is str
                and type(rank) is int
                and rank in ranks
                and type(details) is dict
                and all(type(key) is int and type(value) is str for key, value in details.items())
                and type(untold) is list
                and len(untold) < size
                and all(type(peer) is int and peer in ranks for peer in untold)
            ):
                return Verdict(reason, text, rank, details), untold
        raise ProtocolError("malformed ABORT frame")

    def error(self, own_rank: int, own_call: str, where: Mapping[str, Any]) -> AiodistError:
        """Return the error of the operation on `own_rank`, which called `own_call`."""
        if self.reason == "timeout":
            return CollectiveTimeoutError(
                f"rank {self.rank} gave up: {self.text}",
                missing=self.details,
                last_seen={rank: text for rank, text in self.details.items() if text},
                **where,
            )
        if self.reason == "mismatch":
            if not self.text.startswith(_DIFFERENT):  # no call differs: the data does not fit
                return MismatchError(self.text, calls=self.details, **where)
            # An equal call that comes shortened must not look different.
            heard = (call for call in self.details.values() if _is_start(call, own_call))
            calls = {own_rank: next(heard, own_call), **self.details}
            return MismatchError(mismatch_text(calls), calls=calls, **where)
        if self.reason in (LOST, BELIEVED):
            if own_rank in self.details:
                text = f"rank {self.rank} has lost the connection to this rank"
                return PeerLostError(text, ranks=[self.rank], **where)
            return PeerLostError(self.text, ranks=self.details, **where)
        if self.reason == "aborted":
            text = f"rank {self.rank} is lost: {self.text}"
            return PeerLostError(text, ranks=[self.rank], **where)
        return CollectiveAbortedError(
            f"rank {self.rank} gave up the operation: {self.text}",
            rank=self.rank,
            reason=self.text,
            **where,
        )


def cancelled(rank: int) -> Verdict:
    return Verdict("cancelled", "the operation was cancelled", rank)


def verdict_of(error: BaseException, party: Party) -> Verdict:
    """Return the verdict that tells the others of `party` of `error` at this rank."""
    rank = party.rank
    if isinstance(error, AiodistError) and not _is_of(party, error):
        return Verdict("error", in_words(error, located=False), rank)
    if isinstance(error, CollectiveTimeoutError):
        details = {missing: error.last_seen.get(missing, "") for missing in error.missing}
        return Verdict("timeout", error.message, rank, details)
    if isinstance(error, MismatchError):
        return Verdict("mismatch", error.message, rank, dict(error.calls))
    if isinstance(error, PeerLostError):
        return Verdict(LOST, error.message, rank, dict.fromkeys(error.ranks, ""))
    if isinstance(error, CollectiveAbortedError):
        # name the rank that gave up first, because users look for it
        return Verdict("error", error.reason, error.rank)
    if isinstance(error, asyncio.CancelledError):
        return cancelled(rank)
    if isinstance(error, OperatorError):
        text = in_words(error.error, located=False)
        return Verdict("error", f"the {error.what} raised {text}", rank)
    return Verdict("error", in_words(error, located=False), rank)


def _is_of(party: Party, error: AiodistError) -> bool:
    """Return whether the ranks in `error` are those of `party`, because other groups number them in
    another way."""
    if isinstance(error, CollectiveAbortedError) and error.rank >= party.size:
        return False  # of a group with the same name
    return (error.group, error.epoch) in ((party.group, party.epoch), (None, None))


def _shortened(details: Mapping[int, str]) -> dict[int, str]:
    """Return `details` with texts that have at most `MAX_DETAILS` bytes together."""
    texts = {rank: sayable(text).encode() for rank, text in details.items()}
    fit = sum(map(len, texts.values())) <= MAX_DETAILS
    most = MAX_DETAILS if fit else MAX_DETAILS // len(texts)
    return {rank: _start(text, most) for rank, text in texts.items()}


def _start(text: bytes, most: int) -> str:
    if len(text) <= most:
        return text.decode()
    return text[: most - len(_CUT.encode())].decode(errors="ignore") + _CUT


def _is_start(shown: str, text: str) -> bool:
    return shown.endswith(_CUT) and text.startswith(shown.removesuffix(_CUT))


def sayable(text: str) -> str:
    """Return `text` in a form that can be sent to others.

    File names that are not UTF-8 have lone surrogates. They become escapes, because frames cannot
    hold them.
    """
    return text.encode(errors="backslashreplace").decode()


def mismatch_text(calls: Mapping[int, str]) -> str:
    """Return a small table of which ranks called what, and what differs."""
    return f"{_DIFFERENT}\n{differences.table(calls)}\n"


def silent(doing: Mapping[int, str]) -> dict[int, str]:
    """Return which ranks do not answer themselves, of what ranks are said to be `doing`."""
    return {rank: text for rank, text in doing.items() if not text.startswith("in ")}


def stuck_text(seconds: float, silent: Mapping[int, str], awaited: int | None) -> str:
    """Return the text of an error for a deadline that has passed after all ranks had entered.

    `silent`: the ranks that do not answer. `awaited`: the rank whose data this rank waits for.
    """
    text = f"not done after {seconds:g} s, though all ranks have entered"
    if silent:
        return f"{text}: {', '.join([f'rank {rank} ({silent[rank]})' for rank in sorted(silent)])}"
    return text if awaited is None else f"{text}; data of rank {awaited} is missing"


def timeout_text(seconds: float, missing: Sequence[int], seen: Mapping[int, str], name: str) -> str:
    """Return the text of an error for a deadline of the operation `name` that has passed."""
    absent: list[str] = []
    unheard: list[str] = []  # have told the coordinator that they are in it, but not this rank
    for rank in missing:
        doing = seen.get(rank, "no answer")
        ranks = unheard if doing.startswith(f"in {name} for ") else absent
        ranks.append(f"rank {rank} ({doing})")
    texts = ("not entered", "by", absent), ("no word", "from", unheard)
    return "; ".join(
        [
            f"{what} within {seconds:g} s {of} {', '.join(ranks)}"
            for what, of, ranks in texts
            if ranks
        ]
    )
