"""Files as a tree and back; what a publisher that is not trusted may send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist_cli.files import tree
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.reading import checked
from aiodist_cli.files.tree import Source

FRONT = np.frombuffer(b"front", np.uint8)
TENSORS = {"b": np.arange(6, dtype=np.uint16).reshape(2, 3), "a": np.zeros((0, 2), np.float32)}


def version(*sources: Source) -> tree.Version:
    return tree.version_of(sources, checked(list(sources), lambda _: None))


def given(**more: Any) -> dict[str, Any]:
    about = {"crc": 1, "bytes": FRONT, "tensors": TENSORS}
    return {"files_of": 1, "id": FRONT, "files": {"model.safetensors": about}} | more


def test_there_and_back() -> None:
    there = version(Source("model.safetensors", FRONT, TENSORS), Source("x.json", FRONT, {}))
    back = tree.version_in(tree.tree_of(there), all_files=False)
    assert back.id == there.id
    assert back.checks == there.checks
    assert {one.name: one.size for one in back.files} == {"model.safetensors": 17, "x.json": 5}
    assert back.size == 22
    for one, other in zip(back.files, there.files, strict=True):
        assert all(piece is same for piece, same in zip(one.pieces, other.pieces, strict=True))


def test_the_id_is_that_of_the_content() -> None:
    one = version(Source("a", FRONT, {}), Source("b", FRONT[:2], {}))
    assert one.id == version(Source("b", FRONT[:2], {}), Source("a", FRONT, {})).id
    others = [
        version(Source("a", FRONT, {})),
        version(Source("a", FRONT[:2], {}), Source("b", FRONT, {})),
        version(Source("a", FRONT[::-1].copy(), {}), Source("b", FRONT[:2], {})),
    ]
    assert len({one.id, *(other.id for other in others)}) == 4


@pytest.mark.parametrize(
    "evil",
    [
        None,
        [],
        {"w": FRONT},
        given(files_of=2),
        given(files_of="1"),
        given(id="x"),
        given(files={}),
        given(files=[1]),
        given(files={"../x": given()["files"]["model.safetensors"]}),
        given(files={7: given()["files"]["model.safetensors"]}),
        given(files={"x": None}),
        given(files={"x": {"crc": "1", "bytes": FRONT, "tensors": {}}}),
        given(files={"x": {"crc": 1, "bytes": b"x", "tensors": {}}}),
        given(files={"x": {"crc": 1, "bytes": FRONT, "tensors": [FRONT]}}),
        given(files={"x": {"crc": 1, "bytes": FRONT, "tensors": {"a": 7}}}),
        given(files={"x": {"crc": 1, "bytes": FRONT[::2], "tensors": {}}}),
        given(files={"x": {"crc": 1, "tensors": {}}}),
    ],
)
def test_what_is_no_version_of_files_is_refused(evil: Any) -> None:
    with pytest.raises(RefusedError):
        tree.version_in(evil, all_files=True)


def test_code_is_taken_only_if_it_is_asked_for() -> None:
    evil = given(files={"modeling.py": {"crc": 1, "bytes": FRONT, "tensors": {}}})
    with pytest.raises(RefusedError, match=r"modeling.py can run code"):
        tree.version_in(evil, all_files=False)
    assert tree.version_in(evil, all_files=True).files[0].name == "modeling.py"
