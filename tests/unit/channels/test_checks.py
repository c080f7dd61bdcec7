"""One check, whatever computes it."""

from __future__ import annotations

import importlib
import sys
import zlib

import pytest

from aiodist.channels import checks


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_check_is_crc_32_whatever_is_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    try:
        crc32 = importlib.reload(checks).crc32
        if not is_installed:
            assert crc32 is zlib.crc32
        for data in (b"", b"a", bytes(range(256)) * 1000):
            assert crc32(data) == crc32(memoryview(data)) == zlib.crc32(data)
    finally:
        monkeypatch.undo()
        importlib.reload(checks)
