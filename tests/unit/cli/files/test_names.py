"""Which names of files may travel."""

from __future__ import annotations

import posixpath
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiodist_cli.files import names
from aiodist_cli.files.names import RefusedError

PLAIN = [
    "model-00001-of-00002.safetensors",
    "config.json",
    "tokenizer/vocab.txt",
    "a b/Ünïcode.gguf",
    "no_suffix",
]
EVIL = [
    "", "/etc/passwd", "../x", "a/../../x", "a/./x", "a//x", "a/", "..", ".", ".aiodist.json",
    ".git/hooks/x", "a/.ssh", "C:\\x", "a\\b", "c:x", "nul\0", "line\nend", "\x1b[31m", "\udc80",
    "\u202etxt", " x", "x ", "x.", "a./x", "x" * 256, "/".join(["abcdefg"] * 129), 7, None, b"x",
]  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names(name: str) -> None:
    assert names.check(name) == name


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_evil_names(name: object) -> None:
    with pytest.raises(RefusedError):
        names.check(name)


@given(st.text(max_size=40) | st.text("ab./\\~ \0:", max_size=12))
@example("a/b")
def test_what_is_accepted_stays_in_the_folder(name: str) -> None:
    try:
        names.check(name)
    except RefusedError:
        return
    path = posixpath.join("/base", name)
    assert posixpath.normpath(path) == path
    assert path.startswith("/base/")
    assert "\\" not in name
    assert "\0" not in name
    assert not any(part.startswith(".") for part in name.split("/"))


@pytest.mark.parametrize(
    "both",
    [
        ("A.json", "a.json"),
        ("a.json", "a.json"),
        ("ﬁle", "file"),
        (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
        ("x", "x/y"),
        ("X", "x/y"),
        ("d/x", "D/y"),
    ],
    ids=ascii,
)
def test_names_that_some_file_systems_take_for_one(both: tuple[str, str]) -> None:
    for pair in (both, both[::-1]):
        with pytest.raises(RefusedError):
            names.check_all(pair)
    assert names.check_all(["d/x", "d/y", "e/x"]) == ["d/x", "d/y", "e/x"]


def test_the_number_of_files_is_bounded() -> None:
    with pytest.raises(RefusedError, match="at most"):
        names.check_all(map(str, range(names.MOST_FILES + 1)))


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("modeling.py", True),
        ("MODELING.PY", True),
        ("pytorch_model.bin", True),
        ("d.d/optimizer.pt", True),
        ("x.py.json", False),
        ("model.safetensors", False),
        ("model.gguf", False),
        ("py", False),
    ],
)
def test_what_can_run_code(name: str, runs: bool) -> None:
    assert names.runs_code(name) is runs
    if runs:
        with pytest.raises(RefusedError, match="--all-files"):
            names.check_harmless(["a", name])
