"""Whether the proofs find faults of the design: ``make mutations-protocol``.

Takes one rule of a protocol away at a time (`design_faults`), and runs the proofs that should find
that, up to the first that does. Works on a copy of the tree, so nothing in the library knows of it.
Prints a table: which proof has found which fault, and after how many seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from copies import ROOT, Copy
from design_faults import FAULTS, PROGRAMS, DesignFault

SEEDS = 100
"""How many random programs are tried."""
LIMIT = 600.0
"""Seconds that one proof may take. One that does not end has found the fault: it hangs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0 if each fault was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose text has one of these words")
    options = parser.parse_args(arguments)
    chosen = [
        one for one in FAULTS if not options.words or any(w in one.what for w in options.words)
    ]
    missed = 0
    print("| rule that is left out | found by | seconds |\n| --- | --- | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for fault in chosen:
            begin = time.monotonic()
            found = find(copy, fault)
            missed += not found
            seconds = time.monotonic() - begin
            print(f"| {fault.what} | {found or 'NOT FOUND'} | {seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} faults were found")
    return 1 if missed else 0


def find(copy: Copy, fault: DesignFault) -> str:
    """Return which proof finds the fault; "": none does."""
    source = (ROOT / fault.file).read_text()
    copy.write(fault.file, fault.apply(source))
    try:
        for proof in fault.proofs:
            found = _programs(copy) if proof == PROGRAMS else _tests(copy, proof)
            if found:
                return found
    finally:
        copy.write(fault.file, source)
    return ""


def _programs(copy: Copy) -> str:
    command = [sys.executable, "-m", "aiodist.testing", "simulate", "--most-failures", "1"]
    command += ["--seeds", f"0:{SEEDS}"]
    try:
        done = subprocess.run(
            command, cwd=copy.folder, env=copy.env, stdin=subprocess.DEVNULL, text=True,
            capture_output=True, check=False, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{PROGRAMS}: one hangs"
    if done.returncode == 0:
        return ""
    seeds = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("seed ")]
    return f"{PROGRAMS}, seed {seeds[0].rstrip(':')}" if seeds else f"{PROGRAMS}: one crashes"


def _tests(copy: Copy, proof: str) -> str:
    found = copy.test([proof], LIMIT)
    name = found.partition(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")
    file, _, test = name.partition("::")
    return f"`{Path(file).name}`: `{test.partition('[')[0]}`" if test else name


if __name__ == "__main__":
    sys.exit(main())
