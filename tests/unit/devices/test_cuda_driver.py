"""`devices/driver.py` against a library with the functions of the CUDA driver's manual."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist.devices import driver

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# The declarations are those of cuda.h, with its typedefs written out.
SOURCE = r"""
#include <stddef.h>
#include <string.h>
typedef int CUresult; typedef int CUdevice; typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct { char reserved[64]; } CUipcMemHandle;
int depth = 0, closed = 0;
CUresult cuInit(unsigned int flags) { return flags ? 1 : 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "not now"; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 40; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  if (device != 43) return 101;
  *context = (CUcontext)0x7000000000ull; return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  depth++; return context == (CUcontext)0x7000000000ull ? 0 : 201; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { depth--; *context = 0; return 0; }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  if (depth != 1) return 201;
  *base = pointer & ~0xfffffull; *size = 6ull << 32; return 0; }
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
  if (attribute != 7 || pointer < 0x100000) return 1;
  *(unsigned long long *)data = pointer >> 20; return 0; }
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
  if (depth != 1) return 201;
  memset(handle->reserved, 0x5a, 64); memcpy(handle->reserved, &pointer, 8); return 0; }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
  if (depth != 1 || flags != 1 || handle.reserved[63] != 0x5a) return 1;
  memcpy(pointer, handle.reserved, 8); *pointer += 1ull << 40; return 0; }
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  if (depth != 1) return 201;
  closed += pointer == (1ull << 40) + 0x7f0012300000ull; return 0; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    assert COMPILER is not None
    (tmp_path / "cuda.c").write_text(SOURCE)
    made = tmp_path / "libcuda.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", made, tmp_path / "cuda.c"], check=True, timeout=60
    )
    loaded = ctypes.CDLL(str(made))

    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return loaded

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    driver._library.cache_clear()
    yield loaded
    driver._library.cache_clear()


def test_calls(library: ctypes.CDLL) -> None:
    context = driver.PrimaryContext(3)
    number, base, nbytes = context.allocation(0x7F0012345678)
    assert (number, base, nbytes) == (0x7F00123, 0x7F0012300000, 6 << 32)
    assert context.number(base) == number and context.number(12) is None
    handle = context.export(base)
    assert len(handle) == driver.HANDLE_BYTES
    pointer = context.open(handle)
    assert pointer == (1 << 40) + base
    context.close(pointer)
    assert ctypes.c_int.in_dll(library, "closed").value == 1
    with pytest.raises(OSError, match=r"cuIpcOpenMemHandle_v2: not now \(CUresult 1\)"):
        context.open(bytes(64))
    assert ctypes.c_int.in_dll(library, "depth").value == 0
    with pytest.raises(OSError, match="cuDevicePrimaryCtxRetain"):
        driver.PrimaryContext(0)
