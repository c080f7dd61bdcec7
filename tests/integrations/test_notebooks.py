"""The notebooks in examples/, run from top to bottom: cells give what stands below them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("nbclient") is None:
    pytest.skip("needs nbclient and ipykernel: make integrations", allow_module_level=True)

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebook").glob("*.ipynb"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
async def test_a_notebook(path: Path) -> None:
    written = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    await NotebookClient(notebook, timeout=60).async_execute()
    assert [outputs(cell) for cell in notebook.cells] == [outputs(cell) for cell in written.cells]
    assert any(outputs(cell) for cell in written.cells)


def outputs(cell: Any) -> list[Any]:
    """What a cell has printed and given, without how often it was run."""
    return [
        {name: value for name, value in output.items() if name != "execution_count"}
        for output in cell.get("outputs", [])
    ]
