"""Sizes, cases and statistics of `aiodist bench`."""

from __future__ import annotations

import pytest

from aiodist_cli.bench_cases import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    Case,
    Result,
    Summary,
    cases_of,
    format_bandwidth,
    format_seconds,
    format_size,
    iterations_for,
    parse_size,
    parse_sizes,
    ratio,
    turn,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8B", 8), (" 64 KiB ", 65536), ("1mib", 1 << 20), ("2GiB", 2 << 30)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8", "'8' is no size: expected such as 8B"),
        ("1MB", "'1MB' is no size"),
        ("", "'' is no size"),
        ("-8B", "'-8B' is no size"),
        ("6B", "'6B' is no size of a float32 array: expected a multiple of 4 bytes"),
        ("0B", "expected a multiple of 4 bytes"),
        ("4MiB..1MiB", "'4MiB..1MiB' is no range: expected the smaller size first"),
        ("8B,,1MiB", "'' is no size"),
    ],
)
def test_what_is_no_size_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_sizes(text)
    assert problem in str(error.value)


def test_ranges_double() -> None:
    mib = 1 << 20
    assert parse_sizes("8B,64KiB,1MiB..8MiB") == [8, 65536, mib, 2 * mib, 4 * mib, 8 * mib]
    assert parse_sizes("3MiB..20MiB") == [3 * mib, 6 * mib, 12 * mib]
    assert parse_sizes("1MiB..1MiB,1MiB") == [mib]


@pytest.mark.parametrize("text", ["8 B", "1020 B", "64 KiB", "1 MiB", "1 GiB", "1536 MiB"])
def test_sizes_read_as_they_were_written(text: str) -> None:
    assert format_size(parse_size(text)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9e-6, "0.90 µs"),
        (1.054e-6, "1.05 µs"),
        (54.14e-6, "54.1 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (17.84e-3, "17.8 ms"),
        (2.0, "2.00 s"),
        (float("nan"), "–"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bandwidths_have_three_digits() -> None:
    assert [format_bandwidth(rate) for rate in (40_000, 8e6, 12.44e9)] == [
        "40.0 kB/s",
        "8.00 MB/s",
        "12.4 GB/s",
    ]


@pytest.mark.parametrize(
    ("op", "nbytes", "ranks", "problem"),
    [
        ("all_reduec", 8, 2, "there is no operation 'all_reduec' to measure: expected one of all_"),
        ("all_reduce", 8, 1, "1 ranks cannot communicate: expected at least 2"),
        (
            "all_to_all",
            8,
            4,
            "all_to_all of 8 B cannot be split among 4 ranks: expected a multiple",
        ),
        ("reduce_scatter", 20, 2, "expected a multiple of 8 bytes"),
    ],
)
def test_cases_that_make_no_sense(op: str, nbytes: int, ranks: int, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        Case(op, nbytes, ranks)
    assert problem in str(error.value)


def test_cases_are_operations_by_sizes() -> None:
    cases = cases_of(["all_reduce", "ping_pong"], [8, 1024], 2)
    assert list(map(str, cases)) == [
        "all_reduce 8 B, n=2",
        "all_reduce 1 KiB, n=2",
        "ping_pong 8 B, n=2",
        "ping_pong 1 KiB, n=2",
    ]


def test_summary() -> None:
    summary = Summary.of([1000 * value for value in range(200, 0, -1)])
    assert summary == Summary(200, 100.5e-6, 198e-6, pytest.approx(100.5e-6))
    assert str(summary) == "100 µs (198 µs, 100 µs)"


def test_p99_of_few_samples_is_the_worst() -> None:
    assert Summary.of([3, 1, 2]).p99 == 3e-9
    assert Summary.of([*range(99), 1000]).p99 == 98e-9
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


def test_ratio_compares_medians_of_one_case() -> None:
    case, other = Case("all_reduce", 8, 2), Case("all_reduce", 8, 4)
    results = [
        Result(case, "aiodist", Summary(1, 2e-6, 9, 9)),
        Result(case, "gloo", Summary(1, 5e-6, 1, 1)),
        Result(case, "openmpi", None, "it died"),
        Result(other, "mpich", Summary(1, 1, 1, 1)),
    ]
    assert ratio(results, case, "gloo", "aiodist") == pytest.approx(2.5)
    assert ratio(results, case, "openmpi", "aiodist") is None
    assert ratio(results, case, "mpich", "aiodist") is None
    assert results[0].bandwidth == pytest.approx(4e6)
    assert results[2].bandwidth is None
    assert results[2].as_json() == {
        "op": "all_reduce",
        "nbytes": 8,
        "ranks": 2,
        "fill": False,
        "column": "openmpi",
        "error": "it died",
    }


def test_blocks_have_a_sensible_number_of_iterations() -> None:
    assert iterations_for(0.2, 0.001) == 200
    assert iterations_for(0.2, 0.0) == MAX_ITERATIONS
    assert iterations_for(0.2, 3.0) == MIN_ITERATIONS


def test_each_column_starts_some_round() -> None:
    orders = [turn("abc", number) for number in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert turn([], 3) == []
