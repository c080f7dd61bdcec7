"""An array of a value that comes which is there already."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist.buffers.arrays import Flat

_NOTHING: Flat = np.empty(0, np.uint8)


class Mapped:
    """It lies in memory that is mapped here, and nothing is to come: a `Target`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def stage(self) -> tuple[Flat, Flat | None]:
        return _NOTHING, None

    def commit(self, staged: Flat | None) -> None:
        pass
