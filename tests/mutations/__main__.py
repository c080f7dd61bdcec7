"""Whether the tests find faults: ``make mutations N=200``.

Makes N small faults in the library, one at a time, chosen at random (`--seed`), and runs the tests
on each, up to the first that fails: the unit tests of the same room; then all whose ranks share one
process and that execute the line of the fault, the quickest first; then all. A fault that none
finds is a hole in the tests, unless it changes nothing that anybody could see.

Which tests execute which lines is recorded before, once for a state of the tree. Works on a copy of
the tree. What was found is written to a file after each fault, and a run that is started again with
the same file goes on from there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import executed
from copies import ROOT, Copy
from mutants import Mutant, mutants

INSIDE = ("unit", "simulation", "conformance", "collectives", "scenarios", "device")
"""Tests most of whose ranks share one process: of them it is known which lines they execute."""

Chosen = tuple[str, Mutant]


def choose(count: int, seed: int, folder: str) -> list[Chosen]:
    """`count` faults of the files below `folder`: each fault that there is, is as likely."""
    found = [
        (str(path.relative_to(ROOT)), mutant)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for mutant in mutants(path.read_text())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def near(file: str) -> list[str]:
    """Folders of tests that are about the room of `file`."""
    room = Path(file).relative_to("aiodist").parts[0].removesuffix(".py")
    return [path for path in (f"tests/unit/{room}", f"tests/{room}") if (ROOT / path).exists()]


def verdict(
    copy: Copy, file: str, mutant: Mutant, record: executed.Executed, options: argparse.Namespace
) -> dict[str, object]:
    source = (ROOT / file).read_text()
    copy.write(file, mutant.apply(source))
    begin, found, stage = time.monotonic(), "", 0
    folders, more, limit = near(file), options.pytest, options.limit
    stages = [
        lambda: copy.test([*more, *folders], limit) if folders else "",
        lambda: copy.test_in_turn(record.tests(file, mutant.line), more, limit),
        lambda: copy.test([*more, "tests"], limit),
    ]
    try:
        while stage < options.stages and not found:
            found = stages[stage]()
            stage += 1
    finally:
        copy.write(file, source)
    seconds = round(time.monotonic() - begin, 1)
    return {"file": file, "fault": str(mutant), "found": found, "stage": stage, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in", dest="folder", default="aiodist", help="where")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for each run of pytest")
    parser.add_argument(
        "--stages", type=int, default=3, help="1: unit tests of the room alone; 2: no others"
    )
    parser.add_argument("--results", type=Path, default=ROOT / ".mutations.json")
    parser.add_argument("pytest", nargs="*", help="after --: more options for pytest")
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    if options.results.exists():
        results = json.loads(options.results.read_text())
    known = {(one["file"], one["fault"]) for one in results}
    record = executed.Executed(options.results.with_suffix(".executed"))
    if options.stages > 1:
        record.record(ROOT, [f"tests/{name}" for name in INSIDE])
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for file, mutant in choose(options.n, options.seed, options.folder):
            if (file, str(mutant)) in known:
                continue
            one = verdict(copy, file, mutant, record, options)
            results.append(one)
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"{one['seconds']:6} s  {file} {mutant}: {one['found'] or 'NOT FOUND'}", flush=True
            )
    count = Counter(bool(one["found"]) for one in results)
    print(f"{count[True]} of {count.total()} faults were found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
