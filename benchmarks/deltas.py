"""What the difference between two versions of weights takes: ``python -m benchmarks.deltas``.

First, elements in bf16 of which a random share changes by one unit in the last place: bytes beside
the entropy of such a change, and the rate of one core. Then a transformer that is trained in bf16
with AdamW, as in reinforcement learning. Times are the least of all rounds, in processor time. It
needs torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from aiodist.channels.differences import Coded, decode, encode
from aiodist.channels.manifest import CHUNK

SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
"""Of elements that change."""

HIDDEN, LAYERS, TOKENS, LENGTH = 256, 2, 1024, 32
"""The transformer, and the random text that it learns."""


def entropy(share: float) -> float:
    """Bits of an element that changes by ±1 with this probability."""
    if not 0 < share < 1:
        return share
    return share * (1 - np.log2(share)) - (1 - share) * np.log2(1 - share)


def changed(base: Any, share: float, rng: np.random.Generator) -> Any:
    """`base` with a share of its elements one unit in the last place higher or lower."""
    step = rng.choice(np.array([1, -1], np.int16), len(base))
    return base + (step * (rng.random(len(base)) < share)).view(np.uint16)


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the processor that `work` takes, in the fastest round."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def coded(base: Any, new: Any, rounds: int) -> tuple[Coded, float, float]:
    """The difference of two chunks in bf16, and GB/s of the whole of encoding and decoding it."""
    old, now, out = base.view(np.uint8), new.view(np.uint8), np.empty(base.nbytes, np.uint8)
    difference = encode(old, now, 2)
    encoding = least(lambda: encode(old, now, 2), rounds)
    decoding = least(lambda: decode(difference.code, old, out), rounds)
    assert np.array_equal(out, now)
    return difference, len(old) / encoding / 1e9, len(old) / decoding / 1e9


def at_random(rounds: int) -> Iterator[str]:
    """A row for each of `SHARES`."""
    rng = np.random.default_rng(1)
    base = torch.from_numpy(rng.normal(0, 0.02, CHUNK // 2)).bfloat16().view(torch.uint16).numpy()
    for share in SHARES:
        (code, _), encoding, decoding = coded(base, changed(base, share, rng), rounds)
        least_bytes = entropy(share) / 16
        ratio = f"{len(code) / CHUNK / least_bytes:.2f}" if least_bytes else ""
        yield (
            f"| {share:.1%} | {len(code) / CHUNK:.2%} | {least_bytes:.2%} | {ratio}"
            f" | {encoding:.2f} | {decoding:.2f} |"
        )


def trained(rate: float, steps: int, seen: int) -> Iterator[tuple[Any, Any]]:
    """The parameters of the transformer in bf16 before and after each of the last `seen` steps of
    AdamW with this learning rate, all in one array."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(HIDDEN, 8, 4 * HIDDEN, 0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(TOKENS, HIDDEN),
        nn.TransformerEncoder(layer, LAYERS),
        nn.Linear(HIDDEN, TOKENS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text = torch.randint(TOKENS, (4, LENGTH + 1))

    def published() -> Any:
        parts = [one.detach().bfloat16().view(torch.uint16).flatten() for one in model.parameters()]
        return torch.cat(parts).numpy()

    before = published()
    for step in range(steps):
        optimizer.zero_grad()
        found = model(text[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(found, text[:, 1:].flatten()).backward()
        optimizer.step()
        if step >= steps - seen - 1:
            after = published()
            if step >= steps - seen:
                yield before, after
            before = after


def of_training(rate: float, steps: int, seen: int) -> str:
    """A row: what the versions of the last steps take."""
    whole = different = nbytes = 0
    for before, after in trained(rate, steps, seen):
        each = CHUNK // 2
        for at in range(0, len(after), each):
            old, now = before[at : at + each], after[at : at + each]
            found = encode(old.view(np.uint8), now.view(np.uint8), 2)
            nbytes += len(found.code)
            different += found.changed
            whole += now.nbytes
    return f"| {rate:g} | {different / whole:.2%} | {nbytes / whole:.2%} |"


def main() -> int:
    """Measure, and print tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deltas", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="of each case (default: 50)")
    parser.add_argument("--steps", type=int, default=100, help="of training (default: 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| elements changed | bytes | entropy | ratio | encode, GB/s | decode, GB/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in at_random(options.rounds):
        print(row, flush=True)
    print("\n| AdamW, learning rate | elements changed | bytes |\n| --- | --- | --- |")
    for rate in (1e-6, 1e-5):
        print(of_training(rate, options.steps, 3), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
