"""Running the examples.

Importing torch takes seconds in each process, so most programs of the tutorial share one job of
four ranks: what their `main` gives to `aiodist.run` is called on a group of as many ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import aiodist
from aiodist.launching import spawn

EXAMPLES = Path(__file__).parents[2] / "examples"

OTHERWISE = ("hello_world.py", "by_hand.py", "breakpoint.py", "torch_multiprocessing.py")
"""Programs that tests run as they are."""

Program = tuple[str, int]


async def play(group: aiodist.Group, programs: dict[str, Program]) -> dict[str, list[str]]:
    """What each program prints on this rank."""
    printed = {}
    for name, (function, ranks) in programs.items():
        if group.rank < ranks:
            cast = await group.subgroup(range(ranks))
            with contextlib.redirect_stdout(io.StringIO()) as out:
                await getattr(load(name), function)(cast)
            await cast.close()
            printed[name] = out.getvalue().splitlines()
        await group.barrier()
    return printed


def load(name: str) -> Any:
    """The module of a tutorial's program."""
    path = EXAMPLES / "tutorial" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def casting(name: str) -> Program:
    """Which function `main` of a program runs, on how many ranks."""
    with mock.patch("aiodist.run") as run:
        load(name).main()
    run.assert_called_once()
    function, ranks = run.call_args.args[0], run.call_args.kwargs["nprocs"]
    assert run.call_args.args[1:] == ()
    return function.__name__, ranks


@pytest.fixture(scope="session")
def tutorial() -> dict[str, list[str]]:
    """The sorted lines that each program of the tutorial prints."""
    names = sorted(path.name for path in (EXAMPLES / "tutorial").glob("*.py"))
    programs = {name: casting(name) for name in names if name not in OTHERWISE}
    ranks = aiodist.run(play, 4, (programs,))
    return {
        name: sorted(line for rank in ranks for line in rank.get(name, [])) for name in programs
    }


@pytest.fixture
def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    return spawn.free_port()


@pytest.fixture
def environment() -> Callable[..., dict[str, str]]:
    """``environment(RANK="0")``: the variables of this process without those that ranks read,
    and with the given ones."""
    taken = ("AIODIST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONUNBUFFERED")
    env = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    return lambda **variables: env | {"OMP_NUM_THREADS": "1"} | variables
