"""Ranks of a benchmark on hosts that are far from each other: network namespaces (needs root)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from aiodist.testing.long_links import LongLine, far_hosts


def said_by_first(module: str, *arguments: str, hosts: int, line: LongLine, seconds: float) -> Any:
    """Run ``python -m module arguments`` as one rank on each host, and return what rank 0 prints
    as JSON. Raises subprocess.TimeoutExpired after so many seconds."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    program = [sys.executable, "-m", module, *arguments]
    with far_hosts(hosts, line) as (made, _):
        where = {"MASTER_ADDR": made[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(hosts)}
        ranks = [
            subprocess.Popen(
                [*host.prefix, *program],
                env={**clean, **where, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(made)
        ]
        try:
            text, _ = ranks[0].communicate(timeout=seconds)
            for one in ranks:
                one.wait(60)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    return json.loads(text)
