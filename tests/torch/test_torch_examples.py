"""The programs of the tutorials run unmodified but for one word, and print what they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aiodist.launching.spawn import free_port

EXAMPLES = Path(__file__).parents[2] / "examples" / "torch"

pytestmark = pytest.mark.timeout(300)

Env = dict[str, str]


@pytest.fixture
def env(installed: Env) -> Env:
    return {name: value for name, value in installed.items() if name != "MASTER_ADDR"}


def start(command: list[str], env: Env) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], told: str = "", says: str = "") -> list[str]:
    """The lines that it prints, sorted; on stderr it must say nothing but `says`."""
    try:
        out, err = process.communicate(told, timeout=280)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, says)
    return sorted(out.splitlines())


def played(
    name: str, env: Env, tmp_path: Path, *, backend: str = "aiodist", says: str = ""
) -> list[str]:
    """What an example prints; 29500 may be somebody else's port."""
    text = (EXAMPLES / name).read_text().replace("29500", str(free_port()))
    program = tmp_path / name
    program.write_text(text.replace('backend="aiodist"', f'backend="{backend}"'))
    return finish(start([str(program)], env), says=says)


def test_nothing_is_said_of_aiodist_but_the_backend() -> None:
    for path in EXAMPLES.glob("*.py"):
        _, code = path.read_text().split('"""\n', 1)
        assert "import aiodist" not in code
        assert code.count("aiodist") == 1


@pytest.mark.long
def test_point_to_point(env: Env, tmp_path: Path) -> None:
    assert played("point_to_point.py", env, tmp_path) == [
        "Rank  0  Init:     tensor([0.])",
        "Rank  0  Receive:  tensor([2.])",
        "Rank  0  Send:     tensor([1.])",
        "Rank  1  Init:     tensor([0.])",
        "Rank  1  Receive:  tensor([1.])",
        "Rank  1  Send:     tensor([2.])",
    ]


@pytest.mark.long
def test_nonblocking(env: Env, tmp_path: Path) -> None:
    assert played("nonblocking.py", env, tmp_path) == [
        "Rank  0  has data  tensor(1.)",
        "Rank  1  has data  tensor(1.)",
        "Rank 0 started sending",
        "Rank 1 started receiving",
    ]


BLOCKING = [f"Rank  {rank}  has data  tensor({x}.)" for rank in (0, 1) for x in (1, 2)]
# torch warns that `reduce_op` is an old name.
OLD = {"PYTHONWARNINGS": "ignore::FutureWarning"}


@pytest.mark.long
def test_blocking(env: Env, tmp_path: Path) -> None:
    assert played("blocking.py", env | OLD, tmp_path) == BLOCKING


def test_the_oldest_tutorial_runs_as_it_stands(env: Env, tmp_path: Path) -> None:
    switch = "AIODIST_TORCH_REPLACES"
    says = f'aiodist: {switch}=tcp: the torch backend "tcp" of this process is aiodist\n' * 2
    assert (
        played("blocking.py", env | OLD | {switch: "tcp"}, tmp_path, backend="tcp", says=says)
        == BLOCKING
    )


@pytest.mark.long
def test_collectives(env: Env, tmp_path: Path) -> None:
    everyones = "[tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]"
    lines = played("collectives.py", env, tmp_path)
    reduced = [line for line in lines if "] reduce:" in line]
    assert "[0] reduce: data = 4.0" in reduced
    assert len(reduced) == 4  # what the others' tensors hold is not said
    assert [line for line in lines if line not in reduced] == sorted(
        [
            "[0] gather: data = " + everyones,
            *(
                f"[{rank}] {line}"
                for rank in range(4)
                for line in (
                    "say hi!",
                    "all_reduce: data = 4.0",
                    f"scatter: data = {rank + 1}.0",
                    "all_gather: data = " + everyones,
                    "broadcast: data = tensor([0.])",
                )
            ),
        ]
    )


@pytest.mark.long
def test_primitives(env: Env, tmp_path: Path) -> None:
    everyones = "[[1, 2], [3, 4], [5, 6], [7, 8]]"
    assert played("primitives.py", env, tmp_path) == sorted(
        [
            f"gather 0 {everyones}",
            "reduce 3 [16, 20]",
            *(
                line
                for rank in range(4)
                for line in (
                    f"broadcast {rank} [1, 2]",
                    f"scatter {rank} [{rank}, {rank}]",
                    f"all_gather {rank} {everyones}",
                    f"all_reduce {rank} [16, 20]",
                )
            ),
        ]
    )


def says(rank: int) -> list[str]:
    return [
        f"Starting init process group. Current rank:  {rank}",
        f"Finished init process group. Current rank:  {rank}",
        f"Rank  {rank}  has data  tensor(1.)",
        f"Rank  {rank}  has data  tensor(2.)",
    ]


@pytest.mark.long
def test_environment_by_hand(env: Env) -> None:
    port = str(free_port())
    processes = [
        start(
            [str(EXAMPLES / "by_environment.py")],
            env | {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        assert finish(process) == sorted(says(rank))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2"]


@pytest.mark.long
def test_torchrun(env: Env, tmp_path: Path) -> None:
    # Each rank's output to a file of its own: torchrun has ranks write words, not lines.
    apart = [f"--log-dir={tmp_path}", "--redirects=1", str(EXAMPLES / "by_environment.py")]
    finish(start([*TORCHRUN, *apart], env))
    found = [path.read_text().splitlines() for path in sorted(tmp_path.rglob("stdout.log"))]
    assert found == [says(0), says(1)]


@pytest.mark.long
def test_breakpoint(env: Env) -> None:
    """The debugger asks, and goes on when it is told to."""
    process = start([*TORCHRUN, str(EXAMPLES / "breakpoint.py")], env)
    said = "\n".join(finish(process, "up\np tensor\nc\n"))
    assert "(Pdb) tensor([0.])" in said
    # Both ranks write to one terminal, a word at a time.
    assert "My rank: " in said
    assert said.count(" has data ") == said.count("tensor(1.)") == 2
