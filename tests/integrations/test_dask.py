"""`aiodist_dask`: the workers of a real cluster as ranks, each in a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("distributed") is None:
    pytest.skip("needs Dask's distributed: make integrations", allow_module_level=True)

import cloudpickle
from distributed import Client, LocalCluster, Worker
from distributed.security import Security

import aiodist
import aiodist_dask
from aiodist_dask.worker import Ticket

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(240)

SIZE = 3

PORTS: dict[str, Any] = {"dashboard_address": "127.0.0.1:0"}
"""One that nobody else has, where it would be the same for all clusters of a host."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of a cluster of three workers, whose nannies start others in the place of those that die."""
    with (
        LocalCluster(n_workers=SIZE, threads_per_worker=2, host="127.0.0.1", **PORTS) as cluster,
        Client(cluster) as client,
    ):
        yield client


async def place(group: aiodist.Group) -> tuple[int, int, int]:
    return group.rank, group.size, await group.all_reduce(1)


def test_results_are_by_rank(client: Client) -> None:
    with aiodist_dask.groups(client) as ranks:
        assert ranks.run(place) == {
            address: (rank, SIZE, SIZE) for rank, address in enumerate(ranks.workers)
        }
        assert list(ranks.run(place).values())[2] == (2, SIZE, SIZE)
    assert ranks.workers == ()


def test_some_of_the_workers(client: Client) -> None:
    wanted = sorted(client.scheduler_info(n_workers=-1)["workers"], reverse=True)[:2]
    with aiodist_dask.groups(client, "two", workers=wanted) as ranks:
        assert ranks.run(place) == {wanted[0]: (0, 2, 2), wanted[1]: (1, 2, 2)}


async def give_an_exception(group: aiodist.Group) -> Exception:
    return ValueError(group.rank)


def test_an_exception_that_is_a_result(client: Client) -> None:
    with aiodist_dask.groups(client) as ranks:
        results = ranks.run(give_an_exception).values()
        assert [error.args for error in results] == [(0,), (1,), (2,)]


async def fail_on_rank_1(group: aiodist.Group) -> None:
    if group.rank == 1:
        raise KeyError("of rank 1")
    await group.barrier()


def test_a_failure_is_told_and_the_group_stays_usable(client: Client) -> None:
    with aiodist_dask.groups(client) as ranks:
        with pytest.raises(KeyError, match="of rank 1"):
            ranks.run(fail_on_rank_1)
        assert [size for _, size, _ in ranks.run(place).values()] == [SIZE] * SIZE


async def be_cancelled_on_rank_1(group: aiodist.Group) -> None:
    if group.rank == 1:
        raise asyncio.CancelledError
    await group.barrier()


def test_a_cancelled_function_is_no_dead_worker(client: Client) -> None:
    with aiodist_dask.groups(client) as ranks:
        with pytest.raises(RuntimeError, match=r"the function was cancelled on rank 1"):
            ranks.run(be_cancelled_on_rank_1)
        assert [size for _, size, _ in ranks.run(place).values()] == [SIZE] * SIZE


def test_a_replaced_group_says_so_and_leaves_the_other_alone(client: Client) -> None:
    replaced = r"another groups\(…\) of the name 'world' has replaced this one"
    with aiodist_dask.groups(client) as first, aiodist_dask.groups(client) as third:
        with aiodist_dask.groups(client, workers=first.workers[1:]) as second:
            for each in (first, third):
                with pytest.raises(RuntimeError, match=replaced):
                    each.run(place)
            first.close()
            assert [size for _, size, _ in second.run(place).values()] == [2, 2]
        with pytest.raises(RuntimeError, match=replaced):
            third.run(place)
        third.renew()
        assert [size for _, size, _ in third.run(place).values()] == [SIZE] * SIZE


async def add_up(value: int, dask_worker: Worker) -> int:
    result: int = await aiodist_dask.get_group("sums", worker=dask_worker).all_reduce(value)
    return result


def add_up_in_a_task(value: int) -> int:
    result: int = aiodist_dask.get_group("sums").blocking().all_reduce(value)
    return result


def test_what_dask_runs_finds_the_group(client: Client) -> None:
    with aiodist_dask.groups(client, "sums") as ranks:
        assert list(client.run(add_up, 2).values()) == [6, 6, 6]
        tasks = [
            client.submit(add_up_in_a_task, rank, workers=[worker], pure=False)
            for rank, worker in enumerate(ranks.workers)
        ]
        assert client.gather(tasks) == [3, 3, 3]
    with pytest.raises(KeyError, match="is in no group 'sums'"):
        client.run(add_up, 2)


async def die(group: aiodist.Group, rank: int) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    await group.barrier()


