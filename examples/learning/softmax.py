"""What is learned in this folder: handwritten digits, by one layer and a softmax, in plain numpy.

The 1797 images (8 x 8 pixels, from the UCI repository) come with scikit-learn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CLASSES, INPUTS = 10, 65
"""Digits; and pixels, with a 1 for the bias."""
BATCH, RATE = 64, 0.5
TESTED = 360
"""Images that nobody learns from."""


def load() -> tuple[Array, NDArray[np.int64]]:
    """The images as rows, pixels in 0..1, and which digits they show; in a random order."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(images))
    rows = np.hstack([images / 16, np.ones((len(images), 1))])
    return rows[order], digits[order]


def share(rank: int, size: int) -> tuple[Array, NDArray[np.int64]]:
    """The images that `rank` of `size` learns from."""
    images, digits = load()
    return images[TESTED:][rank::size], digits[TESTED:][rank::size]


def gradient(weights: Array, images: Array, digits: NDArray[np.int64], step: int) -> Array:
    """That of the mean cross-entropy over one batch, another one each step."""
    batch = np.random.default_rng(step).integers(0, len(images), BATCH)
    x, y = images[batch], digits[batch]
    scores = np.exp(x @ weights)
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(BATCH), y] -= 1
    return x.T @ scores / BATCH


def accuracy(weights: Array) -> float:
    """The share of the tested images that are recognised."""
    images, digits = load()
    return float((np.argmax(images[:TESTED] @ weights, axis=1) == digits[:TESTED]).mean())
