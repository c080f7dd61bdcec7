"""The examples in docstrings: what stands indented behind ``::``. `check.py` runs them as it runs
the Python of pages, and says which public function and class has none.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import running

import aiodist
import aiodist.testing
from aiodist.control.store import Store
from aiodist.operations.collectives import CollectiveOperations
from aiodist.operations.messages import MessageOperations
from aiodist.types import Wildcard

LITERAL = re.compile(r"::\n\n((?: {4,}\S.*\n|\n)+)")

SETUPS = {
    "aiodist.flight_recorder.dump": "import io\n",
    "aiodist.epochs": """
from types import SimpleNamespace
address, state = group.address, 0
async def newest(group, state):
    return state
async def train(group, state):
    await group.barrier()
async def epochs(address, min_size):
    yield await group.dup()
real, aiodist = aiodist, SimpleNamespace(epochs=epochs)  # no group of its own, which has no end
""",
    "aiodist.Lifespan": """
from aiohttp import web
from starlette.applications import Starlette
routes = []
""",
    "aiodist.Simulation": """
import asyncio
def test():
    # here
await asyncio.to_thread(test)  # it has a loop of its own
""",
}
"""What an example needs that it does not show."""

ELSEWHERE = {
    "aiodist.run": "it is a script, as one in docs/quickstart.md, which is run",
    "aiodist.breakpoint": "it waits for a person: tests/unit has a debugger that is none",
    "aiodist.connect_blocking": "it needs processes: docs/blocking.md has the same, which is run",
}
"""The examples that are not run here, and why."""


class Example(NamedTuple):
    """One, and whose it is."""

    name: str
    code: str


def public() -> dict[str, Any]:
    """The functions and classes that are to have an example, and the methods of `Group`. Those of
    other classes are in the example of the class, or of the function that makes it."""
    found: dict[str, Any] = {
        "aiodist.Store": Store,
        "aiodist.Simulation": aiodist.testing.Simulation,
    }
    for name in aiodist.__all__:
        value = getattr(aiodist, name)
        is_small = isinstance(value, type) and (
            issubclass(value, (BaseException, Wildcard))
            or name in ("Group", "Member", "View", "Envelope")
        )
        is_made = "Made by `" in (value.__doc__ or "")
        if (
            callable(value)
            and not (is_small or is_made)
            and name not in ("BlockingStore", "lifespan")
        ):
            found[f"aiodist.{name}"] = value
    found["aiodist.Lifespan"] = aiodist.lifespan
    for cls in (CollectiveOperations, MessageOperations, aiodist.Group):
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and not name.startswith("_"):
                found[f"aiodist.Group.{value.__name__}"] = value
    for module, names in (
        ("flight_recorder", ("enable", "dump")),
        ("telemetry", ("enable",)),
    ):
        for name in names:
            found[f"aiodist.{module}.{name}"] = getattr(getattr(aiodist, module), name)
    for cls, name in (
        (aiodist.ReduceOp, "custom"),
        (aiodist.ReduceOp, "premul_sum"),
        (aiodist.Work, "wait"),
    ):
        found[f"aiodist.{cls.__name__}.{name}"] = getattr(cls, name)
    return found


def examples_of(name: str, value: Any) -> Iterator[Example]:
    """Those in a docstring."""
    text = inspect.getdoc(value) or ""
    for match in LITERAL.finditer(f"{text}\n"):
        yield Example(name, textwrap.dedent(match[1]))


def check() -> Iterator[str]:
    """Run them all: what is wrong."""
    for name, value in public().items():
        found = [*examples_of(name, value)]
        if not found:
            yield f"{name} has no example in its docstring"
        for example in found if name not in ELSEWHERE else ():
            yield from running.run(f"the example of {name}", SETUPS.get(name, ""), example.code, 2)
