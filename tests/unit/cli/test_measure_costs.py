"""A profile of costs from what plans took: the choices are those of the costs behind the times."""

from __future__ import annotations

import asyncio

import pytest

import aiodist
from aiodist.schedules.choose_reductions import Shape, choose_all_reduce
from aiodist.schedules.costs import ONE_HOST_TCP, Costs, parse, written
from aiodist.schedules.selection import MARGIN
from aiodist_cli import measure_costs
from aiodist_cli.measure_costs import DEAR, LOWEST, SIZES, Sample, error_of, fit

KIB, MIB = 1024, 1024 * 1024

NETWORKS = {
    "as built in": ONE_HOST_TCP,
    "ten times slower": Costs(*[10 * seconds for seconds in ONE_HOST_TCP]),
    "far": ONE_HOST_TCP._replace(alpha=0.02),
    "narrow": ONE_HOST_TCP._replace(beta=2e-8),
    "far and narrow": Costs(2e-3, 1e-4, 5e-5, 2e-5, 1e-8, 1e-10),
}


def samples(costs: Costs, sizes: tuple[int, ...] = (2, 4, 8)) -> list[Sample]:
    """Exactly what plans take where messages cost this."""
    tallies = {
        choose_all_reduce(Shape(nbytes // 4, 4, 4), size, prices).tally._replace(connections=0)
        for size in sizes
        for nbytes in SIZES
        for prices in [ONE_HOST_TCP._replace(**{name: dear}) for name, dear in DEAR.items()]
    }
    return [Sample(tally, tally.seconds(costs)) for tally in sorted(tallies)]


@pytest.mark.parametrize("costs", NETWORKS.values(), ids=list(NETWORKS))
def test_what_is_chosen_costs_little_more_than_the_best(costs: Costs) -> None:
    """Less than the margin by which another than the first algorithm has to be better."""
    found = fit(samples(costs), costs.connection)
    assert error_of(found, samples(costs)) < 0.05
    assert found.alpha == pytest.approx(costs.alpha, rel=0.2)
    for size in (2, 8, 16, 64, 128):
        for nbytes in (64 * KIB + 8, 256 * KIB, MIB, 64 * MIB):
            x = Shape(nbytes // 4, 4, 4)
            chosen, best = (choose_all_reduce(x, size, prices) for prices in (found, costs))
            assert chosen.seconds(costs) < MARGIN * best.seconds(costs)


def test_the_built_in_constants_are_found_exactly() -> None:
    assert fit(samples(ONE_HOST_TCP), 1e-5) == pytest.approx(
        ONE_HOST_TCP._replace(connection=1e-5), rel=1e-6
    )


def test_what_samples_do_not_show_is_no_less_than_a_tenth_of_what_is_built_in() -> None:
    """Two ranks run one algorithm alone, and here all take the same, whatever they send."""
    found = fit([one._replace(seconds=0.1) for one in samples(ONE_HOST_TCP, (2,))], 0.0)
    for name in ("alpha", "frame", "grant", "beta", "gamma"):
        assert getattr(found, name) >= LOWEST * getattr(ONE_HOST_TCP, name) * (1 - 1e-9)
    assert parse(written(found)) == found


def test_ranks_measure_what_they_can_be_given(run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(measure_costs, "SIZES", SIZES[:2])
    file = tmp_path / "costs.toml"

    async def main() -> None:
        async with aiodist.local(3, transports="tcp") as groups:
            first, *others = await asyncio.gather(*map(measure_costs.profile, groups))
            assert others == ["", ""]
        file.write_text(first)
        async with aiodist.local(2, costs=file) as groups:
            assert {group._context.costs for group in groups} == {parse(first)}

    run(main())


def test_a_file_that_cannot_be_written_is_told_before_the_measuring(
    run, monkeypatch, tmp_path
) -> None:
    async def main() -> None:
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            monkeypatch.setenv("AIODIST_ADDRESS", coordinator.address)
            monkeypatch.setenv("AIODIST_SIZE", "1")
            with pytest.raises(SystemExit, match=f"there is no folder {tmp_path}/absent"):
                await measure_costs.main(tmp_path / "absent" / "costs.toml")

    run(main())


def test_a_single_rank_can_measure_nothing(run) -> None:
    async def main() -> None:
        async with aiodist.local(1) as (group,):
            with pytest.raises(SystemExit, match="expected at least 2"):
                await measure_costs.profile(group)

    run(main())
