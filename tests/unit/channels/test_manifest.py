"""A version as one piece of memory."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiodist.buffers.encoding import encode
from aiodist.channels import manifest
from aiodist.channels.manifest import Into, Manifest, Writing, leaves, value_in
from aiodist.errors import ProtocolError

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]),
    hnp.array_shapes(min_side=0, max_side=9),
)
TREES = st.recursive(
    ARRAYS | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def written(value, version=1, before=0):
    """`before`: each byte of the memory had this value."""
    writing = Writing(encode(value), version)
    memory = memoryview(bytearray([before]) * writing.release.nbytes)
    return writing.write(memory), memory


def check(memory, release, part):
    start, stop = release.span(part)
    return zlib.crc32(memory[start:stop])


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(autouse=True, scope="module", params=[(48, 1), (128, 3), (1000, 8)])
def small_chunks(request):
    cached, cores = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "CHUNK", 128)
        patch.setattr(manifest, "SMALLEST", 128)
        patch.setattr(manifest, "CACHED", cached)
        patch.setattr(manifest, "cores", lambda: cores)
        yield


@pytest.mark.sample(2)
@settings(deadline=None)
@given(TREES)
def test_a_tree_comes_back(value):
    release, memory = written(value)
    read = Manifest.read(memory, release)
    assert same(value, value_in(memory, read, release.data))
    assert len(read.checks) == release.parts - 1
    for part in range(1, release.parts):
        assert check(memory, release, part) == read.checks[part - 1]


@pytest.mark.sample(2)
@settings(deadline=None)
@given(TREES)
def test_nothing_that_was_in_the_memory_before_stays(value):
    assert written(value, before=0) == written(value, before=255)


def test_leaves_are_named_by_their_keys():
    release, memory = written({"a": [np.ones(3), {"b": np.arange(100)}], "n": 5, 7: np.zeros(0)})
    found = leaves(Manifest.read(memory, release))
    assert [leaf.name for leaf in found] == ["a.0", "a.1.b", "7"]
    assert np.array_equal(found[1].read(memory, release.data), np.arange(100))
    assert not found[0].read(memory, release.data).flags.writeable


def test_into_is_checked_before_it_is_written():
    release, memory = written([np.ones(3), np.ones(4)])
    read = Manifest.read(memory, release)
    into = [np.zeros(3), np.zeros(5)]
    with pytest.raises(ValueError, match=r"into\[1\]"):
        Into(read, into)
    into[1] = np.zeros(8)[::2]  # of any strides
    Into(read, into).write(memory, release.data)
    assert same(into, [np.ones(3), np.ones(4)])


@pytest.mark.parametrize("at", [0, 50])
def test_a_damaged_manifest_is_noticed(at):
    release, memory = written([np.ones(3)])
    memory[min(at, release.manifest - 1)] ^= 1
    with pytest.raises(ProtocolError, match="the manifest of version 1 came damaged"):
        Manifest.read(memory, release)


def test_a_manifest_of_another_release_is_refused():
    release, memory = written([np.ones(100)])
    with pytest.raises(ProtocolError, match="no manifest of version 1"):
        Manifest.read(memory, replace(release, nbytes=release.nbytes + 4096))
    with pytest.raises(ProtocolError, match="bytes of arrays by its manifest"):
        Manifest.read(memory, replace(release, nbytes=release.nbytes - 1))
    junk = memoryview(bytearray(release.nbytes))
    with pytest.raises(ProtocolError, match="no manifest"):
        Manifest.read(junk, replace(release, check=zlib.crc32(bytes(release.manifest))))


def test_a_damaged_chunk_has_another_check():
    release, memory = written([np.arange(200)])
    read = Manifest.read(memory, release)
    memory[release.span(3)[0] + 5] ^= 64
    damaged = [
        part
        for part in range(1, release.parts)
        if check(memory, release, part) != read.checks[part - 1]
    ]
    assert damaged == [3]


@pytest.mark.sample(2)
@settings(deadline=None)
@given(TREES, st.data())
def test_what_is_lent_reads_as_what_is_copied(value, data):
    release, memory = written(value)
    lent_release, lent = Writing(encode(value), 1).lend()
    assert lent_release == replace(release, lent=True)
    assert lent.read(*release.span(0)) == memory[: release.manifest]
    start = data.draw(st.integers(release.data, release.nbytes))
    stop = data.draw(st.integers(start, release.nbytes))
    assert lent.read(start, stop) == memory[start:stop]
