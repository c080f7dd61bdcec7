"""The membership protocol as a model, judged by Spin: ``make models``.

Every state of the model is looked at, for some small sizes. Then one rule at a time is left out of
the model, and Spin has to find that. Needs Spin and gcc (``apt-get install spin``).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from checking import FAULTS, IS_HERE, SIZES, check


def main() -> int:
    """Run the command. Returns its exit status: 1 if the model is wrong or misses a fault."""
    if not IS_HERE:
        print("nothing was checked: Spin is not installed (apt-get install spin), or no gcc is")
        return 0
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            begin = time.monotonic()
            verdict = check(size, Path(folder))
            is_wrong |= verdict.error is not None
            print(
                f"{size}: {verdict.error or 'holds'}, {verdict.states} states,"
                f" {time.monotonic() - begin:.0f} s",
                flush=True,
            )
        for fault, (meaning, size) in FAULTS.items():
            verdict = check(size, Path(folder), fault)
            is_wrong |= verdict.error is None
            print(f"{meaning}: {verdict.error or 'NOT FOUND'}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
