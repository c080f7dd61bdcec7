"""The processes that `aiodist bench` starts: what they fail at is told, and none is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aiodist.launching import spawn
from aiodist_cli import bench_team
from aiodist_cli.bench_cases import Case, Effort
from aiodist_cli.bench_peers import Contender, Launch, Site
from aiodist_cli.bench_run import Column, columns_of, measure
from aiodist_cli.bench_team import OrderError, Team, TeamError, teams
from aiodist_cli.bench_worker import Block

CASE = Case("all_reduce", 8, 2)

WORKER = """
import json, os, socket, sys
control, rank, hello, answers = sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:])
connection = socket.socket(socket.AF_UNIX)
connection.connect(control)
def tell(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")
print("last words of", rank, flush=True)
if hello == "die":
    sys.exit(3)
tell({"rank": rank, "pid": os.getpid(), "library": "script", "features": hello})
for line, answer in zip(connection.makefile("rb"), [*answers, "quit"]):
    if json.loads(line)["do"] == "quit":
        break
    if answer == "die":
        sys.exit(3)
    if answer == "stay":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connection.sendall(b"{}\\n")
        signal.pause()
    if answer != "quit":
        tell(answer)
"""

Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Lets each rank say hello (a list of features, or "die"), and then give those answers; "quit"
    is no answer, "stay" one after which only SIGKILL ends the rank."""

    def set_up(hellos: list[object], *answers: list[object]) -> None:
        words = [tuple(map(json.dumps, pair)) for pair in zip(hellos, answers, strict=True)]

        def launches(
            contender: Contender, sites: object, control: Path, env: object
        ) -> list[Launch]:
            return [
                Launch(
                    (sys.executable, "-S", "-c", WORKER, str(control), str(rank), *said),
                    dict(os.environ),
                )
                for rank, said in enumerate(words)
            ]

        monkeypatch.setattr(bench_team, "launches", launches)

    return set_up


def pids(team: Team) -> list[int]:
    return [member.pid for member in team._members.values()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


GLOO = [Contender("gloo", "gloo")]
CPU = {"cpu": 0.25}


async def test_orders_reach_all_ranks(script: Script) -> None:
    script([["empty"], []], [{"ns": [1, 2], "cpu": 0.5}, {"share": 1}], [CPU, {"share": 2}])
    async with teams(GLOO, [Site()] * 2) as (team,):
        assert (team.library, team.features, team.broken) == ("script", {"empty"}, None)
        assert await team.run(CASE, 2) == Block([1, 2], 0.75)
        assert await team.order("idle", seconds=0) == [{"share": 1}, {"share": 2}]
        started = pids(team)
    assert len(started) == 2
    assert not any(map(alive, started))


async def test_a_team_that_does_not_start_is_broken(script: Script) -> None:
    script([[], "die"], [], [])
    async with teams(GLOO, [Site()] * 2) as (team,):
        assert team.broken is not None
        assert team.broken.startswith("Gloo: rank")
        assert "did not start; the last it wrote:" in team.broken
        assert "last words of 1" in team.broken
        with pytest.raises(TeamError, match="did not start"):
            await team.order("run")
        (result,) = await measure([CASE], [team], Effort(), lambda text: None)
        assert result.error == team.broken


async def test_a_team_whose_socket_has_no_room_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with teams(GLOO, [Site()] * 2) as (team,):
        assert team.broken == "Gloo: it was not started: AF_UNIX path too long"


async def test_a_rank_that_dies_breaks_its_team_alone(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script([[], []], [{"ns": [1], "cpu": 0.5}], ["die"])
    async with teams(GLOO, [Site()] * 2) as (team,):
        with pytest.raises(TeamError, match=r"Gloo: rank 1 died; the last it wrote:\n.*last words"):
            await team.run(CASE, 1)
        with pytest.raises(TeamError, match="rank 1 died"):
            await team.run(CASE, 1)
        await team._processes[1].wait()
        signal_group, signalled = spawn.signal_group, set()

        def signalling(pid: int, number: signal.Signals) -> bool:
            signalled.add(pid)
            return signal_group(pid, number)

        monkeypatch.setattr(spawn, "signal_group", signalling)
    # The number of the one that was reaped may be that of a group of strangers.
    assert signalled == {team._processes[0].pid}


async def test_after_an_error_orders_go_on(script: Script) -> None:
    script([[], []], [{}, {"ns": [5], "cpu": 0.5}], [{"error": "ValueError: no"}, CPU])
    async with teams(GLOO, [Site()] * 2) as (team,):
        with pytest.raises(OrderError, match="rank 1: ValueError: no"):
            await team.run(Case("broadcast", 8, 2), 1)
        assert (await team.run(CASE, 1)).ns == [5]


async def test_silence_breaks_a_team_and_it_is_killed(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_team, "ANSWER_TIMEOUT", 0.2)
    script([[], []], [{"ns": [1], "cpu": 0.5}, "stay"], [CPU, "quit"])
    async with teams(GLOO, [Site()] * 2) as (team,):
        await team.run(CASE, 1)
        with pytest.raises(TeamError, match="rank 1 "):
            await team.run(CASE, 1)
        started = pids(team)
    assert not any(map(alive, started))


async def test_rounds_are_interleaved(script: Script) -> None:
    """Two teams take turns; all samples of all rounds count; a failed column has no summary."""
    script([["empty"], []], [{"ns": [1000, 1000], "cpu": 0.5}] * 8, [CPU] * 8)
    log: list[str] = []
    async with teams([*GLOO, Contender("openmpi", "gloo")], [Site()] * 2) as (one, two):
        for team in (one, two):
            run = team.run

            async def logged(*args: object, team: Team = team, run=run, **more: object):
                log.append(f"{team.contender.name} {more['memory']} {args[1]}")
                return await run(*args, **more)

            team.run = logged
        columns = [column.name for column in columns_of([one, two], "all_reduce")]
        assert columns == ["gloo", "gloo group.empty", "openmpi", "openmpi group.empty"]
        assert columns_of([one], "ping_pong") == [Column(one)]
        apart = Team(one.contender, [Site(host="10.0.0.1", device="eth0")] * 2, Path())
        apart.features = one.features
        assert columns_of([apart], "all_reduce") == [Column(apart)]
        texts: list[str] = []
        results = await measure([CASE], [one, two], Effort(2, iterations=7), texts.append)
    assert texts == ["all_reduce 8 B, n=2"]
    assert [result.column for result in results] == columns
    assert all(result.summary and result.summary.count == 4 for result in results)
    # Two blocks, of two iterations each, in which the ranks took 0.5 and 0.25 s.
    assert {result.processor for result in results} == {0.375}
    warm = [f"{team} {memory}" for team in ("gloo", "openmpi") for memory in ("plain", "shared")]
    assert log[:8] == [f"{column} {count}" for column in warm for count in (1, 7)]
    assert log[8:12] == [f"{column} 7" for column in warm]
    assert log[12:] == [f"{column} 7" for column in [*warm[1:], warm[0]]]


async def test_a_block_gets_as_many_iterations_as_fit(script: Script) -> None:
    """One takes 2 ms: 1, 4, 16 are tried until it takes a fourth of the 0.1 s, then 50 are it."""
    tried = [{"ns": [2_000_000] * count, "cpu": 0.5} for count in (1, 1, 4, 16)]
    script([[], []], [*tried, {"ns": [1], "cpu": 0.5}], [CPU] * 5)
    counts: list[object] = []
    async with teams(GLOO, [Site()] * 2) as (team,):
        run = team.run

        async def logged(*args: object, **more: object):
            counts.append(args[1])
            return await run(*args, **more)

        team.run = logged
        await measure([CASE], [team], Effort(1, 0.1), lambda text: None)
    assert counts == [1, 1, 4, 16, 50]
