"""The faults that `make mutations` makes."""

from __future__ import annotations

import ast

import pytest
from mutants import mutants

FUNCTION = '''
def ä(a: "int | str" = 0, *more: int) -> bool:
    """Text, == text."""
    if a < len(more) and not more:
        a += 1
        raise ValueError(f"{a == 1}")
    call(a, 2)
    while True:
        x.y = [b for b in more if b is None]
    return (
        a
    ) == 1
'''


def changed(source: str, kind: str) -> list[tuple[str, str]]:
    """What each fault of that kind makes of what: the lines, where they differ."""
    found = []
    for one in mutants(source):
        if one.kind == kind:
            before, after = source.splitlines(), one.apply(source).splitlines()
            assert len(before) == len(after)
            ((was, becomes),) = ((a, b) for a, b in zip(before, after, strict=True) if a != b)
            found.append((was.strip(), becomes.strip()))
    return found


@pytest.mark.parametrize(
    ("was", "becomes", "kind"),
    [
        ("a < b", "(a <= b)", "comparison"),
        ("a is None", "(a is not None)", "comparison"),
        ("x = 3", "x = 4", "constant"),
        ("x = True", "x = False", "constant"),
        ("x = a and f(b)", "x = (a or f(b))", "and, or"),
        ("x = a + b * c", "x = (a - (b * c))", "operator"),
        ("x = not (a or b)", "x = ((a or b))", "condition"),
        ("x = a if b else c", "x = (c if b else a)", "condition"),
        ("if a: pass", "if (not a): pass", "condition"),
        ("x = f(a, b, c, d=e)", "x = f(b, a, c, d=e)", "arguments"),
        ("a.b = c", "pass", "statement"),
        ("a += c", "pass", "statement"),
        ("a.b(c)", "pass", "statement"),
    ],
)
def test_a_fault(was: str, becomes: str, kind: str) -> None:
    assert (was, becomes) in changed(was, kind)


def test_all_are_programs_whose_lines_stay_where_they_are() -> None:
    found = mutants(FUNCTION)
    assert {one.kind for one in found} == {
        "and, or", "arguments", "comparison", "condition", "constant", "statement",
    }  # fmt: skip
    for one in found:
        faulty = one.apply(FUNCTION)
        ast.parse(faulty)
        assert faulty != FUNCTION
        if one.kind == "statement":
            assert faulty.count("\n") == FUNCTION.count("\n")


@pytest.mark.parametrize(
    "source",
    ["x: a | b", "@f(1, 2)\ndef g(): pass", "f'{1 + 1}'", "'a' % b", "if TYPE_CHECKING: f()"],
)
def test_what_nobody_would_see_is_left_alone(source: str) -> None:
    assert mutants(source) == []
