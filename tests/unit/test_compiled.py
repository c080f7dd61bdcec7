"""The compiled part: which one is used, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from aiodist import compiled
from aiodist.transports.surroundings import running_loop
from aiodist.work import Work

built = pytest.mark.skipif(compiled.core is None, reason=compiled.reason)
HALVES = np.arange(1 << 16, dtype="<u2")
FLOATS = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype="<u4").view("<f4")


def found(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> tuple[Any, str]:
    monkeypatch.setitem(sys.modules, "aiodist._core", module)
    return compiled._found()


def test_which_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIODIST_CORE", raising=False)
    other = ModuleType("aiodist._core")
    other.LAYOUT = compiled.LAYOUT  # type: ignore[attr-defined]
    assert found(monkeypatch, other) == (other, "")
    assert found(monkeypatch, None)[1].endswith(
        "Install both (Debian: gcc, python3-dev), then install aiodist again"
    )
    other.LAYOUT = -1  # type: ignore[attr-defined]
    assert found(monkeypatch, other) == (
        None,
        f"it is of another version (-1, not {compiled.LAYOUT}): install aiodist again",
    )
    other.LAYOUT = compiled.LAYOUT  # type: ignore[attr-defined]
    monkeypatch.setenv("AIODIST_CORE", "python")
    assert found(monkeypatch, other) == (None, "AIODIST_CORE=python")


@built
def test_it_refuses_what_would_read_or_write_beyond_an_array() -> None:
    core = compiled.core
    assert core is not None
    kernel = core.find("SUM", "bfloat16")
    x, out = np.zeros(8, "<u2"), np.zeros(8, "<u2")
    for operands, into, which in (
        ([x, x[:7]], out, kernel),
        ([x, x], out[:7], kernel),
        ([x.view("<u1")[:8]], out, kernel),
        ([x], out.view("<u4"), kernel),
        ([np.zeros(16, "<u2")[::2]], out, kernel),
        ([], out, kernel),
        ([x], out, 10_000),
        ([x], out, -1),
    ):
        with pytest.raises((ValueError, BufferError)):
            core.reduce(which, operands, into, 2)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        core.reduce(kernel, [x, x], out, 2)
    for arguments in ((), (kernel, x), (kernel, 5, out, 2), ("SUM", [x], out, 2)):
        with pytest.raises(TypeError):
            core.reduce(*arguments)
    assert core.find("SUM", "float8_e5m2") is None


@built
def test_it_refuses_versions_that_differ_in_size_and_too_little_room() -> None:
    core = compiled.core
    assert core is not None
    old, now = np.zeros(1000, "<u2"), np.arange(1000, dtype="<u2")
    gaps, values = np.empty(1007, np.uint8), np.empty(1000, "<u2")
    assert core.differ(old, now, gaps, values) == (999, 999)
    assert core.differ(old, now, gaps, values[:999]) == (999, 999)
    assert core.differ(old, now, gaps, values[:998]) is None
    assert core.differ(old, old, gaps[:7], values[:0]) == (0, 0)
    odd = np.empty(8, [("a", "<u2"), ("b", "u1")])
    for arguments in (
        (old, now[:999], gaps, values),
        (old.view(np.uint8)[:-1], now.view(np.uint8)[:-1], gaps, values),
        (old, now, gaps[:1002], values),
        (old[:9], now[:9], gaps, odd),
        (old, now, gaps, np.empty(8, "V0")),
        (old[::2], now[::2], gaps, values),
    ):
        with pytest.raises((ValueError, BufferError)):
            core.differ(*arguments)
    values.flags.writeable = False
    for arguments in ((old, now, gaps, values), (old, now, gaps), (5, now, gaps, now.copy())):
        with pytest.raises((TypeError, ValueError, BufferError)):
            core.differ(*arguments)


@built
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_is_loaded_and_rounded_as_by_numpy(dtype: str) -> None:
    """All of 16 bits; and sums that have to be rounded, in all parts of the range."""
    kernels = importlib.import_module("aiodist.buffers.kernels")
    core = compiled.core
    assert core is not None
    lone = core.find("PRODUCT", dtype)
    out = np.empty_like(HALVES)
    core.reduce(lone, [HALVES], out, 1)
    if dtype == "bfloat16":  # a NaN is made a quiet one
        expected = np.where((HALVES & 0x7FFF) > 0x7F80, HALVES | 0x40, HALVES)
    else:
        expected = HALVES
    np.testing.assert_array_equal(out, expected)
    # Differences of neighbours of a float32 in the narrow dtype: sums between two of its values.
    rng = np.random.default_rng(1)
    a, b, c = (rng.permutation(HALVES) for _ in range(3))
    narrow = kernels.carrier(dtype)
    kernel = kernels.Kernel(kernels.ReduceOp.SUM, dtype)
    kernel.compiled = None
    operands = [each.view(narrow) for each in (a, b, c)]
    reference = np.empty(len(a), narrow)
    kernel.reduce(operands, reference, 3)
    core.reduce(core.find("SUM", dtype), operands, out, 3)
    bound = 0x7F80 if dtype == "bfloat16" else 0x7C00
    numbers = (reference.view("<u2") & 0x7FFF) <= bound  # of two NaNs numpy keeps either
    np.testing.assert_array_equal(out[numbers], reference.view("<u2")[numbers])
    assert (((out & 0x7FFF) > bound) == ~numbers).all()


def test_the_running_loop_of_each_thread_and_each_run() -> None:
    async def is_found() -> bool:
        here = asyncio.get_running_loop()
        elsewhere = await asyncio.to_thread(running_loop)
        other = await asyncio.to_thread(asyncio.run, asyncio.sleep(0, "it ran"))
        return running_loop() is here and elsewhere is None and other == "it ran"

    for _ in range(3):
        assert running_loop() is None
        assert asyncio.run(is_found())
    assert running_loop() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_forked_child_runs_no_loop() -> None:
    async def child() -> int:
        assert running_loop() is asyncio.get_running_loop()
        pid = os.fork()
        if not pid:
            os._exit(running_loop() is not None)
        return pid

    _, status = os.waitpid(asyncio.run(child()), 0)
    assert os.waitstatus_to_exitcode(status) == 0


@built
def test_it_awaits_instances_of_classes_that_add_methods_alone() -> None:
    class Larger(Work[int]):
        __slots__ = ("more",)

    for cls in (Larger, 3):
        with pytest.raises(TypeError, match="adds methods alone"):
            compiled.core.await_natively(cls)
