"""The picture of the rooms in architecture.md: the floors of the import contract, from high to low,
each room with the start of its docstring."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_map

CONTRACT = "import direction"
"""The contract of pyproject.toml that has all packages and modules of aiodist, by floors."""


def floors(root: Path) -> list[list[str]]:
    """The rooms, floor by floor, the highest first."""
    settings: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if one["name"] == CONTRACT]
    return [layer.split(" | ") for layer in contract["layers"]]


def render(root: Path) -> Iterator[str]:
    """A table of all rooms. Those of one floor stand one below the other, under one number."""
    yield "| floor | room | its job |\n| ---: | --- | --- |\n"
    above = floors(root)
    for number, names in zip(range(len(above), 0, -1), above, strict=True):
        for name in names:
            package = root / "aiodist" / name / "__init__.py"
            is_room = package.exists()
            path = package if is_room else root / "aiodist" / f"{name}.py"
            floor = f"{number}" if name == names[0] else ""
            yield f"| {floor} | `{name}{'/' if is_room else '.py'}` | {file_map.gist(path)} |\n"
