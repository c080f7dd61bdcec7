"""What `all_at_once`, `in_steps` and the compiled part do in one go is what the executor does step
by step."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds import seeds

import aiodist
from aiodist import ReduceOp, compiled
from aiodist.collectives import reductions
from aiodist.engine import executor
from aiodist.prepared import lane_express
from aiodist.prepared.lane_express import LaneExpress
from aiodist.prepared.lane_reductions import LaneRecipe
from aiodist.shared_memory.board import AREAS, STAMP

LIBRARY = Path(aiodist.__file__).parent

CALLS: list[tuple[Any, Any]] = [
    (ReduceOp.SUM, "f8"), (ReduceOp.SUM, "f4"), (ReduceOp.AVG, "f4"), (ReduceOp.SUM, "f2"),
    (ReduceOp.MAX, "i4"), (ReduceOp.BXOR, "u8"), (ReduceOp.LOR, "?"), (ReduceOp.PRODUCT, "c16"),
    (ReduceOp.premul_sum(0.5), "f8"),
]  # fmt: skip


def written(world: Any) -> list[bytes]:
    """The words of all ranks, and of their areas all that the calls below may write."""
    starts = [0, *(start for start, _ in AREAS)]
    shown = [memory[at : at + 200_000] for memory in world.memories for at in starts]
    return [hashlib.blake2b(part, digest_size=16).digest() for part in shown]


def watching(world: Any, rank: int) -> Any:
    """A `Progress.watch` that lets the others go on meanwhile. Nothing comes over links to `rank`,
    and its loop does not turn, for all of it is within a call."""
    watches: list[bool] = []

    def watch(board: Any, peers: Any, stamp: int, *, crowded: bool) -> bool:
        if not watches:
            watches.append(True)
            while events := [each for each in world.events() if each[-1] != rank]:
                world.do(events[0])
            watches.clear()
        return board.reached(peers, stamp)

    return watch


def outcome(
    lanes: Any, size: int, seed: int, monkeypatch: Any, *, way: str, lengths: list[int]
) -> Any:
    """Calls in some order; what is in the memory of all ranks after each of them, and what the
    users have. `way`: "steps", "python", "tape", or all that is compiled."""
    taken: list[int] = []

    def counted(fused: Any) -> Any:
        def make(phase: Any, lane: Any, area: int) -> Any:
            run = fused(phase, lane, area)
            return lambda x: taken.append(run(x)) or taken[-1]

        return make

    prepare = LaneExpress._prepare

    def unmarked(self: Any, op: str, call: bytes, phase: Any, vector: Any, keeps: Any) -> Any:
        recipe = prepare(self, op, call, phase, vector, keeps)
        assert isinstance(recipe, LaneRecipe)
        one_round = recipe.phase.prepared.plan.publishes <= 2
        assert recipe.fused in (executor.all_at_once, executor.in_steps) or not one_round
        if way == "steps":
            recipe.fused = None
        elif way == "python" and recipe.fused:
            recipe.fused = counted(recipe.fused)
        return recipe

    def counted_tape(*args: Any, **more: Any) -> Any:
        tape = tape_of(*args, **more)
        return tape and (lambda x: taken.append(tape(x)) or taken[-1])

    monkeypatch.setattr(LaneExpress, "_prepare", unmarked)
    tape_of = lane_express.tape_of
    if way == "tape":
        monkeypatch.setattr(lane_express, "tape_of", counted_tape)
    elif way == "python":
        monkeypatch.setattr(lane_express, "tape_of", lambda *_, **__: None)
    world = lanes.World(size, lanes.Path([]), polls=True)
    for context in world.contexts:
        monkeypatch.setattr(context.endpoint.progress, "watch", watching(world, context.rank))
    chance = random.Random(seed)
    seen: list[Any] = []
    for number in range(6):
        op, dtype = chance.choice(CALLS)
        length = chance.choice(lengths)
        numbers = np.random.default_rng([seed, number])
        arrays = [(numbers.normal(size=length) * 9).astype(dtype) for _ in range(size)]
        order = chance.sample(range(size), size)
        gives_up = order[0] if chance.random() < 0.2 else None
        works = []
        for rank in order:
            context = world.contexts[rank]
            work = context.express.all_reduce(arrays[rank], op, math.inf)
            if work is None:  # the one before is not over here
                world.settle()
                work = context.express.all_reduce(arrays[rank], op, math.inf)
            if work is None:  # the one who gives up has said so by now
                call = reductions.all_reduce(context, arrays[rank], op, None)
                work = context.calls.launch(call.op, call.text, call.start)
            if rank == gives_up:
                work.cancel()
            works.append(work)
            seen += [*written(world), context.lane.moved.sent, context.lane.moved.received]
        world.settle()
        assert all(work.done() for work in works)
        seen += [work.cancelled() or repr(work.exception()) for work in works]
        seen += [array.tobytes() for array in arrays]
        seen += written(world)
    assert bool(taken) is (way in ("python", "tape"))
    if taken and size < 4:
        assert {2, executor.ALL} <= {*taken}
    if way == "compiled":
        assert compiled.core is not None
        recipes = [each for each in world.contexts[0].express._recipes.values() if each]
        runs = {type(run) for recipe in recipes for run in recipe.at_once.values()}
        assert compiled.core.Tape in runs
    return seen


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("lengths", [[1, 3, 2000, 8192], [131_073, 150_000]])
@pytest.mark.sample(5)
def test_they_leave_the_same(lanes, monkeypatch, size, seed, lengths):
    seen = []
    for way in ["steps", "python", *(["tape", "compiled"] if compiled.core else [])]:
        with monkeypatch.context() as patch:
            seen.append(outcome(lanes, size, seed, patch, way=way, lengths=lengths))
    assert all(each == seen[0] for each in seen)


def test_it_takes_few_calls_in_few_files(lanes):
    """All there is to read for who wants to know what a small all_reduce does."""
    world = lanes.World(2, lanes.Path([]), polls=True)
    for number in range(2):
        lanes.Call(number, "express", 1).start(world.contexts[0])
        lanes.Call(number, "express", 1).start(world.contexts[1])
        world.settle()
    other = world.contexts[1].lane.board.own
    other[STAMP] = 1 << 60  # it is there already, whatever is waited for
    files: set[str] = set()
    depth = deepest = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY):
            depth += {"call": 1, "return": -1}.get(event, 0)
            deepest = max(deepest, depth)
            files.add(path.name)

    x = np.ones(1)
    sys.setprofile(count)
    try:
        work = world.contexts[0].express.all_reduce(x, ReduceOp.SUM, math.inf)
    finally:
        sys.setprofile(None)
    assert work.done()
    assert len(files) <= 7, files  # and group.py, which has called
    assert deepest <= 7
