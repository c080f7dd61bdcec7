"""The suite of devices on a GPU, with several processes on it: ``make gpu``."""

from __future__ import annotations

from typing import Any

import device_suite
import pytest

import aiodist


def why_not() -> str:
    """Why there is nothing to test here; "" where there is."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", device_suite.PROGRAMS, ids=lambda program: program.__name__)
def test_cuda(program: Any, size: int) -> None:
    assert aiodist.run(program, size, ("cuda",)) == [None] * size
