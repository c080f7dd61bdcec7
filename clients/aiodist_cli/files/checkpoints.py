"""Which checkpoint of a folder is to be published, and whether it is complete. Pure: listings of
folders and the time come in, decisions go out.

A trainer does not tell when all files of a checkpoint are written. So a checkpoint is complete when
every shard that its index names is there and no file has changed for `SETTLED` seconds.
`aiodist_cli.files.reading` checks as well that each safetensors file is as long as its header says.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import NamedTuple

from aiodist_cli.files import names
from aiodist_cli.files.names import RefusedError

SETTLED = 2.0
"""Seconds without a change after which a checkpoint is taken to be written."""

INDEXES = (".safetensors.index.json", ".bin.index.json")
"""How the names of indexes of shards end."""

TENSORS = ".safetensors"
"""How the name of a file of tensors ends."""


class State(NamedTuple):
    """What the file system says of a file: if none of this changes, the file has not changed.
    `size` in bytes, `changed` in nanoseconds, `node` is the inode. `is_file` is False for links and
    for devices, which do not travel."""

    size: int
    changed: int
    node: int
    is_file: bool = True


Listing = Mapping[str, State]
"""The files of a folder and of those in it, by their paths relative to it."""


class IncompleteError(ValueError):
    """A checkpoint is not complete. The text says what is missing."""


def shards(index: str, text: str | bytes) -> list[str]:
    """The files that an index of shards names, as paths relative to the folder that `index` is
    relative to. Raises RefusedError for a shard outside the folder, IncompleteError for a text that
    is no index (it may be half written)."""
    try:
        found = {*json.loads(text)["weight_map"].values()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise IncompleteError(f"{index} is no index of shards: {error!r}") from None
    folder = posixpath.dirname(index)
    return sorted(posixpath.join(folder, names.check(shard)) for shard in found)


def check_complete(listing: Listing, indexes: Mapping[str, str | bytes]) -> None:
    """Raises IncompleteError if a shard is missing that one of `indexes` (texts by name) names."""
    for index, text in sorted(indexes.items()):
        for shard in shards(index, text):
            if shard not in listing:
                raise IncompleteError(f"{shard} is missing, which {index} names")


def chosen(listing: Listing, *, all_files: bool) -> tuple[list[str], list[str]]:
    """The files that travel, and those that are left out because they can run code. Raises
    RefusedError for a name that cannot travel, for a link, and if nothing is left."""
    checked = names.check_all(sorted(listing))
    for name in checked:
        if not listing[name].is_file:
            raise RefusedError(f"{name} is a link, or no file; push a copy of what it leads to")
    left_out = [] if all_files else [name for name in checked if names.runs_code(name)]
    taken = [name for name in checked if name not in {*left_out}]
    if not taken:
        names.check_harmless(left_out)
        raise RefusedError("there are no files")
    return taken, left_out


def travelling(listing: Listing, *, all_files: bool) -> Listing:
    """The part of a listing that travels; all of it if there is none, to say why it does not."""
    if all_files:
        return listing
    return {name: state for name, state in listing.items() if not names.runs_code(name)} or listing


def candidates(listing: Listing) -> list[str]:
    """The folders that may be the checkpoint, relative to the one that was listed.

    That is the listed folder itself (""). If it has no tensors, but folders in it have some, these
    are the candidates, the last one changed first.
    """
    folders: dict[str, int] = {}
    for name in listing:
        folder, _, rest = name.partition("/")
        if not rest and name.endswith((TENSORS, *INDEXES)):
            return [""]
        if rest and "/" not in rest and rest.endswith((TENSORS, *INDEXES)):
            folders[folder] = last_change(within(listing, folder))
    return sorted(folders, key=lambda folder: (-folders[folder], folder)) or [""]


def last_change(listing: Listing) -> int:
    """When the last one of these files was changed, in nanoseconds."""
    return max((state.changed for state in listing.values()), default=0)


def within(listing: Listing, folder: str) -> dict[str, State]:
    """The part of a listing that is in `folder`, relative to that."""
    if not folder:
        return dict(listing)
    return {
        name.removeprefix(f"{folder}/"): state
        for name, state in listing.items()
        if name.startswith(f"{folder}/")
    }


class Watch:
    """Decides which checkpoints of a folder are worth a closer look, by listings that are given to
    it one after the other."""

    def __init__(self, settled: float = SETTLED) -> None:
        self._settled = settled
        self._seen: dict[str, tuple[Listing, float]] = {}
        self._done: tuple[str, Listing] | None = None

    def look(self, now: float, listing: Listing) -> list[str]:
        """The folders of `candidates` that are newer than what was `done` last, and have not
        changed for long enough, the best one first. `now` in seconds of any clock."""
        before, self._seen = self._seen, {}
        found: list[str] = []
        for folder in candidates(listing):
            files = within(listing, folder)
            last, since = before.get(folder, (None, now))
            since = since if last == files else now
            self._seen[folder] = files, since
            if files and self._is_newer(folder, files) and now - since >= self._settled:
                found.append(folder)
        return found

    def _is_newer(self, folder: str, files: Listing) -> bool:
        if self._done is None:
            return True
        name, done = self._done
        if folder == name:
            return files != done
        # A checkpoint that was deleted does not make the one before it the newest.
        return last_change(files) > last_change(done)

    def done(self, folder: str) -> None:
        """`folder`, as it was last seen, was published, or cannot be: it is of no interest until it
        changes."""
        self._done = folder, self._seen[folder][0]
