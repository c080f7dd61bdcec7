"""Groups that are made of others: what the parent keeps of them."""

from __future__ import annotations

import aiodist


async def test_a_parent_keeps_nothing_of_its_splits() -> None:
    async with aiodist.local(1) as (group,):
        ids = set()
        for color in (0, 0, "a", "a"):
            part = await group.split(color)
            assert part is not None
            ids.add(part._context.id)
            await part.close()
        assert len(ids) == 4
        assert not group._context.derived
        for _ in range(2):
            await (await group.dup()).close()
        assert list(group._context.derived.values()) == [2]
