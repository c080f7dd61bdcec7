"""`docs/check.py` finds what it is there to find."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, with an empty folder as the repository."""
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("docs_check", DOCS / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    yield module
    sys.modules.pop("file_map", None)


def problems(check: Any, tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return list(check.check_page(page))


def test_links(check: Any, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, here\n")
    good = "[a](other.md) [b](other.md#a-title-here) [c](#top) [d](https://x.y)\n\n# Top\n"
    assert problems(check, tmp_path, good) == []
    assert problems(check, tmp_path, "[a](gone.md)") == [
        "page.md: the link to gone.md leads nowhere"
    ]
    assert problems(check, tmp_path, "[a](other.md#no)") == ["page.md: other.md has no heading #no"]


def test_python_compiles(check: Any, tmp_path: Path) -> None:
    assert problems(check, tmp_path, "```python\nawait x\n```\n") == []
    (problem,) = problems(check, tmp_path, "text\n\n```python\nawait (\n```\n")
    assert problem.startswith("page.md:3: ")


def test_excerpts_stand_in_their_file(check: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def f():\n    a()\n\n    b()\n")
    assert problems(check, tmp_path, "```python from=program.py\na()\nb()\n```\n") == []
    assert problems(check, tmp_path, "```python from=program.py\nb()\na()\n```\n") == [
        "page.md:1: this is not, or no longer, in program.py"
    ]


def test_commands_print_what_is_said(check: Any, tmp_path: Path) -> None:
    page = (
        "```python file=x.py\nprint(2)\nprint(1)\n```\n\n```console run\n$ python x.py\n{}\n```\n"
    )
    assert problems(check, tmp_path, page.format("1\n2")) == []
    (problem,) = problems(check, tmp_path, page.format("1\n3"))
    assert problem == "page.md:6: `python x.py` printed\n2\n1\n"
