"""Collectives other than all_reduce, done within their calls: among ranks that go the ordinary way,
ranks that give up, and ranks that die."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from aiodist.engine.executor import ALL
from aiodist.prepared.lane_express import LaneExpress
from aiodist.prepared.lane_reductions import LaneRecipe
from aiodist.shared_memory.board import AREAS, CROWDED_SMALL, SMALL


@pytest.fixture
def ends(monkeypatch):
    """How often a prepared collective was done within its call (True), and how often not."""
    seen: Counter[tuple[str, bool]] = Counter()

    real = LaneExpress._fused

    def bound(express, recipe, area):
        run = real(express, recipe, area)
        name = "reductions" if isinstance(recipe, LaneRecipe) else "values"

        def counting(given):
            done = run(given)
            seen[name, done == ALL] += 1
            return done

        recipe.tapes = (None, None)  # the compiled part would not come by here
        recipe.at_once[area] = counting
        return counting

    monkeypatch.setattr(LaneExpress, "_fused", bound)
    return seen


def some_calls(lanes, chance, size, *, cancels):
    """A few kinds, again and again."""
    kinds, lengths = chance.sample(lanes.PREPARED, 3), [3, 3, chance.choice([1, 2500])]
    root = chance.randrange(size)
    calls = []
    for number in range(20):
        number = number * size + (root if chance.random() < 0.8 else chance.randrange(size))
        gives_up = cancels and chance.random() < 0.1
        canceller = chance.randrange(size) if gives_up else None
        calls.append(lanes.Call(number, chance.choice(kinds), chance.choice(lengths), canceller))
    return calls


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.sample(2)
def test_any_interleaving(lanes, ends, polls, cancels):
    for seed in range(40):
        chance = random.Random(seed)
        size = chance.choice([2, 2, 3, 4, 5])
        world = lanes.World(size, lanes.Chance(seed), polls=polls)
        calls = some_calls(lanes, chance, size, cancels=cancels)
        users = lanes.Users(world, calls, awaits=chance.random() < 0.8)
        users.run()
        users.check()
    for name in ("values", "reductions"):
        assert ends[name, True] > 20
        assert ends[name, False] > 20


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 16), marks=pytest.mark.long)])
def test_large_arrays_of_more_ranks_than_cores(lanes, seeds):
    """They go through the small areas by turns, so that nobody waits until all have read what is of
    the operation before."""
    length = SMALL // 8 + 1
    for seed in seeds:
        chance = random.Random(f"large {seed}")
        size = chance.choice([3, 4])
        world = lanes.World(size, lanes.Chance(seed), polls=chance.random() < 0.5)
        calls = [
            lanes.Call(
                number,
                chance.choice(["express", "express", "reduce", "broadcast"]),
                chance.choice([3, length, length]),
                chance.randrange(size) if seed % 2 and chance.random() < 0.1 else None,
            )
            for number in range(10)
        ]
        users = lanes.Users(world, calls, awaits=chance.random() < 0.5)
        users.run()
        users.check()
        assert {context.calls.lane.by_turns for context in world.contexts} == {CROWDED_SMALL}
        start, nbytes = AREAS[2]
        assert all(not any(memory[start : start + nbytes]) for memory in world.memories)


def test_a_rank_that_dies(lanes, ends):
    """What is under way completes with the right values or fails; what is called later fails."""
    failed = 0
    for seed in range(60):
        chance = random.Random(f"dies {seed}")
        size = chance.choice([2, 3, 4])
        world = lanes.World(size, lanes.Chance(seed), polls=chance.random() < 0.5)
        users = lanes.Users(world, some_calls(lanes, chance, size, cancels=False), awaits=True)
        dead = chance.randrange(size)
        users.go(chance.randrange(40, 160))
        world.kill(dead)
        world.tell_of(dead)
        users.run()
        failed += users.check_without(dead)
    assert failed > 60
    assert ends["values", True] > 20
    assert ends["reductions", True] > 20