def test_a_killed_worker_is_named_and_replaced(client: Client) -> None:
    with aiodist_dask.groups(client) as ranks:
        before = ranks.workers
        with pytest.raises(
            aiodist.PeerLostError, match=rf"lost rank 1, on {before[1]}: "
        ) as caught:
            ranks.run(die, 1)
        assert caught.value.ranks == (1,)
        with pytest.raises(
            aiodist.PeerLostError, match=rf"lost rank 1, on {before[1]}: "
        ) as caught:
            ranks.run(place)  # before they have met anew
        assert caught.value.ranks == (1,)
        client.wait_for_workers(SIZE)
        ranks.renew()
        assert ranks.workers[:2] == (before[0], before[2])
        assert ranks.workers[2] not in before
        assert [total for *_, total in ranks.run(place).values()] == [SIZE] * SIZE


async def test_a_worker_restarted_at_its_address_is_lost() -> None:
    async with (
        LocalCluster(
            n_workers=1, processes=False, protocol="tcp://", asynchronous=True, **PORTS
        ) as cluster,
        Client(cluster, asynchronous=True) as other,
    ):
        restarted = await Worker(cluster.scheduler_address, host="127.0.0.1")
        try:
            workers = [cluster.workers[0].address, restarted.address]
            async with aiodist_dask.groups(other, workers=workers) as ranks:
                await restarted.close()
                restarted = await Worker(cluster.scheduler_address, host=workers[1])
                with pytest.raises(aiodist.PeerLostError, match=r"lost rank 1, on ") as caught:
                    await ranks.run(place)
                assert caught.value.ranks == (1,)
                await ranks.renew()
                assert list((await ranks.run(place)).values()) == [(0, 2, 2), (1, 2, 2)]
        finally:
            await restarted.close()


def test_a_group_that_has_not_met(client: Client) -> None:
    with pytest.raises(RuntimeError, match=r"has not met: use `with groups"):
        aiodist_dask.groups(client).run(place)
    with pytest.raises(ValueError, match=r"the cluster has no workers tcp://127.0.0.1:1"):
        aiodist_dask.groups(client, workers=["tcp://127.0.0.1:1"]).start()
    with pytest.raises(ValueError, match=r"workers= has tcp://127.0.0.1:1 more than once"):
        aiodist_dask.groups(client, workers=["tcp://127.0.0.1:1"] * 2).start()


def test_a_cluster_without_workers() -> None:
    with (
        LocalCluster(n_workers=0, host="127.0.0.1", **PORTS) as cluster,
        Client(cluster) as empty,
        pytest.raises(RuntimeError, match=r"none of the workers .* client\.wait_for_workers"),
    ):
        aiodist_dask.groups(empty).start()


def test_the_token_is_in_no_log() -> None:
    ticket = Ticket("tcp://127.0.0.1:1", "a secret", "world", "world/1", 1, {})
    assert "a secret" not in repr(ticket)
    assert pickle.loads(pickle.dumps(ticket)).token == "a secret"


async def test_an_asynchronous_client(client: Client) -> None:
    async with (
        Client(client.scheduler.address, asynchronous=True) as other,
        aiodist_dask.groups(other, "async") as ranks,
    ):
        assert [total for *_, total in (await ranks.run(place)).values()] == [SIZE] * SIZE


async def test_workers_of_one_process_and_loop() -> None:
    async with (
        LocalCluster(n_workers=2, processes=False, asynchronous=True, **PORTS) as cluster,
        Client(cluster, asynchronous=True) as other,
        aiodist_dask.groups(other) as ranks,
    ):
        assert [total for *_, total in (await ranks.run(place)).values()] == [2, 2]


@pytest.fixture
def security(tmp_path: Path) -> Security:
    """One certificate for everybody, which is its own authority."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make certificates with")
    command = (
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True, timeout=30)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    ends = ("client", "scheduler", "worker")
    files = {
        f"tls_{end}_{kind}": path for end in ends for kind, path in (("cert", cert), ("key", key))
    }
    return Security(tls_ca_file=cert, require_encryption=True, **files)


async def addresses(group: aiodist.Group) -> tuple[str, float]:
    return group.address.partition(":")[0], await group.all_reduce(1.5)


def test_a_cluster_with_tls_has_groups_with_tls(security: Security) -> None:
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "protocol": "tls://"}
    with (
        LocalCluster(host="127.0.0.1", security=security, **options, **PORTS) as cluster,
        Client(cluster, security=security) as client,
        aiodist_dask.groups(client, transports="tcp") as ranks,
    ):
        assert list(ranks.run(addresses).values()) == [("tls", 3.0)] * 2


def test_the_example(client: Client, play: Any) -> None:
    lines = play("dask/average.py", client.scheduler.address)
    assert lines == [str([[0.0, 10.0, 20.0]] * SIZE)]
