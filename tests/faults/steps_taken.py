"""What members of a training write down of their steps, and the steps that led to the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

STEP = np.dtype(
    [("at", "f8"), ("epoch", "i8"), ("step", "i8"), ("size", "i8"), ("crc", "i8"), ("loss", "f8")]
)
"""What a member writes down of each step. `at`: seconds of the monotonic clock, which all processes
of a host share. `crc`: of the weights after the step."""


def whole(path: Path) -> bytes:
    """What a member wrote, without a last step that it was killed in."""
    data = path.read_bytes()
    return data[: len(data) // STEP.itemsize * STEP.itemsize]


def lineage(rows: np.ndarray) -> np.ndarray:
    """The steps that led to the model, in order, each as its first member wrote it down.

    If all members that had taken a step were killed, the others take it again, in a later epoch.
    Then the later one counts. Raises AssertionError if the members of a step do not agree, or if a
    step is missing.
    """
    rows = np.sort(rows, order=["step", "epoch", "at"])
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows["step"][1:] != rows["step"][:-1]) | (
        rows["epoch"][1:] != rows["epoch"][:-1]
    )
    for one in ("size", "crc", "loss"):
        differs = ~is_first[1:] & (rows[one][1:] != rows[one][:-1])
        assert not differs.any(), f"members do not agree: {rows[1:][differs][0]}"
    rows = rows[is_first]
    rows = rows[np.append(rows["step"][1:] != rows["step"][:-1], True)]
    assert (rows["step"] == np.arange(1, len(rows) + 1)).all(), "a step is missing"
    return rows
