"""docs/coming-from-mpi4py.md has a row for everything that mpi4py has.

What that is stands in mpi4py_names.txt, with its version, so that this is tested where mpi4py is
not. Where it is (`make launchers` installs it), the list has to be that of its stubs:
``python tests/packaging/test_mpi4py_page.py …/mpi4py/MPI.pyi 4.1.2`` writes it anew.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist import BlockingGroup, BlockingWork
from aiodist.blocking.window import BlockingWindow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-mpi4py.md"
LIST = Path(__file__).with_name("mpi4py_names.txt")


def listed() -> dict[str, list[str]]:
    """Public names by the class that has them; those of the module by ""."""
    parts = re.split(r"^(\w+):$", LIST.read_text(), flags=re.MULTILINE)[1:]
    owners = (owner.replace("MPI", "") for owner in parts[::2])
    return dict(zip(owners, map(str.split, parts[1::2]), strict=True))


def in_stubs(path: Path) -> dict[str, list[str]]:
    """The same, by the stubs of mpi4py."""
    body = ast.parse(path.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    found = {"": sorted(set(names_of(body)))}
    return found | {node.name: sorted(set(names_of(node.body))) for node in classes}


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case ast.Assign(targets=targets):
                names = [one.id for one in targets if isinstance(one, ast.Name)]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_"))


class Named:
    """What a page names in backticks. ``Has_*`` stands for all that begin so, ``*_NULL`` for all
    that end so; of ``bcast``, ``Bcast`` and ``Ibcast`` one is enough."""

    def __init__(self, page: str) -> None:
        words = " ".join(re.findall(r"`[^`]*`", page))
        self._names = {word.lower() for word in re.findall(r"\w+", words)}
        self._begins = tuple(re.findall(r"(\w[\w.]*)\*", words))
        self._ends = tuple(re.findall(r"\*(\w+)", words))

    def has(self, owner: str, name: str) -> bool:
        low = name.lower()
        alike = {low, low.removeprefix("i"), low.removeprefix("get_")}
        return bool(
            alike & self._names
            or name.startswith(self._begins)
            or f"{owner}.{name}".startswith(self._begins)
            or name.endswith(self._ends)
        )


def test_what_counts_as_named() -> None:
    named = Named("`comm.bcast` `Ineighbor_*` `Info.*` `*_NULL` `rank`, but not barrier")
    there = ["Comm.Ibcast", "Comm.Ineighbor_x", "Info.Set", ".COMM_NULL", "Comm.Get_rank"]
    absent = ["Comm.Barrier", "Comm.ineighbor_x", "File.Set", ".NULL", "Comm.Bcast_init"]
    assert [one for one in there + absent if named.has(*one.split("."))] == there


def test_everything_is_named() -> None:
    known = listed()
    assert sum(map(len, known.values())) > 900
    named = Named(PAGE.read_text())
    assert [
        f"{owner}.{name}" for owner in known for name in known[owner] if not named.has(owner, name)
    ] == []


def test_blocking_objects_have_what_the_page_names() -> None:
    owners = {"group": BlockingGroup, "window": BlockingWindow, "work": BlockingWork}
    used = re.findall(r"`[^`]*`", PAGE.read_text())
    calls = re.findall(rf"\b({'|'.join(owners)})\.(\w+)", " ".join(used))
    assert {owner for owner, _ in calls} == set(owners)
    assert [f"{owner}.{name}" for owner, name in calls if not hasattr(owners[owner], name)] == []


def test_the_page_says_of_which_version_it_is() -> None:
    (version,) = re.findall(r"^# mpi4py (\S+)$", LIST.read_text(), re.MULTILINE)
    assert f"mpi4py {version}" in PAGE.read_text()


def test_the_list_is_that_of_mpi4py() -> None:
    found = sorted((ROOT / ".venv" / "peers").glob("*/lib/*/site-packages/mpi4py/MPI.pyi"))
    if not found:
        pytest.skip("no mpi4py here: make launchers installs it")
    assert in_stubs(found[0]) == listed()


def write(stubs: Path, version: str) -> None:
    lines = [f"# mpi4py {version}", "# The public names of mpi4py.MPI, then those of its classes."]
    for owner, names in in_stubs(stubs).items():
        indent = {"initial_indent": "  ", "subsequent_indent": "  "}
        lines += [f"{owner or 'MPI'}:", *textwrap.wrap(" ".join(names), 98, **indent)]
    LIST.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
