"""How it is told that ranks called different things."""

from __future__ import annotations

import itertools

from aiodist.engine.differences import MOST_LINES, WIDEST, table
from aiodist.engine.failures import mismatch_text


def lines(calls: dict[int, str]) -> list[str]:
    return table(calls).splitlines()


def marked(calls: dict[int, str]) -> list[str]:
    """What is underlined, call by call."""
    found = lines(calls)
    texts = []
    for call, marks in itertools.pairwise(found):
        if set(marks) == {" ", "^"}:
            texts.append(call[marks.index("^") : len(marks)])
    return texts


def test_equal_calls_share_a_line_and_the_odd_one_comes_last() -> None:
    same = "all_reduce(SUM, float32[3])"
    calls = {0: same, 1: same, 2: same, 5: same, 3: "broadcast(src=0)"}
    assert lines(calls) == [
        "  ranks 0-2, 5  all_reduce(SUM, float32[3])",
        "  rank 3        broadcast(src=0)",
        "                ^^^^^^^^^^^^^^^^",
    ]


def test_what_differs_is_marked_as_whole_numbers_and_names() -> None:
    base = "all_reduce(SUM, float32[1024, 3])"
    assert marked({0: base, 1: base, 2: "all_reduce(SUM, float32[1025, 3])"}) == ["1025"]
    assert marked({0: base, 1: base, 2: "all_reduce(SUM, float64[1024, 3])"}) == ["float64"]
    assert marked({0: base, 1: base, 2: "all_reduce(MAX, float32[1024, 3])"}) == ["MAX"]


def test_what_is_missing_in_a_call_is_marked_where_it_would_be() -> None:
    [mark] = marked({0: "f(1, 2)", 1: "f(1, 2)", 2: "f(1)"})
    assert mark == ")"


def test_a_prefix_of_another_call_is_marked_too() -> None:
    assert marked({0: "barrier() twice", 1: "barrier() twice", 2: "barrier()"})


def test_a_difference_far_inside_of_long_calls_can_be_seen() -> None:
    long = "all_reduce(SUM, [" + ", ".join(["float32[10]"] * 60) + "])"
    other = long[:500] + long[500:].replace("10", "11", 1)
    calls = {0: long, 1: long, 2: other}
    assert all(len(line) < WIDEST + 20 for line in lines(calls))
    assert marked(calls) == ["11"]


def test_many_ranks_with_calls_of_their_own() -> None:
    found = lines({rank: f"scatter(src={rank})" for rank in range(1000)})
    assert len(found) < 2 * MOST_LINES + 1
    assert found[-1] == f"  ranks {MOST_LINES}-999: {1000 - MOST_LINES} other calls"


def test_the_text_of_the_error() -> None:
    text = mismatch_text({1: "barrier()", 0: "barrier()", 2: "gather(dst=0)"})
    assert text.startswith("ranks called different things:\n  ranks 0-1  barrier()\n")
    assert text.endswith("^\n")
