"""Handwritten digits, and a network of two layers in numpy: what `goodput.py` trains by default.

The warm process imports this, so that a member that it forks has all of it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

RATE = 0.1
BATCH, HIDDEN = 32, 32

# The images of scikit-learn, without its code: a process that has it takes long to die.
spec = importlib.util.find_spec("sklearn")
assert spec is not None and spec.submodule_search_locations is not None
folder = Path(spec.submodule_search_locations[0], "datasets", "data")
rows = np.loadtxt(folder / "digits.csv.gz", delimiter=",")
IMAGES, LABELS = rows[:, :-1] / 16, np.eye(10)[rows[:, -1].astype(int)]


def start() -> np.ndarray:
    """The weights to begin with, flat."""
    return np.random.default_rng(0).normal(0, 0.1, 74 * HIDDEN)


def gradient(weights: np.ndarray, step: int, rank: int) -> tuple[np.ndarray, float]:
    """The gradient of one member's batch, flat, and its loss. The batch depends on the step and the
    rank alone."""
    batch = np.random.default_rng((step, rank)).integers(0, len(IMAGES), BATCH)
    images, labels = IMAGES[batch], LABELS[batch]
    first = weights[: 64 * HIDDEN].reshape(64, HIDDEN)
    second = weights[64 * HIDDEN :].reshape(HIDDEN, 10)
    hidden = np.tanh(images @ first)
    scores = hidden @ second
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    guesses = scores / scores.sum(axis=1, keepdims=True)
    wrong = (guesses - labels) / BATCH
    back = (wrong @ second.T) * (1 - hidden**2)
    loss = -float(np.log(guesses[labels == 1] + 1e-12).mean())
    return np.concatenate([(images.T @ back).ravel(), (hidden.T @ wrong).ravel()]), loss
