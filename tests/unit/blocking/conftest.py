"""Ranks that are threads of this process, without a loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from threaded import in_threads

import aiodist
from aiodist import BlockingGroup
from aiodist.threads.engine import engine

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session", autouse=True)
def the_engine() -> None:
    """Its thread stays as long as the process: before any test counts threads."""
    engine()


@pytest.fixture
def address(no_leaks: None) -> Iterator[str]:
    """Where a coordinator listens, on the loop of this process."""
    coordinator = aiodist.Coordinator()
    engine().wait_for(coordinator.start())
    yield coordinator.address
    engine().wait_for(coordinator.stop())


@pytest.fixture(params=["inproc", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def ranks(address: str, transport: str) -> Ranks:
    """``ranks(2, body)``: the results of ``body(group)`` in a thread for each rank. Raises what the
    first of them raises."""

    def run(size: int, body: Callable[[BlockingGroup], Any], **options: Any) -> list[Any]:
        settings = {"op_timeout": 20.0, "transports": transport, **options}

        def main(rank: int) -> Any:
            with aiodist.connect_blocking(address, rank=rank, size=size, **settings) as group:
                return body(group)

        return in_threads(size, main)

    return run
