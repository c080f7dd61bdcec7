"""The tests in tests/unit stand where the module is that they are about."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"

PACKAGES = {
    "cli": ROOT / "clients" / "aiodist_cli",
    "server": ROOT / "server" / "aiodist_server",
}
"""Where the folders of tests/unit are that are no rooms of aiodist/."""

SEVERAL = {
    "schedules/test_algorithms.py",
    "schedules/test_algorithms_docs.py",
    "schedules/test_algorithms_few_links.py",
    "schedules/test_algorithms_many_ranks.py",
    "p2p/test_parts.py",
    "codecs/test_codecs.py",
    "cli/files/test_moving.py",
}
"""Those that are about several modules of their room."""


@pytest.mark.parametrize(
    "test", sorted(str(path.relative_to(UNIT)) for path in UNIT.rglob("test_*.py"))
)
def test_a_file_is_named_after_its_module(test: str) -> None:
    """`test_x.py` is about `x.py`; further ones about it are `test_x_….py`."""
    if test in SEVERAL:
        return
    folder, name = Path(test).parent, Path(test).stem.removeprefix("test_")
    room = PACKAGES.get(folder.parts[0] if folder.parts else "", ROOT / "aiodist" / folder)
    if not room.is_dir():  # a folder of tests about one module, with their fixtures
        assert room.with_suffix(".py").is_file(), f"{room} is neither room nor module"
        room = room.parent
    modules = [path.stem for path in room.rglob("*.py")]
    assert any(f"{name}_".startswith(f"{module}_") for module in modules), (
        f"{room} has no module that test_{name}.py is about"
    )
