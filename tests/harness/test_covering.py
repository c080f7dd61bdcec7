"""The marker `strength`: fewer combinations of parameters, and all of any t of them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


@pytest.mark.strength(2)
def test_without_parameters(): ...


@pytest.mark.strength(2)
@pytest.mark.parametrize(("a", "b"), [(1, 2), (1, 3), (2, 2)])
def test_together(a, b): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("covering")
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_covering.py").write_text(TESTS)
    return folder


def collected(folder: Path, *options: str) -> dict[str, set[tuple[int, ...]]]:
    """The parameters of the tests that would run, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder,
         "-p", "no:cacheprovider", "-q", "--collect-only", *options, folder],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, values in re.findall(r"::(test_\w+)(?:\[([-\d]+)\])?$", done.stdout, re.MULTILINE):
        values = tuple(map(int, values.split("-"))) if values else ()
        assert values not in found.setdefault(name, set())
        found[name].add(values)
    return found


def tuples(rows: set[tuple[int, ...]], strength: int) -> set[object]:
    return {part for row in rows for part in itertools.combinations(list(enumerate(row)), strength)}


def test_any_two_parameters_have_all_their_combinations(folder: Path) -> None:
    found = collected(folder)
    every = found["test_all"]
    assert len(every) == 24
    assert tuples(found["test_pairs"], 2) == tuples(every, 2)
    assert 12 <= len(found["test_pairs"]) <= 14  # no fewer can have all of 4 x 3
    assert tuples(found["test_values"], 1) == tuples(every, 1)
    assert len(found["test_values"]) == 4
    assert found["test_without_parameters"] == {()}
    assert found["test_together"] == {(1, 2), (1, 3), (2, 2)}


def test_all_of_them_when_asked(folder: Path) -> None:
    found = collected(folder, "--all-combinations")
    assert found["test_pairs"] == found["test_values"] == found["test_all"]


def test_one_that_is_named_is_run(folder: Path) -> None:
    every = collected(folder, "-k", "test_all")["test_all"]
    left_out = min(every - collected(folder)["test_values"])
    name = "-".join(map(str, left_out))
    test = f"{folder}/test_covering.py::TestCombinations::test_values[{name}]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder,
         "-p", "no:cacheprovider", test],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
