"""A character model that members train by DiLoCo, and the table and plot of the demonstration."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiodist

pytestmark = pytest.mark.timeout(240)  # torch is slow to import on a busy machine

FOLDER = Path(__file__).parents[2] / "examples" / "diloco"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"diloco_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program, with a small model, on a small text."""
    program = load("train")
    for name, value in {"TEXT": "to be or not to be " * 40, "HIDDEN": 8, "EVERY": 4}.items():
        monkeypatch.setattr(program, name, value)
    threads = program.torch.get_num_threads()
    program.torch.set_num_threads(1)
    yield program
    program.torch.set_num_threads(threads)


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_members_learn_together_and_another_joins(
    train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    learners = [train.Learner(0.0, seed) for seed in range(3)]
    shown: list[float] = []
    enough = asyncio.Event()
    wanted = 0

    def show(steps: float, own: float) -> None:
        shown.append(steps)
        if len(shown) >= wanted:
            enough.set()

    async def until(count: int) -> None:
        nonlocal wanted
        wanted = count
        enough.clear()
        await enough.wait()

    learners[0].show = show
    learners[1].show = learners[2].show = lambda steps, own: None
    async with aiodist.Coordinator() as coordinator, asyncio.TaskGroup() as tasks:

        def begin(number: int, *, join: bool) -> asyncio.Task[None]:
            given = argparse.Namespace(
                address=coordinator.address, name=f"{number}", join=join, quorum=2, grace=60.0,
                fragments=2, int8=number < 0,
            )  # fmt: skip
            return tasks.create_task(train.diloco(learners[number], given))

        both = [begin(0, join=False), begin(1, join=False)]
        await until(3)
        assert shown[:3] == [2.0, 4.0, 4.0]  # of each fragment, the first round has half the steps
        third = begin(2, join=True)
        while shown[-1] <= 4.0:
            await until(len(shown) + 1)
        for task in [*both, third]:
            task.cancel()
    del learners[0].show
    learners[0].show(8.0, 4.0)
    train.Learner(0.0, 0).show(0.0, 0.0)
    learned, fresh = said(capsys)
    assert learned["steps"] == 8.0
    assert learned["loss"] < fresh["loss"]


@pytest.mark.parametrize(("way", "least", "most"), [("diloco", 0.7, 1.0), ("gradients", 0.1, 0.5)])
def test_goodput_with_a_straggler_and_a_kill(
    train: Any, way: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "train", train)
    monkeypatch.setenv("AIODIST_TRANSPORTS", "tcp")
    goodput = load("goodput")
    monkeypatch.setattr(goodput, "EVERY", 20.0)
    monkeypatch.setattr(train, "EVERY", 20)
    assert [life.number for life in goodput.lives(50.0, calm=False)] == [1, 0, 0, 1, 2, 3]
    assert len(goodput.lives(50.0, calm=True)) == 4
    run = goodput.Run("", False, getattr(goodput, f"by_{way}"), 2)
    assert least < run.go(50.0) < most


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    demo = load("demo")
    demo.PACE = 0.05
    calm, other = demo.Run("DiLoCo, calm", calm=True), demo.Run("DDP")
    calm.said = [(1.0, 40.0, 3.0), (2.0, 40.0, 2.5)]
    assert calm.row(1.0, 40.0).split() == ["DiLoCo,", "calm", "80", "100%", "2.500", "3.000"]
    assert other.row(1.0, 40.0).split() == ["DDP", "0", "0%", "nan", "nan"]
    demo.plot([calm, other], 3.0, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "one is killed" in text
    assert "DiLoCo, calm" in text
