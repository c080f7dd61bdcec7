"""Files as a tree that a channel carries, and back. Pure.

A version of files is this tree. Programs may take it from the channel as well::

    {"files_of": 1, "id": the content as 16 bytes,
     "files": {name: {"crc": CRC-32 of the file, "bytes": array, "tensors": {name: array}}}}

The value "bytes" is a whole file, or the front of a safetensors file up to its first tensor. The
"tensors" are in the order of the file. So a file is "bytes" and, one behind the other, "tensors".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiodist_cli.files import names
from aiodist_cli.files.names import RefusedError

Flat: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

FORMAT = 1
"""What "files_of" is. It changes if older receivers would misread the tree."""

ID = 16
"""Bytes of the id of a content."""


class Source(NamedTuple):
    """A file: its `front` and its `tensors`, which follow it."""

    name: str
    front: Flat
    tensors: Mapping[str, Flat]

    @property
    def pieces(self) -> list[Flat]:
        """All of its bytes, in order."""
        return [self.front, *self.tensors.values()]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(piece.nbytes for piece in self.pieces)


class Version(NamedTuple):
    """A version of files: its `id`, the files, and the CRC-32 of each."""

    id: str
    files: Sequence[Source]
    checks: Mapping[str, int]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def id_of(files: Mapping[str, tuple[int, int]]) -> str:
    """The id of a content, by the size and the CRC-32 of each file: two contents with the same id
    are taken to be the same."""
    words = json.dumps(sorted((name, *about) for name, about in files.items()))
    return hashlib.blake2b(words.encode(), digest_size=ID).hexdigest()


def version_of(sources: Sequence[Source], checks: Mapping[str, int]) -> Version:
    """A version of these files."""
    return Version(
        id_of({one.name: (one.size, checks[one.name]) for one in sources}), sources, checks
    )


def tree_of(version: Version) -> dict[str, Any]:
    """What is published."""
    return {
        "files_of": FORMAT,
        "id": np.frombuffer(bytes.fromhex(version.id), np.uint8),
        "files": {
            one.name: {
                "crc": version.checks[one.name],
                "bytes": one.front,
                "tensors": dict(one.tensors),
            }
            for one in version.files
        },
    }


def version_in(tree: object, *, all_files: bool) -> Version:
    """The version that a tree is, which comes from a publisher that is not trusted. Raises
    RefusedError for any other tree, for names that are no plain relative paths, and without
    `all_files` for files that can run code.

    The sizes of files are those of arrays that are here, so no size is believed. Whether the bytes
    are those that the publisher read is known when their CRC-32 was computed.
    """
    match tree:
        case {"files_of": int(form), "id": np.ndarray(), "files": dict(files)}:
            if form != FORMAT:
                raise RefusedError(f"its files have the format {form}; this aiodist knows {FORMAT}")
        case _:
            raise RefusedError("it has no files: it was not published by `aiodist weights push`")
    found = [_source(name, about) for name, about in files.items()]
    checked = names.check_all(one[0].name for one in found)
    if not checked:
        raise RefusedError("it has no files")
    if not all_files:
        names.check_harmless(checked)
    sources = [source for source, _ in found]
    return version_of(sources, {source.name: check for source, check in found})


def _source(name: Any, about: Any) -> tuple[Source, int]:
    match about:
        case {"crc": int(check), "bytes": np.ndarray() as front, "tensors": dict(tensors)}:
            arrays = [front, *tensors.values()]
            if all(isinstance(one, np.ndarray) and one.flags.c_contiguous for one in arrays):
                return Source(names.check(name), front, tensors), check
    raise RefusedError(f"{names.check(name)!r} has no bytes, or what is no array among them")
