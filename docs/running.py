"""Runs the Python blocks of a page, each on several ranks.

A block is run in a group of its own, `group`, with `await` at the top level. A block that imports
nothing has `aiodist`, `asyncio` and `numpy` (as `np`) at hand. A block that imports something must
import all that it uses, because readers copy it as it is. What else a block needs, or is to prove,
stands before it in a comment that readers of the page do not see::

    <!-- run
    x = np.ones(3)
    # here
    assert x[0] == group.size
    -->

The block comes where ``# here`` stands, as deep as that; without it, at the end. Behind the
language of the block, ``ranks=3`` is another number than two. ``in=processes`` has ranks that are
processes, without a group: for what makes its own, or blocks. All such blocks of a page are run one
after the other in the same processes, for these take seconds to start; ``in=processes-2`` are other
ones.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import aiodist

HERE = re.compile(r"^( *)# here\n", re.MULTILINE)
IMPORTS = re.compile(r"^(?:import|from) ", re.MULTILINE)
AT_HAND = "import asyncio; import aiodist; import numpy as np"
ELSEWHERE = re.compile(r"t(?:cp|ls)://(?!127\.0\.0\.1\b|localhost\b|\{)[\w.-]+")
"""An address of another host: nothing that is run here may lead there."""

SECONDS = 60
"""For one block; the whole of those in processes have twice as long."""


def program(setup: str, code: str) -> str:
    """A block with what stands in the comment before it, and the modules that it has at hand."""
    setup = f"{'' if IMPORTS.search(code) else AT_HAND}\n{setup}"
    if HERE.search(setup) is None:
        return f"{setup}{code}"
    return HERE.sub(lambda match: textwrap.indent(code, match[1]), setup, count=1)


def run(place: str, setup: str, code: str, ranks: int) -> Iterator[str]:
    """Run a block on ranks in this process: what goes wrong."""
    if found := ELSEWHERE.search(program(setup, code)):
        yield f'{place}: {found[0]} is another host: use 127.0.0.1, or say not-run="…"'
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            asyncio.run(_on_ranks(place, program(setup, code), ranks))
    except Exception as error:
        yield f"{place}: {''.join(traceback.format_exception(error))}"


async def _on_ranks(place: str, source: str, ranks: int) -> None:
    async with (
        asyncio.timeout(SECONDS),
        aiodist.local(ranks, op_timeout=SECONDS / 2) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        for group in groups:
            tasks.create_task(_awaited(_begun(place, source, group=group)))


def _begun(place: str, source: str, **names: Any) -> Any:
    """Run a program; one with `await` at its top level gives a coroutine."""
    code = compile(source, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return eval(code, {"__name__": "__main__", **names})


async def _awaited(result: Any) -> None:
    if inspect.iscoroutine(result):
        await result


def run_in_processes(blocks: Sequence[tuple[str, str, str]], ranks: int) -> Iterator[str]:
    """Run blocks, each a place, its setup and its code, one after the other in new processes."""
    programs = [(place, program(setup, code)) for place, setup, code in blocks]
    for place, source in programs:
        if found := ELSEWHERE.search(source):
            yield f'{place}: {found[0]} is another host: use 127.0.0.1, or say not-run="…"'
            return
    run = [sys.executable, "-m", "aiodist_cli", "run", "-n", f"{ranks}", __file__]
    done = subprocess.run(
        [*run, json.dumps(programs)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=2 * SECONDS,
    )
    if done.returncode:
        yield f"{programs[0][0]}, or a block behind it: {done.stderr}"


def main() -> None:
    """One of the processes."""
    for place, source in json.loads(sys.argv[1]):
        result = _begun(place, source)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_initialized():
        torch.destroy_process_group()  # else it may abort where a rank ends before the other


if __name__ == "__main__":
    main()
