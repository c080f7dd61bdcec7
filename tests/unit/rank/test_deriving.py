"""Groups that are made of others: what the parent keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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


CALLS: dict[str, Callable[[aiodist.Group, float | None], Any]] = {
    "split": lambda group, timeout: group.split(1, timeout=timeout),
    "dup": lambda group, timeout: group.dup(timeout=timeout),
    "subgroup": lambda group, timeout: group.subgroup([0, 1], timeout=timeout),
}


@pytest.mark.parametrize("call", CALLS)
async def test_errors_show_no_tag_of_ours(call: str) -> None:
    async with aiodist.local(2) as groups:
        with pytest.raises(aiodist.CollectiveTimeoutError) as late:
            await CALLS[call](groups[0], 0.05)
        with pytest.raises(aiodist.CollectiveTimeoutError) as told:
            await CALLS[call](groups[1], None)
        for error in (late.value, told.value):
            assert (error.op, error.tag, error.seq) == (call, None, None)
            assert "#" not in str(error)
