"""Places in trees of values."""

from __future__ import annotations

from aiodist.buffers.paths import Path


def test_a_place_reads_as_python_does() -> None:
    assert str(Path(Path("value", "a"), 3)) == "value['a'][3]"
    assert str(Path("x", b"k")) == "x[b'k']"
