"""Ranks in processes of their own, of which nothing is left at the end."""

from __future__ import annotations

import pytest
from processes import heard, processes

FORKS = """
import os
child = os.fork()
if not child:
    os.read(0, 1)  # for ever, with the pipes that it inherited
print(child, flush=True)
os.wait()
"""


@pytest.mark.timeout(20)
async def test_what_a_rank_has_forked_ends_with_it() -> None:
    with pytest.raises(ValueError, match="the test fails"):
        async with processes(FORKS, 1) as (rank,):
            assert await heard(rank) > 0
            raise ValueError("the test fails")
