"""The markers `strength`, for fewer combinations of parameters, and `sample`, for a few of all
cases."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)

TESTS = """
import pytest


@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(2))
class TestCombinations:
    def test_all(self, a, b, c): ...

    @pytest.mark.strength(2)
    def test_pairs(self, a, b, c): ...

    @pytest.mark.strength(1)
    def test_values(self, a, b, c): ...


@pytest.mark.long
def test_long(): ...


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(7))
def test_some(number): ...


@pytest.mark.strength(2)
def test_without_parameters(): ...


@pytest.mark.one_loop
@pytest.mark.parametrize("number", range(40))
def test_loops(run, number): ...


@pytest.mark.one_loop
@pytest.mark.strength(2)
@pytest.mark.parametrize("number", range(20))
def test_thinned(run, number): ...


@pytest.mark.strength(2)
@pytest.mark.parametrize(("a", "b"), [(1, 2), (1, 3), (2, 2)])
def test_together(a, b): ...
"""


ALL_OF_SOME = [(number,) for number in range(7)]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def on_them(tmp_path_factory: pytest.TempPathFactory, tried: Run) -> Run:
    """``on_them(*arguments)``: pytest on the tests above; what was asked before is known."""
    folder = tmp_path_factory.mktemp("covering")
    return functools.cache(lambda *arguments: tried(folder, *arguments, tests=TESTS))


def collected(on_them: Run, *options: str) -> dict[str, set[tuple[int, ...]]]:
    """The parameters of the tests that would run, by name."""
    done = on_them("-q", "--collect-only", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, values in re.findall(r"::(test_\w+)(?:\[([-\d]+)\])?$", done.stdout, re.MULTILINE):
        values = tuple(map(int, values.split("-"))) if values else ()
        assert values not in found.setdefault(name, set())
        found[name].add(values)
    return found


def tuples(rows: set[tuple[int, ...]], strength: int) -> set[object]:
    return {part for row in rows for part in itertools.combinations(list(enumerate(row)), strength)}


def test_any_two_parameters_have_all_their_combinations(on_them: Run) -> None:
    found = collected(on_them)
    every = found["test_all"]
    assert len(every) == 24
    assert tuples(found["test_pairs"], 2) == tuples(every, 2)
    assert 12 <= len(found["test_pairs"]) <= 14  # no fewer can have all of 4 x 3
    assert tuples(found["test_values"], 1) == tuples(every, 1)
    assert len(found["test_values"]) == 4
    assert found["test_without_parameters"] == {()}
    assert "test_long" not in found
    assert found["test_together"] == {(1, 2), (1, 3), (2, 2)}


@pytest.mark.long
def test_one_kind_of_loop_for_what_does_not_depend_on_it(on_them: Run) -> None:
    def loops(*options: str) -> list[tuple[str, str]]:
        done = on_them("-q", "--collect-only", *options)
        return re.findall(r"::test_loops\[(\w+)-(\d+)\]$", done.stdout, re.MULTILINE)

    chosen = loops()
    assert sorted(int(number) for _, number in chosen) == list(range(40))
    assert 10 < [loop for loop, _ in chosen].count("uvloop") < 30
    assert len(loops("--all-combinations")) == len(loops("test_written.py::test_loops")) == 80
    assert {*loops("--left-out")} == {*loops("--all-combinations")} - {*chosen}


def test_what_is_on_one_kind_of_loop_is_thinned_among_that(on_them: Run) -> None:
    done = on_them("-q", "--collect-only")
    numbers = re.findall(r"::test_thinned\[\w+-(\d+)\]$", done.stdout, re.MULTILINE)
    assert sorted(map(int, numbers)) == list(range(20))


def test_all_of_them_when_asked(on_them: Run) -> None:
    found = collected(on_them, "--all-combinations")
    assert found["test_pairs"] == found["test_values"] == found["test_all"]
    assert found["test_long"] == {()}
    assert found["test_some"] == {*ALL_OF_SOME}


def test_long_ones_when_asked(on_them: Run) -> None:
    found, few = collected(on_them, "--long"), collected(on_them)
    assert found.pop("test_long") == {()}
    assert (found.pop("test_some"), few.pop("test_some")) == ({*ALL_OF_SOME}, {(0,), (2,), (4,)})
    assert found == few


def test_those_that_are_left_out(on_them: Run) -> None:
    chosen, others = collected(on_them), collected(on_them, "--left-out")
    assert others.pop("test_long") == {()}
    assert others.pop("test_some") == {(1,), (3,), (5,), (6,)}
    assert others.keys() == {"test_pairs", "test_values"}
    for name, values in others.items():
        assert not values & chosen[name]
        assert values | chosen[name] == chosen["test_all"]


def test_one_that_is_named_is_run(on_them: Run) -> None:
    found = collected(on_them)
    left_out = min(found["test_all"] - found["test_values"])
    name = "-".join(map(str, left_out))
    named = f"test_written.py::TestCombinations::test_values[{name}]", "test_written.py::test_long"
    done = on_them(*named)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
