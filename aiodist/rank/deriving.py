"""Contexts made of others: subgroups, splits, duplicates, and next epochs.

All ranks of a new group compute the same id for it, so that no rank has to tell the others. They
meet on the new context, at a barrier or another collective: a rank that leaves it knows that all
ranks have called for the group, and have its context. A rank that cannot call any more says so on
that context, too (`decline`), because the others would otherwise wait for it until their deadlines.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiodist import timeouts
from aiodist.collectives import values
from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupRevokedError,
    PeerLostError,
    ProtocolError,
)
from aiodist.phases import base
from aiodist.rank.context import Context
from aiodist.shared_memory.lane import Layout
from aiodist.wire.frames import pack_fields

_MADE = b"made"
"""The tag of the collective that shows that all ranks have called for the new group."""
_SPLIT = b"split %d"
"""The tag of the two collectives of split number n, because other splits may begin between them."""


def another(
    context: Context, *, id: bytes, group: str, epoch: int, ranks: Sequence[int], layout: Layout
) -> Context:
    """Make a context of the roots `ranks` with the settings of this one."""
    return Context(
        context.endpoint,
        id=id,
        group=group,
        epoch=epoch,
        ranks=ranks,
        op_timeout=context.op_timeout,
        max_message_bytes=context.max_message_bytes,
        allow_pickle=context.allow_pickle,
        layout=layout,
    )


def _child(parent: Context, group: str, kind: str, ranks: Sequence[int], layout: Layout) -> Context:
    """Make the context of a group of some ranks of `parent`: the next one of this kind and
    ranks."""
    return another(
        parent,
        id=_id_of(parent, kind, ranks),
        group=group,
        epoch=parent.epoch,
        ranks=[parent.ranks[rank] for rank in ranks],
        layout=layout,
    )


async def derive(
    parent: Context,
    group: str,
    kind: str,
    ranks: Sequence[int],
    layout: Layout,
    timeout: float | None,
    meeting: Callable[[Context], base.Call],
) -> tuple[Context, Any]:
    """Make the context of a group of some ranks of `parent`, once all of them have called this.

    They meet on it in the collective that `meeting` makes. Returns the context and the result of
    that collective. If `meeting` raises, the other ranks hear why.

    The context may already be revoked, by a rank that has it. All ranks get it then, perhaps
    without that result (None).
    """
    context = _child(parent, group, kind, ranks, layout)
    op = kind.split()[0]  # what the program has called
    try:
        call = meeting(context)
    except BaseException as error:
        _give_up(context, op, error)
        raise
    work: Any = context.calls.launch(op, f"{op}()", call.start, tag=_MADE, timeout=timeout)
    try:
        return context, await work
    except BaseException as error:
        # A rank that has the group already may revoke it while this one still waits. All ranks have
        # it then, so this one gets it, too, revoked.
        if isinstance(error, GroupRevokedError) and isinstance(context.ended, GroupRevokedError):
            return context, None
        context.close(GroupClosedError("the group was not made", group=group))
        if isinstance(error, _Naming):
            _name_ranks_of(parent, ranks, error, op)
        if isinstance(parent.ended, GroupRevokedError) and isinstance(error, AiodistError):
            raise copy.copy(parent.ended) from error  # some ranks could not call this any more
        raise


_Naming = PeerLostError | CollectiveTimeoutError | CollectiveAbortedError
"""An error that names ranks of its group."""
_NAMED = re.compile(r"(^|; | by |\), )rank (\d+)(?= is lost:| has | gave up| \()")
"""A rank of the new group in the text of an error. What follows may name other ranks."""


def _name_ranks_of(parent: Context, ranks: Sequence[int], error: _Naming, op: str) -> None:
    """Change an error of the meeting so that it names ranks of `parent`, because the caller has no
    other group."""
    _renumber(error, dict(enumerate(_in_order(parent, ranks))))
    error.group, error.op, error.tag, error.seq = parent.group, op, None, None


def _in_part(parent: Context, part: Context, ranks: Sequence[int], error: _Naming) -> _Naming:
    """Return `error` of `parent` as one of its `part` of `ranks`, for `_name_ranks_of` there."""
    if isinstance(error, CollectiveAbortedError) and error.rank not in ranks:
        return error  # the part hears its text: only one of its own ranks can give up there
    error = copy.copy(error)
    _renumber(error, {rank: number for number, rank in enumerate(_in_order(parent, ranks))})
    error.group = part.group
    return error


def _in_order(parent: Context, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of `parent` by the numbers that errors of its part of `ranks` have for them.
    The part hears of other ranks, too, because one of them may be why it is not made."""
    return [*ranks, *sorted({*range(parent.size)}.difference(ranks))]


