"""Slurm's hostlist expressions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.hostlist import hosts

Ranges = list[tuple[int, int, int]]
"""First, last, and how many digits at least."""

texts = st.text("abcz0189.-_", max_size=4)
ranges = st.lists(
    st.tuples(st.integers(0, 999), st.integers(0, 12), st.integers(1, 5)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    min_size=1,
    max_size=3,
)
names = st.tuples(
    st.text("abcz", min_size=1, max_size=3), st.lists(st.tuples(ranges, texts), max_size=2)
)
"""How a name begins, and by turns what its brackets hold, and the text behind them."""


def written(found: Ranges) -> str:
    parts = (
        f"{first:0{width}}" + (f"-{last:0{width}}" if first < last else "")
        for first, last, width in found
    )
    return f"[{','.join(parts)}]"


def meant(found: Ranges) -> list[str]:
    return [f"{n:0{width}}" for first, last, width in found for n in range(first, last + 1)]


@given(st.lists(names, min_size=1, max_size=3))
def test_every_host_in_order(drawn: list[tuple[str, list[tuple[Ranges, str]]]]) -> None:
    expression, expected = [], []
    for begin, parts in drawn:
        expression.append(begin + "".join(written(found) + text for found, text in parts))
        choices = [[number + text for number in meant(found)] for found, text in parts]
        expected += [begin + "".join(one) for one in itertools.product(*choices)]
    assert list(hosts(",".join(expression))) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("node7", ["node7"]),
        ("gpu[001-003,7],login", ["gpu001", "gpu002", "gpu003", "gpu7", "login"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_as_slurm_writes_them(expression: str, expected: list[str]) -> None:
    assert list(hosts(expression)) == expected


def test_the_first_of_many_takes_no_time() -> None:
    assert next(hosts("n[0-99999999]r[0-99999999]")) == "n0r0"


@pytest.mark.parametrize(
    "expression",
    ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[1", "a[]", "a[1-]", "a[3-1]", "a[1,]", "a[x]",
     "a[1[2]]", "a b", "a[²]", "a[1-2]]"],
)  # fmt: skip
def test_what_is_none_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        list(hosts(expression))


@given(st.text("ab01[],- ", max_size=12))
def test_whatever_comes_is_read_or_refused(expression: str) -> None:
    try:
        found = list(itertools.islice(hosts(expression), 1000))
    except ValueError:
        return
    assert found
    assert all(name and not set("[], ") & set(name) for name in found)
