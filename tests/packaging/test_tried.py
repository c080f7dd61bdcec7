"""The pages say with which versions of other programs aiodist was tried: what tests run on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PINNED = {
    name: version
    for file in ("constraints.txt", "tests/integrations/constraints.txt")
    for name, version in re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("services", ["aiohttp", "fastapi", "gunicorn", "starlette", "uvicorn"]),
        ("ray", ["ray"]),
        ("dask", ["distributed"]),
        ("launchers", ["torch"]),
    ],
)
def test_versions_are_those_that_tests_run_on(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text().partition("\n## What was tried\n")[2]
    said = {name.lower(): version for name, version in re.findall(r"(\w+) (\d+\.\d+\.\d+)", text)}
    assert {name: said[name] for name in names} == {name: PINNED[name] for name in names}
