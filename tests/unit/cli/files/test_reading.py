"""Files are read as they are: safetensors by their tensors, others as bytes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_cli.files import reading
from aiodist_cli.files.checkpoints import IncompleteError
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.tree import Source

SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "F16": 2}

TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 255),
    ),
    max_size=6,
)


def tensors_file(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file; the library checks that it is one when it is read."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, fill) in tensors.items():
        nbytes = int(np.prod(shape, dtype=int)) * SIZES[dtype]
        offsets = [len(data), len(data) + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += bytes((fill + at) % 2 for at in range(nbytes))
    front = json.dumps(header).encode()
    return len(front).to_bytes(8, "little") + front + data


def read(folder: Path, *chosen: str) -> list[Source]:
    files = reading.listing(folder)
    return reading.sources(folder, files, list(chosen) or sorted(files))


def content(source: Source) -> bytes:
    return b"".join(piece.tobytes() for piece in source.pieces)


@given(tensors=TENSORS)
def test_safetensors_are_what_they_were(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, list[int], int]]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    data = tensors_file(tensors)
    (folder / "model.safetensors").write_bytes(data)
    [source] = read(folder)
    assert content(source) == data
    assert source.size == len(data)
    assert source.tensors.keys() == tensors.keys()
    for name, (dtype, shape, _) in tensors.items():
        array = source.tensors[name]
        assert not array.flags.writeable
        if array.size:
            assert array.itemsize == SIZES[dtype]
            assert array.shape == tuple(shape)


def test_any_other_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.gguf").write_bytes(b"GGUF" * 100)
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("x")
    files = read(tmp_path)
    assert {one.name: content(one) for one in files} == {
        "empty": b"",
        "sub/model.gguf": b"GGUF" * 100,
    }
    told: list[int] = []
    checks = reading.checked(files, told.append)
    assert checks == {"empty": 0, "sub/model.gguf": reading.crc32(b"GGUF" * 100)}
    assert sum(told) == 400


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, -1])
def test_a_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    data = tensors_file({"a": ("BF16", [3, 2], 7)})
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(IncompleteError, match="no whole safetensors file"):
        read(tmp_path)


def test_a_shard_is_missing_or_elsewhere(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(IncompleteError, match=r"model-1.safetensors is missing"):
        read(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../../model-1.safetensors"}}))
    with pytest.raises(RefusedError, match="no plain relative path"):
        read(tmp_path)


def test_a_file_that_changes_after_it_was_listed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    files = reading.listing(tmp_path)
    path.write_bytes(b"22")
    with pytest.raises(IncompleteError, match="x changed"):
        reading.sources(tmp_path, files, ["x"])


def test_links_are_listed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "ck" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "ck" / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "ck" / "pipe")
    files = reading.listing(tmp_path / "ck")
    assert {name: state.is_file for name, state in files.items()} == {
        "link": False,
        "folder": False,
        "pipe": False,
    }
    with pytest.raises(OSError, match="symbolic link"):
        reading.sources(tmp_path / "ck", files, ["link"])


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert [*reading.listing(tmp_path / "model.gguf")] == ["model.gguf"]


def test_a_writer_waits_until_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        pytest.skip("this file system has no leases")
    finally:
        os.close(fd)
    files = read(tmp_path)
    writes = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            os.open(path, writes)
        assert content(files[0]) == b"GGUF"
    files.clear()
    os.close(os.open(path, writes))
    assert path.read_bytes() == b""
