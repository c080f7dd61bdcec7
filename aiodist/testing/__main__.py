"""``python -m aiodist.testing simulate``: random programs of simulated ranks, seed by seed."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence

from aiodist.testing.scenario import scenario
from aiodist.testing.simulation import HangError, InvariantError
from aiodist.testing.virtual_loop import DeadlockError
from aiodist.testing.workload import Run

COMMAND = "python -m aiodist.testing simulate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, or 1 if an invariant did not hold for a seed."""
    options = _parser().parse_args(arguments)
    before = logging.root.manager.disable
    if not options.verbose:
        logging.disable(logging.CRITICAL)  # because ranks are lost all the time
    try:
        return _simulate(options)
    finally:
        logging.disable(before)


def _simulate(options: argparse.Namespace) -> int:
    started = time.monotonic()
    seeds = failed = completed = faults = 0
    virtual = 0.0
    for seed in options.seeds:
        if options.seconds is not None and time.monotonic() - started >= options.seconds:
            break
        seeds += 1
        run = Run(scenario(seed))
        problems = play(run)
        completed += run.completed
        faults += len(run.scenario.disasters) + len(run.scenario.cancels)
        virtual += run.simulation.loop.time()
        if options.verbose:
            print(f"{run.scenario}\n  {run.completed} done, {run.failed} failed")
            print(f"  history {run.simulation.history.digest()}")
            for entry in run.simulation.history.entries:
                print(f"    {entry}")
        if problems:
            failed += 1
            print(f"{run.scenario}\n  FAILED: {problems}\n  replay: {COMMAND} --seeds {seed} -v")
            if failed >= options.most_failures:
                break
    print(
        f"{seeds} seeds in {time.monotonic() - started:.1f} s: {completed} collectives were "
        f"completed and right in {virtual:.0f} s of virtual time, with {faults} faults and "
        f"cancels; the invariants did not hold for {failed} seeds"
    )
    return 1 if failed else 0


def play(run: Run) -> str:
    """Play a run. Returns what must not have happened, or ""."""
    try:
        run.play()
    except (HangError, DeadlockError, InvariantError) as error:
        return str(error)
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aiodist.testing", description="Tools for testing with aiodist."
    )
    commands = parser.add_subparsers(required=True)
    simulate = commands.add_parser(
        "simulate",
        help="random programs of ranks on a simulated network, checked",
        description="Run random programs of ranks on a simulated network, in virtual time, while "
        "ranks are killed, stopped and cut off; check that whatever completes is right, and that "
        "nothing hangs. A seed always does the same.",
        epilog=f"example: {COMMAND} --seeds 0: --seconds 3600",
    )
    simulate.add_argument(
        "--seeds",
        type=_seeds,
        default=range(100),
        metavar="A:B",
        help="seeds A to B-1; A: all from A on, until --seconds are over; A: that one (0:100)",
    )
    simulate.add_argument(
        "--seconds", type=float, help="start no further seed after so many seconds"
    )
    simulate.add_argument(
        "--most-failures", type=int, default=10, metavar="N", help="stop after N (10)"
    )
    simulate.add_argument(
        "-v", "--verbose", action="store_true", help="print programs and histories, and logs"
    )
    return parser


def _seeds(text: str) -> Iterator[int] | range:
    first, colon, last = text.partition(":")
    if not first.isdigit() or (last and not (last.isdigit() and int(first) < int(last))):
        raise argparse.ArgumentTypeError(f"seeds are A:B, A: or A, not {text!r}")
    if not colon:
        return range(int(first), int(first) + 1)
    return range(int(first), int(last)) if last else itertools.count(int(first))


if __name__ == "__main__":
    sys.exit(main())
