"""The trainer's rows arrive as the server's columns. (Run as a program it does the same in seven
processes; here the ranks share this one.)"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import aiodist

PROGRAM = Path(__file__).parents[2] / "examples" / "resharding" / "rows_to_columns.py"


async def test_rows_become_columns() -> None:
    spec = importlib.util.spec_from_file_location("rows_to_columns", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    async with aiodist.local(program.TRAINERS + program.SERVERS) as ranks:
        lines = await asyncio.gather(*map(program.main, ranks))
    assert lines == [
        *(f"rank {rank} held rows {2 * rank} and {2 * rank + 1}" for rank in range(4)),
        "rank 4 has columns 0 and 1, and the bias",
        "rank 5 has columns 2 and 3, and the bias",
        "rank 6 has columns 4 and 5, and the bias",
    ]
