"""Values with arrays that are not of the host, and what stands for arrays of others."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from aiodist.buffers import encoding
from aiodist.buffers.encoding import Encoded, encode
from aiodist.buffers.mapped import Mapped
from aiodist.buffers.paths import Where
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import fill, parse


class There:
    """An array of a device, as a `Giver` and `Taker` knows it, and a `Target`."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.value = self

    def stage(self) -> tuple[Any, Any]:
        return self.array.reshape(-1), None

    def commit(self, staged: Any) -> None:
        assert staged is None


class Device:
    """Gives and takes what is `There`."""

    def give(self, value: Any, where: Where) -> tuple[str, tuple[int, ...]] | None:
        return (value.array.dtype.name, value.array.shape) if self.is_foreign(value) else None

    def is_foreign(self, value: Any) -> bool:
        return isinstance(value, There)

    def take(self, spec: Spec, out: Any, where: Where) -> There | None:
        if out is None:
            return There(np.empty(spec.shape, spec.name)) if spec.kind == "device" else None
        return out if self.is_foreign(out) else None


HERE = np.arange(3.0)
VALUE = [There(np.arange(2)), HERE, There(np.empty(0)), 7, There(np.arange(4, dtype="f4"))]


def sent() -> Encoded:
    return encode(VALUE, foreign=Device())


def copies() -> list[memoryview]:
    return [memoryview(x.array).cast("B") for x in VALUE if isinstance(x, There)]


def test_what_is_elsewhere_comes_to_the_host() -> None:
    encoded = sent()
    assert (encoded.nbytes, encoded.elsewhere, encoded.gaps) == (24, 32, [0, 1, 1])
    joined = encoded.filled(copies())
    assert b"".join(joined) == b"".join(x.tobytes() for x in (np.arange(2), HERE, VALUE[4].array))
    assert (encoded.nbytes, len(encoded.buffers)) == (24, 1)  # nothing of it has changed
    encoded.fill(copies())
    assert encoded.buffers == joined
    assert (encoded.nbytes, encoded.elsewhere, encoded.gaps) == (56, 0, ())


@pytest.mark.parametrize("with_out", [False, True])
def test_it_goes_to_places_on_a_device(with_out: bool) -> None:
    encoded = sent()
    encoded.fill(copies())
    incoming = parse(encoded.meta)
    assert incoming.has_foreign
    out = [There(np.empty(2, int)), np.empty(3), There(np.empty(0)), 0, There(np.empty(4, "f4"))]
    incoming.allocate(out if with_out else None, foreign=Device())
    fill(incoming.buffers, b"".join(encoded.buffers))
    made = incoming.finish()
    assert made[3] == 7
    assert made[1].tolist() == HERE.tolist()
    for before, after in zip(VALUE, made, strict=True):
        if isinstance(before, There):
            assert after.array.tolist() == before.array.tolist()
    if with_out:
        assert [made[at] is out[at] for at in (0, 1, 2, 4)] == [True] * 4


class Once(Device):
    """Notes what it gives."""

    def __init__(self) -> None:
        self.given: list[There] = []

    def give(self, value: Any, where: Where) -> tuple[str, tuple[int, ...]] | None:
        found = super().give(value, where)
        if found is not None:
            self.given.append(value)
        return found


class Key(enum.IntEnum):
    A = 1


@pytest.mark.parametrize(
    "key", ["a", Key.A, 2**63, "\udcff", type("Text", (str,), {})("b"), (1, 2)]
)
@pytest.mark.parametrize("many", [0, 100])
def test_each_is_taken_out_once(key: Any, many: int) -> None:
    """Else the data of one array would come in place of another."""
    arrays = [There(np.ones(2)), There(np.ones(3))]
    device = Once()
    value = {"first": arrays[0], key: np.float32(1), "ints": [0] * many, "last": arrays[1]}
    encoded = encode(value, foreign=device)
    assert device.given == arrays
    assert [spec.shape for spec in encoded.specs] == [(2,), (3,)]
    with pytest.raises(TypeError, match="does not travel"):
        encode([arrays[0], object()], foreign=device)


def test_a_place_on_a_device_for_what_is_no_array() -> None:
    incoming = parse(encode([1, HERE]).meta)
    assert not incoming.has_foreign
    with pytest.raises(TypeError, match=r"out\[0\]: is .*, the incoming value is int"):
        incoming.allocate([There(HERE), np.empty(3)], foreign=Device())


def test_what_is_mapped_already() -> None:
    """Nothing is to come for it."""
    mapped = Mapped(HERE)
    target, staged = mapped.stage()
    assert (target.nbytes, staged) == (0, None)
    mapped.commit(staged)
    assert mapped.value is HERE


class Trimmed(dict[Any, Any]):
    """Known forms that another thread drops after this one has seen that there are too many."""

    def __len__(self) -> int:
        count = super().__len__()
        if count == encoding._KEPT:
            self.clear()
        return count


@pytest.mark.parametrize("kind", [dict, Trimmed])
def test_known_forms_go_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, kind: type[dict[Any, Any]]
) -> None:
    known = kind()
    monkeypatch.setattr(encoding, "_described", known)
    monkeypatch.setattr(encoding, "_KEPT", 2)
    metas = [encode(np.zeros(size)).meta for size in (1, 2, 3)]
    assert [shape for _, shape in known] == [(3,)]
    assert [encode(np.zeros(size)).meta for size in (1, 2, 3)] == metas
