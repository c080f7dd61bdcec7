"""The conformance suite on every codec, and the suite itself."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from aiodist.codecs import Codec, bf16, int4, int8, topk
from aiodist.codecs.base import Bytes, Floats
from aiodist.testing import CodecConformance


class TestBf16(CodecConformance):
    def codec(self) -> Codec:
        return bf16()


class TestInt8(CodecConformance):
    def codec(self) -> Codec:
        return int8()


class TestInt8OfOddBlocks(CodecConformance):
    def codec(self) -> Codec:
        return int8(block=77, error_feedback=True)


class TestInt4(CodecConformance):
    def codec(self) -> Codec:
        return int4()


class TestInt4OfOddBlocks(CodecConformance):
    def codec(self) -> Codec:
        return int4(block=5)


class TestTopk(CodecConformance):
    def codec(self) -> Codec:
        return topk(0.01)


class TestTopkOfHalf(CodecConformance):
    def codec(self) -> Codec:
        return topk(0.5)


class Zipped(Codec):
    """A codec of another kind: of any length, and exact."""

    name = "zipped"

    def nbytes(self, count: int) -> int:
        return 4 * count + 64 if count else 0

    def encode(self, values: Floats, out: Bytes) -> int:
        if not values.size:
            return 0
        data = zlib.compress(values.tobytes(), 1)
        out[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def decode(self, data: Bytes, out: Floats) -> None:
        unzip = zlib.decompressobj()
        try:
            values = unzip.decompress(data.tobytes(), out.nbytes + 1) if out.size else data
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if len(values) != out.nbytes:
            raise self.refuse(data, out.size)
        out[:] = np.frombuffer(values, "<f4")


class TestZipped(CodecConformance):
    def codec(self) -> Codec:
        return Zipped()


class WritesTooMuch(Zipped):
    def encode(self, values: Floats, out: Bytes) -> int:
        return super().encode(values, out) + 1000


class Remembers(Zipped):
    last = 0.0

    def encode(self, values: Floats, out: Bytes) -> int:
        if values.size:
            values, self.last = values + np.float32(self.last), float(values[0])
        return super().encode(values, out)


class ChangesValues(Zipped):
    def encode(self, values: Floats, out: Bytes) -> int:
        values *= 2
        return super().encode(values, out)


class LeavesSome(Zipped):
    def decode(self, data: Bytes, out: Floats) -> None:
        super().decode(data, values := np.empty_like(out))
        np.copyto(out, values, where=values > 0)


class Trusts(Zipped):
    def decode(self, data: Bytes, out: Floats) -> None:
        values = zlib.decompress(data.tobytes()) if out.size else b""
        out[:] = np.frombuffer(values, "<f4")


class Hides(Zipped):
    def encode(self, values: Floats, out: Bytes) -> int:
        return super().encode(np.nan_to_num(values), out)


class Enlarges(Zipped):
    def decode(self, data: Bytes, out: Floats) -> None:
        super().decode(data, out)
        out *= 3


@pytest.mark.parametrize(
    ("codec", "test"),
    [
        (WritesTooMuch, CodecConformance.test_it_writes_within_its_bytes_and_leaves_the_values),
        (ChangesValues, CodecConformance.test_it_writes_within_its_bytes_and_leaves_the_values),
        (LeavesSome, CodecConformance.test_it_writes_every_value_and_leaves_the_bytes),
        (
            Remembers,
            CodecConformance.test_the_same_values_give_the_same_bytes_whatever_came_between,
        ),
        (LeavesSome, CodecConformance.test_the_same_bytes_give_the_same_bits),
        (Enlarges, CodecConformance.test_finite_values_stay_finite_and_come_nearer_than_zeros),
        (Hides, CodecConformance.test_what_is_not_finite_is_not_hidden),
        (Trusts, CodecConformance.test_bytes_that_are_no_coded_values),
    ],
)
def test_the_suite_finds_codecs_that_are_wrong(codec: type[Codec], test: object) -> None:
    class Suite(CodecConformance):
        def codec(self) -> Codec:
            return codec()

    assert callable(test)
    with pytest.raises((AssertionError, ValueError, zlib.error)):
        test(Suite())
