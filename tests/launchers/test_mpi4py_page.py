"""docs/coming-from-mpi4py.md has a row for everything that mpi4py has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.launchers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-mpi4py.md"


def test_every_method_and_function_is_named() -> None:
    found = sorted((ROOT / ".venv" / "peers").glob("*/lib/*/site-packages/mpi4py/MPI.pyi"))
    if not found:
        pytest.skip("no mpi4py here: make launchers installs it")
    words = re.findall(r"`[^`]*`", PAGE.read_text())
    named = {word.lower() for word in re.findall(r"\w+", " ".join(words))}
    begins = tuple(word.lower() for word in re.findall(r"(\w+)\*", " ".join(words)))
    missing = []
    for owner in ast.parse(found[0].read_text()).body:
        if isinstance(owner, ast.FunctionDef):
            functions = [owner]
        elif isinstance(owner, ast.ClassDef) and owner.name != "File":  # one row for all of it
            functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        else:
            continue
        for function in functions:
            name = function.name.lower()
            same = {name, name.removeprefix("i"), name.removeprefix("get_")}
            if not (name.startswith("_") or same & named or name.startswith(begins)):
                missing.append(f"{getattr(owner, 'name', '')}.{function.name}")
    assert not missing
