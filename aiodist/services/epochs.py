"""`aiodist.epochs`: one group after the other, for as long as this rank takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

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
    """The group of each epoch, through deaths, restarts and joiners::

        async for group in aiodist.epochs(address, min_size=2):
            async with group:
                state = await newest(group, state)  # of who has come furthest, for all
                await train(group, state)

    The block ends in one of three ways:

    - It is over (also by ``break`` or ``return``): this rank leaves in order, and the loop ends.
    - A rank was lost, or another one has ended the epoch: `GroupBrokenError`,
      `CollectiveAbortedError`, `CoordinatorLostError`, `GroupClosedError` of a rank that was turned
      out, or an exception group of these alone. The block swallows it, and the loop goes on with
      the next group, of all who live and who wait to join.
    - Any other exception: this rank leaves at once, the others hear why, and it is raised.

    All ranks go to the next epoch as soon as one does. A block that waits for something else than
    the group does not notice: after `patience` seconds it is cancelled where it waits, as by
    `asyncio.timeout`. Any rank may end an epoch by `group.revoke()`. With `admit` the first one
    does so once somebody waits to join, there is room (`max_size`), and nobody else has come
    for the group's `join_window`; without it joiners wait for an epoch that ends anyhow.

    Survivors come first, in the order of their ranks. Where this rank was turned out, or the
    coordinator is gone for good, it joins anew, with what state it has, at whatever rank.

    `address`, `min_size`, `max_size` and `options` are those of `connect`; `timeout` is how long
    each epoch may take to form, `min_size` how many it takes. Without ``async with group``, what
    the body raises is the program's to handle, each turn of the loop leads to the next epoch, and
    `Group.close` ends it.

    Raises what `connect` does, and CollectiveTimeoutError if an epoch does not form: `.missing` are
    those who live and do not come.
    """
    connecting = connect(address, min_size=min_size, max_size=max_size, **options)  # pyright: ignore[reportArgumentType]
    return _epochs(Keeper(connecting, admit=admit, patience=patience))


async def _epochs(keeper: Keeper) -> AsyncIterator[Group]:
    try:
        while (group := await keeper.next()) is not None:
            yield group
    finally:
        await keeper.end()
