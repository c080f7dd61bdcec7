"""The environment of a rank, and how its end is told."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import random
import signal
import socket
import subprocess
import sys

import pytest

from aiodist import PeerLostError
from aiodist.environment import settings_from
from aiodist.launching import spawn

JOB = spawn.Job(
    address="tcp://127.0.0.1:4711",
    run_id="abc",
    local_size=4,
    master_addr="10.0.0.1",
    master_port=4712,
)


def test_environment_of_one_node() -> None:
    assert spawn.rank_environment(JOB, 2, cores=2) == {
        "AIODIST_ADDRESS": "tcp://127.0.0.1:4711",
        "AIODIST_RANK": "2",
        "AIODIST_SIZE": "4",
        "AIODIST_RUN_ID": "abc",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4712",
        "OMP_NUM_THREADS": "1",
    }


def test_environment_of_an_elastic_group() -> None:
    job = dataclasses.replace(JOB, least=2)
    base = {"RANK": "9", "WORLD_SIZE": "10", "AIODIST_RANK": "9", "AIODIST_SIZE": "10"}
    env = spawn.with_rank_environment(base, job, 2, cores=2, restarts=3)
    assert not env.keys() & base.keys()
    assert (env["AIODIST_MIN_SIZE"], env["AIODIST_MAX_SIZE"]) == ("2", "4")
    assert (env["LOCAL_RANK"], env["AIODIST_RESTART_COUNT"]) == ("2", "3")
    found = settings_from({**env, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert (found.rank, found.size, found.min_size, found.max_size) == (None, None, 2, 4)
    # A run within a rank of that is no elastic one.
    assert "AIODIST_MIN_SIZE" not in spawn.with_rank_environment(env, JOB, 0, cores=2)


def test_environment_of_the_second_node() -> None:
    job = spawn.Job("tcp://x:1", "abc", 4, "x", 2, nodes=2, node=1, group="g", token="secret")
    env = spawn.rank_environment(job, 1, cores=16)
    assert (env["AIODIST_RANK"], env["AIODIST_SIZE"], env["LOCAL_RANK"]) == ("5", "8", "1")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (env["AIODIST_GROUP"], env["AIODIST_TOKEN"]) == ("g", "secret")
    assert env["OMP_NUM_THREADS"] == "4"


def test_environment_keeps_what_it_should() -> None:
    base = {"HOME": "/root", "RANK": "9", "OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "old"}
    env = spawn.with_rank_environment(base, JOB, 0, cores=8)
    assert env["HOME"] == "/root"
    assert env["RANK"] == "0"
    assert env["OMP_NUM_THREADS"] == "3"
    assert "TORCHELASTIC_RUN_ID" not in env


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (0, "exit code 0", 0),
        (3, "exit code 3", 3),
        (-9, "signal SIGKILL", 137),
        (-40, "signal 40", 168),
    ],
)
def test_how_a_process_ended(code: int, text: str, status: int) -> None:
    assert spawn.describe_exit(code) == text
    assert spawn.shell_status(code) == status


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0], "ranks 0 and 2"), ([5, 1, 4], "ranks 1, 4 and 5")],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert spawn.name_ranks(ranks) == text


def test_free_port_is_free_and_leaves_the_random_numbers_of_the_program() -> None:
    before = random.getstate()
    port = spawn.free_port()
    assert random.getstate() == before
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_only_posix_has_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn.require_posix("aiodist.run")
    monkeypatch.setattr(spawn.os, "name", "nt")
    with pytest.raises(OSError, match=r"aiodist\.run needs process groups.*by hand"):
        spawn.require_posix("aiodist.run")


def test_loop_is_uvloops_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = spawn.new_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = spawn.new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)


def test_signals_reach_the_group_while_there_is_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, process_group=0) as process:
        assert spawn.signal_group(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not spawn.signal_group(process.pid, signal.SIGKILL)


def test_a_group_of_consequences_is_one() -> None:
    lost = PeerLostError("gone", ranks=[1])
    assert spawn.is_consequence(lost)
    assert spawn.is_consequence(ExceptionGroup("tasks", [lost, lost]))
    assert not spawn.is_consequence(ExceptionGroup("tasks", [lost, ValueError("no")]))


def test_what_came_of_a_consequence_is_one() -> None:
    lost = PeerLostError("gone", ranks=[1])
    wrapped, handled, hidden = RuntimeError("from"), KeyError("while"), ValueError("from None")
    wrapped.__cause__ = ExceptionGroup("tasks", [lost])
    handled.__context__ = wrapped
    hidden.__context__, hidden.__suppress_context__ = lost, True
    assert spawn.is_consequence(wrapped)
    assert spawn.is_consequence(ExceptionGroup("tasks", [lost, handled]))
    assert not spawn.is_consequence(hidden)
    spawn.mark(wrapped)
    spawn.mark(hidden)
    assert spawn.is_consequence(pickle.loads(pickle.dumps(wrapped)))
    assert not spawn.is_consequence(pickle.loads(pickle.dumps(hidden)))
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = ExceptionGroup("a ring", [other]), one
    assert not spawn.is_consequence(one)


def test_many_groups_that_came_of_each_other() -> None:
    error: Exception = ValueError("the first")
    for _ in range(100):
        group = ExceptionGroup("caught and raised again", [error])
        group.__context__ = error
        error = group
    assert not spawn.is_consequence(error)
