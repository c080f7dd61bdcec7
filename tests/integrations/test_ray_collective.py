"""aiodist as a backend of `ray.util.collective`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: make integrations", allow_module_level=True)

import ray
import ray.util.collective as collective
import torch
from ray import cloudpickle
from ray.util.collective.types import (
    AllReduceOptions,
    BarrierOptions,
    RecvOptions,
    ReduceOp,
    SendOptions,
)

import aiodist
import aiodist_ray
from aiodist_ray.collective import CollectiveGroup

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

SIZE = 3

KINDS: dict[str, Callable[[list[float]], Any]] = {
    "numpy": np.array,
    "torch": lambda values: torch.tensor(values, dtype=torch.float64),
}


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Rank:
    """An actor that uses Ray's own calls."""

    def __init__(self) -> None:
        aiodist_ray.register()
        aiodist_ray.register()  # as often as one likes

    def meet(self, name: str, rank: int) -> int:
        if collective.is_group_initialized(name):
            collective.destroy_collective_group(name)
        collective.init_collective_group(SIZE, rank, "aiodist", name)
        return collective.get_rank(name)

    def every_operation(self, kind: str, name: str) -> dict[str, Any]:
        make, rank = KINDS[kind], collective.collective.get_group_handle(name).rank
        own = [rank + 1.0, 2.0 * rank]
        found: dict[str, Any] = {}
        for op in ReduceOp:
            found[op.name] = make(own)
            collective.allreduce(found[op.name], name, op)
        found["reduce"] = make(own)
        collective.reduce(found["reduce"], 1, name, ReduceOp.SUM)
        found["broadcast"] = make(own)
        collective.broadcast(found["broadcast"], 2, name)
        parts = [make([0.0, 0.0]) for _ in range(SIZE)]
        collective.allgather(parts, make(own), name)
        slots = [make([rank + 10.0 * slot]) for slot in range(SIZE)]
        found["reducescatter"] = make([0.0])
        collective.reducescatter(found["reducescatter"], slots, name)
        found["received"] = make([0.0, 0.0])
        if rank == 0:
            collective.send(make(own), 2, name)
        elif rank == 2:
            collective.recv(found["received"], 0, name)
        collective.barrier(name)
        lists = {"allgather": parts, "slots": slots}
        return {name: value.tolist() for name, value in found.items()} | {
            name: [value.tolist() for value in values] for name, values in lists.items()
        }

    def lost(self, name: str) -> tuple[int, ...]:
        try:
            collective.barrier(name)
        except aiodist.PeerLostError as error:
            return error.ranks
        return ()

    def refused(self, name: str) -> list[str]:
        """The texts of calls that make no sense."""
        group = collective.collective.get_group_handle(name)
        some, whole, late = [np.ones(2), np.ones(2)], RecvOptions(), BarrierOptions()
        whole.n_elements = 1
        late.timeout_ms = 1
        calls = [
            lambda: group.allreduce(some, AllReduceOptions()),
            lambda: group.recv(some[:1], whole),
            lambda: group.send(some[:1], whole),
            lambda: group.barrier(late),
        ]
        return [f"{type(error).__name__}: {error}" for error in map(raised_by, calls)]


def raised_by(call: Callable[[], None]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


@pytest.fixture(scope="module")
def actors(ray_cluster: str) -> list[Any]:
    aiodist_ray.register()
    return [Rank.remote() for _ in range(SIZE)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation(actors: list[Any], kind: str) -> None:
    name = f"every {kind}"
    collective.create_collective_group(actors, SIZE, [0, 1, 2], "aiodist", name)
    found = ray.get([actor.every_operation.remote(kind, name) for actor in actors])
    own = [[rank + 1.0, 2.0 * rank] for rank in range(SIZE)]
    for rank, results in enumerate(found):
        assert results == {
            "SUM": [6.0, 6.0],
            "PRODUCT": [6.0, 0.0],
            "MIN": [1.0, 0.0],
            "MAX": [3.0, 4.0],
            "reduce": [6.0, 6.0] if rank == 1 else own[rank],
            "broadcast": own[2],
            "allgather": own,
            "reducescatter": [3.0 + 30.0 * rank],
            "slots": [[rank + 10.0 * slot] for slot in range(SIZE)],
            "received": own[0] if rank == 2 else [0.0, 0.0],
        }


def test_an_actor_dies_and_is_back(actors: list[Any]) -> None:
    assert meet(actors, "mortal") == [0, 1, 2]
    waiting = [actor.lost.remote("mortal") for actor in actors[:2]]
    ray.kill(actors[2], no_restart=False)
    assert ray.get(waiting) == [(2,), (2,)]
    assert meet(actors, "mortal") == [0, 1, 2]
    found = ray.get([actor.every_operation.remote("numpy", "mortal") for actor in actors])
    assert [results["SUM"] for results in found] == [[6.0, 6.0]] * 3


def meet(actors: list[Any], name: str) -> list[int]:
    ranks: list[int] = ray.get([actor.meet.remote(name, i) for i, actor in enumerate(actors)])
    return ranks


def test_what_is_refused(actors: list[Any]) -> None:
    meet(actors, "refusing")
    refused = ray.get(actors[0].refused.remote("refusing"))
    assert refused[0] == (
        "ValueError: aiodist takes one tensor a rank, not 2: make each GPU a rank of its own"
    )
    assert refused[1].startswith("ValueError: aiodist sends whole tensors, not 1 elements of one")
    assert refused[2].startswith("ValueError: aiodist sends whole tensors, not 1 elements of one")
    assert refused[3].startswith("CollectiveTimeoutError: ")


def test_the_example(ray_cluster: str, play: Any) -> None:
    lines = play("ray/collective.py", RAY_ADDRESS=ray_cluster)
    assert lines[-1] == "[[1.5, 1.5], [1.5, 1.5]]"


def test_every_operation_of_rays_interface_is_there() -> None:
    assert CollectiveGroup.__abstractmethods__ == frozenset()
    assert CollectiveGroup.backend() == "AIODIST"
    assert SendOptions.n_elements == 0  # what `send` of whole tensors has
