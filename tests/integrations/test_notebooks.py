"""The notebooks in examples/, run from top to bottom: cells give what stands below them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("nbclient") is None:
    pytest.skip("needs nbclient and ipykernel: make integrations", allow_module_level=True)

import nbformat
from jupyter_client.manager import start_new_kernel
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


STUCK = """
import asyncio
import aiodist

async def wait_for_ever(group):
    await group.barrier()
    if group.rank == 0:
        print("all are here", flush=True)
    await asyncio.Event().wait()

aiodist.run(wait_for_ever, 2)
"""

LEFT = """
import os
from pathlib import Path
tasks = Path("/proc/self/task").iterdir()
print([child for task in tasks for child in (task / "children").read_text().split()])
"""


@pytest.mark.timeout(240)
def test_interrupting_a_cell_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under pytest, kernels leave what their children print where it goes.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    manager, client = start_new_kernel()
    try:
        said: list[str] = []

        def hear(message: Any) -> None:
            said.append(message["content"].get("text", ""))
            if "all are here" in said[-1]:
                manager.interrupt_kernel()

        reply = client.execute_interactive(STUCK, output_hook=hear, timeout=100)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        said.clear()
        client.execute_interactive(LEFT, output_hook=hear, timeout=100)
        assert "".join(said) == "[]\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def outputs(cell: Any) -> list[Any]:
    """What a cell has printed and given, without how often it was run."""
    return [
        {name: value for name, value in output.items() if name != "execution_count"}
        for output in cell.get("outputs", [])
    ]
