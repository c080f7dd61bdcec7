"""Each name of a class in the library stands for one class, so that a search finds it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "aiodist"


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in LIBRARY.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
