"""`aiodist.epochs`: one group after the other, for as long as this rank takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

from aiodist import timeouts
from aiodist.group import Group
from aiodist.services.keeper import PATIENCE, Keeper
from aiodist.session import connect
from aiodist.types import RankOptions


def epochs(
    address: str | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    admit: bool = True,
    patience: float = PATIENCE,
    **options: Unpack[RankOptions],
) -> AsyncIterator[Group]:
    """Give the group of each epoch, through deaths, restarts and new ranks::

        async for group in aiodist.epochs(address, min_size=2):
            async with group:
                state = await newest(group, state)  # of who has come furthest, for all
                await train(group, state)

    The block ends in one of three ways:

    - It is done, or left by ``break`` or ``return``. This rank leaves in order, and the loop ends.
    - A rank was lost, or another rank has ended the epoch. The block swallows the error, and the
      loop goes on with the next group: the survivors and the ranks that wait to join. The errors
      are `GroupBrokenError`, `CollectiveAbortedError`, `CoordinatorLostError`, `GroupClosedError`
      if this rank was evicted, or an exception group of these alone. An error of another group,
      also of one made of this group, is raised, unless this group ends or loses a rank within a
      second.
    - Any other exception. This rank leaves at once, the others hear why, and the exception is
      raised.

    All ranks go to the next epoch as soon as one does. A block that waits for something outside the
    group cannot notice that. It is cancelled after `patience` seconds, as `asyncio.timeout` does
    it.

    Any rank may end an epoch by `group.revoke()`. With `admit`, rank 0 does so if a rank waits to
    join and the group has fewer than `max_size` members. It first waits until no more ranks have
    come for the group's `join_window`. Without `admit`, ranks that join wait until an epoch ends
    for another reason.

    Survivors keep their order and come first. A rank joins anew, with the state that it has and at
    any rank number, if it was evicted or if the coordinator is gone for good.

    Groups and windows that you make in the block outlive the epoch, and keep memory until you close
    them or this rank leaves. Use ``async with`` for them, too. Without an error, the end of a
    window waits for all ranks, so then all of them must leave the block.

    `address`, `min_size`, `max_size` and `options` are those of `connect`. `timeout` bounds how
    long each epoch may take to form. Without ``async with group``, your program handles the errors
    itself, each turn of the loop leads to the next epoch, and `Group.close` ends the loop.

    Raises what `connect` raises, and CollectiveTimeoutError if an epoch does not form. Its
    `.missing` are the ranks that live and do not come. Raises TypeError or ValueError if `patience`
    is not a number of seconds.
    """
    if patience != 0:
        timeouts.check_seconds("patience", patience)
    connecting = connect(address, min_size=min_size, max_size=max_size, **options)  # pyright: ignore[reportArgumentType]
    return _epochs(Keeper(connecting, admit=admit, patience=patience))


async def _epochs(keeper: Keeper) -> AsyncIterator[Group]:
    try:
        while (group := await keeper.next()) is not None:
            yield group
    finally:
        await keeper.end()
