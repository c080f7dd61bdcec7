"""Starts a rank of `programs.py` in a forked process. It imports aiodist only after that, because
each rank chooses whether it runs the compiled part."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def start(plan: dict[str, Any], address: str, rank: int, says: Connection) -> None:
    """Run rank `rank` of a program. It says what it found, or its exception as text."""
    assert "aiodist.compiled" not in sys.modules
    os.environ["AIODIST_CORE"] = "python" if rank in plan["python"] else ""
    logging.getLogger("aiodist").setLevel(logging.CRITICAL)
    from program_rank import main

    try:
        says.send(asyncio.run(main(plan, address, rank)))
    except BaseException:
        says.send(traceback.format_exc())
        sys.exit(1)
