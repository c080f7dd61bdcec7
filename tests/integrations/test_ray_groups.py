"""`aiodist_ray.connect`: async actors of a real cluster as ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: make integrations", allow_module_level=True)

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

import aiodist
import aiodist_ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Rank:
    """An actor with a group. One that was killed is back for the next test."""

    async def join(self, group: str, **options: Any) -> int:
        self.group = await aiodist_ray.connect(group, **options)
        return self.group.rank

    async def add_up(self, value: int) -> int:
        result: int = await self.group.all_reduce(value)
        return result

    async def lost(self) -> tuple[int, ...]:
        """Who is lost, by an operation that needs everybody."""
        try:
            await self.group.barrier()
        except aiodist.PeerLostError as error:
            return error.ranks
        return ()

    async def actor_ids(self) -> list[str]:
        return [member.metadata["actor_id"] for member in self.group.members]

    async def pid(self) -> int:
        return os.getpid()

    async def leave(self) -> None:
        await self.group.close()


@pytest.fixture(scope="module")
def actors(ray_cluster: str) -> list[Any]:
    return [Rank.remote() for _ in range(3)]


def join(actors: list[Any], group: str, **options: Any) -> None:
    """Have actors meet, as ranks in their order."""
    size = len(actors)
    joining = [
        actor.join.remote(group, rank=i, size=size, **options) for i, actor in enumerate(actors)
    ]
    assert ray.get(joining) == list(range(size))


def test_the_example(ray_cluster: str, play: Any) -> None:
    assert play("ray/average.py", RAY_ADDRESS=ray_cluster)[-1:] == ["[1.5, 1.5, 1.5, 1.5]"]


def test_a_restarted_actor_is_taken_in(ray_cluster: str, play: Any) -> None:
    printed = [
        "[(3, 1), (3, 1), (3, 1)]",
        "[(30, 2), (30, 2), (30, 2)]",
        "restarted: True",
    ]
    lines = play("ray/elastic.py", RAY_ADDRESS=ray_cluster)
    assert [line for line in lines if line in printed] == printed


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_a_killed_actor_is_noticed(actors: list[Any], how: str) -> None:
    join(actors, f"killed by {how}", lease=3600.0)  # that it is silent is not what tells
    waiting = [actor.lost.remote() for actor in actors[:2]]
    if how == "SIGKILL":
        os.kill(ray.get(actors[2].pid.remote()), signal.SIGKILL)
    else:
        ray.kill(actors[2], no_restart=False)
    assert ray.get(waiting) == [(2,), (2,)]


def test_members_say_which_actors_they_are(actors: list[Any]) -> None:
    join(actors, "ids")
    ids = [actor._actor_id.hex() for actor in actors]
    assert ray.get([actor.actor_ids.remote() for actor in actors]) == [ids] * 3
    ray.get([actor.leave.remote() for actor in actors])


async def test_the_driver_is_a_rank(actors: list[Any]) -> None:
    actor = actors[0]
    joining = actor.join.remote("with driver", rank=1, size=2)
    async with aiodist_ray.connect("with driver", rank=0, size=2) as group:
        assert await joining == 1
        other = actor.add_up.remote(5)
        assert await group.all_reduce(2) == 7
        assert await other == 7
        await actor.leave.remote()


async def test_who_can_only_reach_the_port_does_not_get_in() -> None:
    address, token = await aiodist_ray.coordinator().meet.remote()
    with pytest.raises(aiodist.AuthenticationError):
        await aiodist.connect(address, size=1)
    assert token not in str(await aiodist_ray.coordinator().survey.remote())


async def test_the_coordinator_ends_with_its_last_group(actors: list[Any]) -> None:
    first = aiodist_ray.coordinator(namespace="brief", linger=2.0)
    end = first.gone.remote()
    join(actors, "brief", namespace="brief")
    assert ray.get([actor.add_up.remote(1) for actor in actors]) == [3, 3, 3]
    assert ray.wait([end], timeout=0) == ([], [end])
    ray.get([actor.leave.remote() for actor in actors])
    with pytest.raises(RayActorError):
        await end
    again = [actor.join.remote("again", size=3, namespace="brief") for actor in actors]
    assert sorted(ray.get(again)) == [0, 1, 2]
    assert aiodist_ray.coordinator(namespace="brief") != first


async def test_groups_outlive_their_coordinator(actors: list[Any]) -> None:
    join(actors, "before", namespace="mortal")
    first = aiodist_ray.coordinator(namespace="mortal")
    end = first.gone.remote()
    ray.kill(first)
    with pytest.raises(RayActorError):
        await end
    assert ray.get([actor.add_up.remote(1) for actor in actors]) == [3, 3, 3]
    join(actors, "after", namespace="mortal")
    assert ray.get([actor.add_up.remote(2) for actor in actors]) == [6, 6, 6]
    ray.get([actor.leave.remote() for actor in actors])


@pytest.mark.parametrize("option", ["address", "token"])
def test_what_the_coordinator_gives_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: "x"}
    with pytest.raises(TypeError, match="leave them out"):
        aiodist_ray.connect("refused", **options)
