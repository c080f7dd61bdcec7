"""A policy learns from what workers play with the weights of a channel."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiodist

PROGRAM = Path(__file__).parents[2] / "examples" / "weights" / "rl.py"


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("rl", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    threads = program.torch.get_num_threads()
    program.torch.set_num_threads(1)  # as the program does: others of the machine are busy
    yield program
    program.torch.set_num_threads(threads)


@pytest.fixture
def small(program: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program with a little of everything."""
    for name, value in {"WORKERS": 3, "BATCHES": 2, "GAMES": 4, "LENGTH": 3}.items():
        monkeypatch.setattr(program, name, value)
    program.torch.manual_seed(0)
    return program


def test_rewards_and_learning(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = program.torch
    monkeypatch.setattr(program, "LENGTH", 4)
    monkeypatch.setattr(program, "GAMES", 64)
    torch.manual_seed(0)
    moves = torch.tensor([[1, 2, 3, 3], [15, 0, 1, 2]])
    assert program.rewards(moves).tolist() == [[1, 1, 0], [1, 1, 1]]
    policy = program.Policy(width=32, layers=1)
    assert {one.dtype for one in policy.parameters()} == {torch.bfloat16}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    found = [program.learn(policy, optimizer, program.play(policy)) for _ in range(10)]
    assert found[-1] > 4 * found[0]


def test_what_has_changed(program: Any) -> None:
    torch = program.torch
    before = {"a": torch.zeros(3), "b": torch.zeros(1)}
    assert program.changed(before, before) == 0
    assert program.changed(before, {"a": torch.tensor([0, 0, 1.0]), "b": torch.ones(1)}) == 0.5


async def test_workers_and_trainers_come_and_go(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def policy() -> Any:
        return small.Policy(width=8, layers=1)

    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        address = coordinator.address

        def worker(number: int) -> Any:
            return small.beside(small.Worker(address, number, policy()).run())

        async def reach(who: Any, version: int) -> None:
            while who.version < version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        one = small.Worker(address, 1, policy())
        async with small.beside(one.run()):
            small.BATCHES = 1000  # the first trainer publishes version 0 alone
            async with small.beside(small.Trainer(address, policy()).run()):
                await reach(one, 0)
            small.BATCHES = 2
            trainer = small.Trainer(address, policy())
            async with small.beside(trainer.run()):
                async with worker(0):
                    await reach(trainer, 4)
                await reach(trainer, 6)
    said = capsys.readouterr().out
    assert "trainer: goes on with version 0\n" in said
    ages = [int(age) for age in re.findall(r"oldest batch (\d+) versions old", said)]
    assert max(ages) <= small.STALEST
    assert re.search(r"worker 1: version \d+ after a pause of \d+ ms", said)


async def test_old_batches_are_dropped(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    policy = small.Policy(width=8, layers=1)
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        trainer = small.Trainer(coordinator.address, policy)
        trainer.version = 10
        played = small.play(policy)
        batches = [small.Batch(version, played) for version in (5, 6, 9)]
        for batch in batches:
            trainer._batches.put_nowait(batch)
        async with aiodist.publisher(small.CHANNEL, address=coordinator.address) as out:
            await trainer._step(out)
            assert out.newest == 11
    assert all(batch.taken.is_set() for batch in batches)
    assert "oldest batch 4 versions old, 1 dropped" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_the_demonstration(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "WORKERS", 3)
    await program.demonstrate(each=1)
    said = capsys.readouterr().out
    said = said[said.index("worker 0 is killed") :]
    said = said[said.index("worker 2 is added") :]
    said = said[said.index("the trainer is killed") :]
    assert re.search(r"^version \d+: reward", said, re.MULTILINE)


def test_wrong_words(program: Any) -> None:
    with pytest.raises(SystemExit, match=r"python examples/weights/rl.py"):
        program.main(["nonsense"])
