"""Histories of the store, for checkers that others wrote: ``make histories N=100``.

Records N histories under kills and restarts of the coordinator, in virtual time, writes each in the
format of Knossos to a folder, and has Spin judge them, if Spin is installed (``apt-get install
spin``).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from exports import edn
from recording import record
from spin import IS_HERE, is_linearizable


def main() -> int:
    """Run the command. Returns its exit status: 1 if a history is not linearizable."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=100, help="how many histories")
    parser.add_argument("--to", type=Path, default=Path("build/histories"), help="the folder")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # because the coordinator is lost all the time
    options.to.mkdir(parents=True, exist_ok=True)
    begin, calls, open_calls, wrong = time.monotonic(), 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.n):
            ops = record(seed)
            calls += len(ops)
            open_calls += sum(op.ended is None for op in ops)
            (options.to / f"{seed}.edn").write_text(edn(ops))
            if IS_HERE and not is_linearizable(ops, Path(folder)):
                wrong.append(seed)
    print(
        f"{options.n} histories of {calls} calls, {open_calls} of them without an answer, in"
        f" {time.monotonic() - begin:.0f} s: {options.to}/*.edn, for Knossos"
    )
    if not IS_HERE:
        print("not judged: Spin is not installed (apt-get install spin), or there is no gcc")
        return 0
    print(f"judged by Spin: {options.n - len(wrong)} are linearizable, not so: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
