"""Which names of files may travel. Pure.

A receiver writes files under names that a publisher chose. It checks each of them, because it does
not trust the publisher. The publisher checks them as well, because an error is seen there first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

LONGEST_NAME = 255
"""Most bytes of one part of a path: the limit of most file systems."""

LONGEST_PATH = 1024
"""Most bytes of a whole path."""

MOST_FILES = 16384
"""Most files of a version."""

CODE = frozenset(
    {
        *(".py", ".pyc", ".pyd", ".pyi", ".pyo", ".pyw", ".pyx", ".so", ".dll", ".dylib", ".exe"),
        *(".sh", ".bat", ".cmd", ".ps1", ".js", ".jar"),
    }
)
"""Suffixes of files that programs run."""

PICKLES = frozenset(
    {
        *(".pickle", ".pkl", ".p", ".pt", ".pth", ".pt2", ".ckpt", ".bin", ".joblib", ".dill"),
        *(".npy", ".npz", ".h5", ".keras"),
    }
)
"""Suffixes of files that can run code when they are loaded: pickles, and formats that may hold
them."""


class RefusedError(ValueError):
    """What a publisher wants written, or a user wants published, is refused. The text says why."""


def check(name: object) -> str:
    """The name if it is a plain relative path. Raises RefusedError, which says what is wrong."""
    if not isinstance(name, str):
        raise RefusedError(f"{name!r} is no name of a file")
    if not name or len(name.encode("utf-8", "replace")) > LONGEST_PATH:
        raise RefusedError(f"{name[:80]!r}: the name of a file has 1 to {LONGEST_PATH} bytes")
    # This refuses NUL, line ends, escape sequences of terminals, and surrogates.
    if not name.isprintable() or "\\" in name or ":" in name:
        raise RefusedError(f"{name!r} has a backslash, a colon or a character that is not printed")
    for part in name.split("/"):
        if not part or part.startswith(".") or part.endswith(".") or part != part.strip():
            raise RefusedError(
                f"{name!r} is no plain relative path: no part of it may be empty, begin or end with"
                " a dot, or begin or end with a space"
            )
        if len(part.encode()) > LONGEST_NAME:
            raise RefusedError(f"{name[:80]!r}: a part of a path has at most {LONGEST_NAME} bytes")
    return name


def check_all(names: Iterable[object]) -> list[str]:
    """Those names, if all are plain relative paths that no file system takes for the same one.
    Raises RefusedError."""
    checked: list[str] = []
    files: dict[str, str] = {}
    for name in names:
        checked.append(check(name))
        if len(checked) > MOST_FILES:
            raise RefusedError(f"a version has at most {MOST_FILES} files")
        folded = _folded(checked[-1])
        if folded in files:
            raise RefusedError(f"{name!r} and {files[folded]!r} are one file on some file systems")
        files[folded] = checked[-1]
    folders: dict[str, str] = {}
    for name in checked:
        for folder in list(PurePosixPath(name).parents)[:-1]:
            spelled = folders.setdefault(_folded(str(folder)), str(folder))
            if spelled != str(folder):
                raise RefusedError(f"the folders of {name!r} and of {spelled!r} differ by case")
    for both in folders.keys() & files.keys():
        raise RefusedError(f"{files[both]!r} is a file and a folder")
    return checked


def _folded(name: str) -> str:
    """The name as a file system sees it that ignores case and the form of characters."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def runs_code(name: str) -> bool:
    """Whether a file of that name is code, or can run code when it is loaded. Such files travel
    with ``--all-files`` only."""
    suffixes = {suffix.casefold() for suffix in PurePosixPath(name).suffixes[-1:]}
    return bool(suffixes & (CODE | PICKLES))


def check_harmless(names: Iterable[str]) -> None:
    """Raises RefusedError if any of these files can run code."""
    if found := [name for name in names if runs_code(name)]:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise RefusedError(
            f"{', '.join(found[:3])}{more} can run code when loaded. If you trust the publisher,"
            " pass --all-files to push and to pull"
        )
