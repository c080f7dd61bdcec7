"""The programs of the tutorials print what the tutorials say. Ranks print in any order."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "tutorial"

pytestmark = pytest.mark.timeout(180)

Tutorial = dict[str, list[str]]
Environment = Callable[..., dict[str, str]]


def output_of(name: str, env: dict[str, str]) -> list[str]:
    """The lines that a program prints, sorted."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / name)],
        env=env,
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def each(text: str, ranks: int = 4) -> list[str]:
    """`text` with the ranks filled in."""
    return [text.replace("RANK", str(rank)) for rank in range(ranks)]


def test_hello_world(environment: Environment) -> None:
    assert output_of("hello_world.py", environment()) == [*each("[RANK] say hi!"), "finished"]


def test_point_to_point(tutorial: Tutorial) -> None:
    assert tutorial["point_to_point.py"] == [
        "Rank 0 has data 1.0",
        "Rank 1 has data 1.0",
        "Rank 1 starts with tensor([0.])",
    ]


def test_ping_pong(tutorial: Tutorial) -> None:
    assert tutorial["ping_pong.py"] == each("Rank RANK has data tensor([2.])", 2)


def test_nonblocking(tutorial: Tutorial) -> None:
    assert tutorial["nonblocking.py"] == [
        "Rank 0 computed 333328333350000 meanwhile",
        "Rank 0 has data 1.0",
        "Rank 0 started sending",
        "Rank 1 computed 333328333350000 meanwhile",
        "Rank 1 has data 1.0",
        "Rank 1 started receiving",
    ]


def test_broadcast(tutorial: Tutorial) -> None:
    assert tutorial["broadcast.py"] == sorted(
        each("[RANK] data = tensor([0.])")
        + each("[RANK] numbers = tensor([1, 2])")
        + each("[RANK] settings = {'rate': 0.1, 'layers': [64, 10]}")
    )


def test_scatter(tutorial: Tutorial) -> None:
    assert tutorial["scatter.py"] == sorted(
        [f"[{rank}] data = {rank + 1}.0" for rank in range(4)]
        + [f"[{rank}] pair = tensor([{rank}, {rank}])" for rank in range(4)]
    )


def test_gather(tutorial: Tutorial) -> None:
    assert tutorial["gather.py"] == [
        "[0] data = [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]",
        "[0] lengths = [0, 1, 2, 3]",
        "[0] numbers = [tensor([1, 2]), tensor([3, 4]), tensor([5, 6]), tensor([7, 8])]",
    ]


def test_reduce(tutorial: Tutorial) -> None:
    assert tutorial["reduce.py"] == [
        "[0] data = 4.0",
        "[0] numbers = tensor([1, 2])",
        "[1] data = 1.0",
        "[1] numbers = tensor([3, 4])",
        "[2] data = 1.0",
        "[2] numbers = tensor([5, 6])",
        "[3] data = 1.0",
        "[3] numbers = tensor([16, 20])",
    ]


def test_all_reduce(tutorial: Tutorial) -> None:
    assert tutorial["all_reduce.py"] == sorted(
        each("[RANK] data = 4.0")
        + each("[RANK] numbers = tensor([16, 20])")
        + each("[RANK] largest rank = 3.0")
    )


def test_all_gather(tutorial: Tutorial) -> None:
    assert tutorial["all_gather.py"] == sorted(
        each("[RANK] data = [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]")
        + each("[RANK] table = [[1, 2], [3, 4], [5, 6], [7, 8]]")
    )


def test_subgroup(tutorial: Tutorial) -> None:
    assert tutorial["subgroup.py"] == [
        "Rank: 0, has data: tensor([5., 7., 9.])",
        "Rank: 0, own tensor: tensor([1., 2., 3.])",
        "Rank: 1, has data: tensor([5., 7., 9.])",
        "Rank: 1, own tensor: tensor([4., 5., 6.])",
        "Rank: 2, is not in the pair",
    ]


def test_custom_operator(tutorial: Tutorial) -> None:
    assert tutorial["custom_operator.py"] == sorted(
        each("[RANK] largest = tensor([-4., -4., -4., -4.])")
        + each("[RANK] product = [[24, 10], [0, 1]]")
    )


def test_ring_all_reduce(tutorial: Tutorial) -> None:
    assert tutorial["ring_all_reduce.py"] == sorted(
        each("[RANK] data = [0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 42.0, 48.0, 54.0]", 3)
        + each("[RANK] equal = True", 3)
    )


def test_averaged_gradients(tutorial: Tutorial) -> None:
    assert tutorial["averaged_gradients.py"] == sorted(
        each("[RANK] weights = [2.0, -3.0, 0.5]", 2) + each("[RANK] equal = True", 2)
    )


@pytest.mark.long
def test_torch_multiprocessing(free_port: int, environment: Environment) -> None:
    env = environment(MASTER_PORT=str(free_port))
    assert output_of("torch_multiprocessing.py", env) == [
        "Rank  0  has data  tensor(2.)",
        "Rank  1  has data  tensor(2.)",
        "finished",
    ]


@pytest.mark.long
def test_by_hand(free_port: int, environment: Environment) -> None:
    program = [sys.executable, "-u", str(PROGRAMS / "by_hand.py")]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    terminals = [
        subprocess.Popen(
            program,
            env=environment(**address, WORLD_SIZE="2", RANK=rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("1", "0")
    ]
    try:
        ends = [terminal.communicate(timeout=100) for terminal in terminals]
    finally:
        for terminal in terminals:
            terminal.kill()
            terminal.communicate()
    for rank, (out, err) in zip("10", ends, strict=True):
        assert err == ""
        assert out.splitlines() == [
            "MASTER_ADDR:  127.0.0.1",
            f"MASTER_PORT:  {free_port}",
            f"Starting to connect. Current rank:  {rank}",
            f"Connected. Current rank:  {rank}",
            f"Rank  {rank}  has data  tensor(2.)",
        ]


@pytest.mark.long
def test_breakpoint(environment: Environment) -> None:
    launcher = [sys.executable, "-m", "aiodist_cli", "run", "-n", "2", "--stdin", "0"]
    done = subprocess.run(
        [*launcher, str(PROGRAMS / "breakpoint.py")],
        env=environment(),
        input="p tensor\ncontinue\n",
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of group 'world'; the others wait" in done.stdout
    assert "(Pdb) tensor([0.])" in done.stdout
    place = re.search(r"breakpoint\.py\(\d+\)run\(\)", done.stdout)
    assert place is not None
    assert place[0] in (ROOT / "docs" / "coming-from-torch.md").read_text()
    assert "My rank:  0\nRank 0 has data 1.0\n" in done.stdout
    assert "[1] Rank 1 has data 1.0\n" in done.stdout


def test_every_program_has_its_test() -> None:
    here = Path(__file__).read_text()
    programs = sorted(path.name for path in PROGRAMS.glob("*.py"))
    assert programs
    assert [name for name in programs if f'"{name}"' not in here] == []
