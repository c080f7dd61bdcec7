"""What a rendezvous takes, and what is said of who is missing."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.rank.recovery import check_sizes, missing_text
from aiodist.wire.limits import MAX_MEMBERS


@pytest.mark.parametrize("sizes", [(None, None), (1, None), (None, 1), (3, 3), (1, MAX_MEMBERS)])
def test_sizes_of_a_rendezvous(sizes: tuple[int | None, int | None]) -> None:
    check_sizes(*sizes)


@pytest.mark.parametrize(
    ("least", "most", "error", "text"),
    [
        (True, None, TypeError, "min_size is an int"),
        (None, 2.0, TypeError, "max_size is an int"),
        (0, None, ValueError, "min_size is from 1"),
        (None, MAX_MEMBERS + 1, ValueError, "max_size is from 1"),
        (3, 2, ValueError, "min_size=3 is over max_size=2"),
    ],
)
def test_sizes_that_make_no_sense(least: Any, most: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_sizes(least, most)


def test_who_is_missing_is_named_by_rank_with_what_it_does() -> None:
    assert (
        missing_text({3: "", 1: "at a.py:1"})
        == ": not called by rank 1 (at a.py:1), rank 3 (no answer)"
    )