def _renumber(error: _Naming, numbers: Mapping[int, int]) -> None:
    """Change the numbers of the ranks that `error` names."""
    if isinstance(error, PeerLostError):
        error.ranks = tuple(sorted(numbers[one] for one in error.ranks))
    elif isinstance(error, CollectiveTimeoutError):
        error.missing = tuple(sorted(numbers[one] for one in error.missing))
        error.last_seen = {numbers[one]: text for one, text in error.last_seen.items()}
    else:
        error.rank = numbers[error.rank]
    error.message = _NAMED.sub(
        lambda found: f"{found[1]}rank {numbers.get(int(found[2]), found[2])}",
        error.message,
        # A rank that gave up says why in words of its own, which may name ranks of any group.
        count=1 if isinstance(error, CollectiveAbortedError) else 0,
    )
    error.args = (error.message,)  # for its repr


def _id_of(parent: Context, kind: str, ranks: Sequence[int]) -> bytes:
    """Return the id of a child context: the same on all of its ranks, and different from all
    others."""
    # An authority for ids would take a round, and might die. So all ranks hash the same data: the
    # id of the parent, the call, and its ranks. Two groups that live at the same time differ in one
    # of these. Collisions are rare: with 64 bits, a program that makes a million groups meets one
    # in some 40 million runs.
    wanted = pack_fields(kind, *ranks)
    # The same ranks may ask again. All count alike, because they call in the same order. The kind
    # of a split has a number of its own, so it never comes again and need not be remembered.
    count = 1 + parent.derived.get(wanted, 0)
    if not kind.startswith("split "):
        parent.derived[wanted] = count
    return hashlib.blake2b(parent.id + count.to_bytes(8, "big") + wanted, digest_size=8).digest()


def members(parent: Context, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a subgroup. Raises TypeError or ValueError for invalid ones."""
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks is a sequence of ranks, such as [{ranks!r}], not {ranks!r}")
    ranks = [base.as_rank(rank, parent.size, "each of ranks") for rank in ranks]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks has a rank twice: {ranks}")
    if parent.rank not in ranks:
        raise ValueError(
            f"this is rank {parent.rank}, which is not in ranks={ranks}: subgroup is called by "
            "its members alone (split is called by all)"
        )
    return ranks


Part = tuple[str, list[int]]
"""The name of a part of a group, and its ranks."""


async def parts(
    parent: Context,
    color: str | int | None,
    key: int | None,
    timeout: float | None,
    decline: Callable[[Part, BaseException], None],
) -> Part | None:
    """Return the ranks that gave the same color, ordered by (key, rank); None for the color None.

    Raises TypeError. If this fails although others may go on with that part, `decline` is called.
    """
    parent.splits = number = parent.splits + 1
    tag = _SPLIT % number
    try:
        color, key = _plain(color, key)
        timeouts.check_timeout(timeout)
        call = values.all_gather(parent, [color, parent.rank if key is None else key], None)
    except (TypeError, ValueError) as error:
        # Twice, because a split is two collectives, and the others count both.
        parent.calls.forgo("split", tag, error)
        parent.calls.forgo("split", tag, error)
        raise
    work: Any = parent.calls.launch("split", "split()", call.start, tag=tag, timeout=timeout)
    try:
        chosen = _choices(await work)
    except BaseException as error:
        # Others may know all colors, and wait for all ranks to confirm. A rank that gave up has
        # counted that second collective, too.
        if parent.ended is None:
            parent.calls.forgo("split", tag, error)
        raise
    same = [rank for rank, (theirs, _) in enumerate(chosen) if _same(theirs, color)]
    same.sort(key=lambda rank: (chosen[rank][1], rank))
    part = None if color is None else (f"split {number} {color!r}", same)
    call = base.barrier(parent)
    try:
        await parent.calls.launch("split", "agreed()", call.start, tag=tag, timeout=timeout)
    except BaseException as error:
        if part is not None:
            decline(part, error)
        raise
    return part


def _plain(color: Any, key: Any) -> tuple[str | int | None, int | None]:
    """Return color and key as they travel. Raises TypeError.

    All ranks of one color must name it alike, because the id of their group depends on it.
    """
    if isinstance(color, str):
        color = str.__str__(color)
    elif color is not None:
        color = base.as_int(color, "color is a str, an int or None")
    return color, None if key is None else base.as_int(key, "key is an int or None")


def decline(
    parent: Context,
    group: str,
    kind: str,
    ranks: Sequence[int],
    layout: Layout,
    error: BaseException,
) -> None:
    """Tell the others of a group that is being made that this rank will not be in it, for
    `error`."""
    if parent.ended is None or isinstance(parent.ended, GroupRevokedError):
        part = _child(parent, group, kind, ranks, layout)
        if isinstance(error, _Naming):
            error = _in_part(parent, part, ranks, error)
        _give_up(part, kind.split()[0], error)


def _give_up(context: Context, op: str, error: BaseException) -> None:
    context.calls.forgo(op, _MADE, error)
    context.close(GroupClosedError("the group was not made", group=context.group))


def _choices(values: Sequence[Any]) -> list[tuple[str | int | None, int]]:
    """Return the color and the key of each rank. Raises ProtocolError."""
    choices = []
    for rank, value in enumerate(values):
        match value:
            case [str() | int() | None as color, int() as key]:
                choices.append((color, key))
            case _:
                raise ProtocolError(f"rank {rank} sent a malformed value to split: {value!r:.100}")
    return choices


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b
