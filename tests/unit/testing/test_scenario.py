"""What seeds stand for."""

from __future__ import annotations

from aiodist.testing.scenario import scenario

SEEDS = range(60)


def test_a_seed_stands_for_one_scenario() -> None:
    assert scenario(7) == scenario(7)
    assert scenario(7) != scenario(8)


def test_all_that_it_names_is_there() -> None:
    for found in map(scenario, SEEDS):
        steps = {step.number for step in found.steps}
        assert steps == set(range(len(found.steps)))
        for named in (found.cancels, found.hurries, found.wrongs):
            assert steps.issuperset(named)
        assert {number for _, number in found.pauses} <= steps
        ranks = set(range(found.size))
        assert ranks.issuperset([*found.cancels.values(), *found.wrongs.values()])
        assert all(ranks.issuperset((one.victim, one.other)) for one in found.disasters)
        assert all(ranks.issuperset((one.src, one.dst)) for one in found.mail.messages)
        for child in found.children:
            assert len(child.colors) == found.size
            assert child.steps.keys() >= {color for color in child.colors if color is not None}


def test_seeds_differ_in_what_they_try() -> None:
    found = [scenario(seed) for seed in SEEDS]
    assert {one.size for one in found} == {2, 3, 4, 5, 7}
    assert {one.durable for one in found} == {True, False}
    assert any(one.wrongs for one in found) and any(not one.cancels for one in found)


def test_up_to_three_disasters_happen() -> None:
    """As the documentation says."""
    assert {len(scenario(seed).disasters) for seed in SEEDS} == {0, 1, 2, 3}
