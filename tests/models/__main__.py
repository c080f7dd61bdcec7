"""The membership protocol and channels of weights as models, judged by Spin: ``make models``.

Every state of each model is looked at, for some small sizes. Then one rule at a time is left out of
the model, and Spin has to find that. Needs Spin and gcc (``apt-get install spin``).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from channel_model import CHANNEL
from checking import IS_HERE, Model, check
from membership_model import MEMBERSHIP


def judge(model: Model, folder: Path) -> bool:
    """Print what Spin says of a model. Returns whether it holds and each fault is found."""
    is_right = True
    for size in model.sizes:
        begin = time.monotonic()
        verdict = check(model, size, folder)
        is_right &= verdict.error is None
        print(
            f"{size}: {verdict.error or 'holds'}, {verdict.states} states,"
            f" {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    for fault, (meaning, size) in model.faults.items():
        verdict = check(model, size, folder, fault)
        is_right &= verdict.error is not None
        print(f"{meaning}: {verdict.error or 'NOT FOUND'}", flush=True)
    return is_right


def main() -> int:
    """Run the command. Returns its exit status: 1 if a model is wrong or misses a fault."""
    if not IS_HERE:
        print("nothing was checked: Spin is not installed (apt-get install spin), or no gcc is")
        return 0
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        for model in (CHANNEL, MEMBERSHIP):
            print(f"{model.file}:", flush=True)
            is_right &= judge(model, Path(folder))
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
