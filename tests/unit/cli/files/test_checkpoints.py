"""Which checkpoint is published, and when it is complete: by listings and a clock of the test."""

from __future__ import annotations

import json

import pytest

from aiodist_cli.files import checkpoints
from aiodist_cli.files.checkpoints import IncompleteError, State, Watch
from aiodist_cli.files.names import RefusedError

INDEX = "model.safetensors.index.json"


def index(*shards: str) -> str:
    return json.dumps({"weight_map": {f"t{at}": shard for at, shard in enumerate(shards)}})


def files(*named: str, at: int = 1) -> dict[str, State]:
    return {name: State(10, at, 7) for name in named}


def test_all_shards_have_to_be_there() -> None:
    listing = files(INDEX, "a.safetensors")
    checkpoints.check_complete(listing, {INDEX: index("a.safetensors", "a.safetensors")})
    with pytest.raises(IncompleteError, match=r"b.safetensors is missing"):
        checkpoints.check_complete(listing, {INDEX: index("a.safetensors", "b.safetensors")})


@pytest.mark.parametrize("text", ["", '{"weight_map": {"t": "a', "[]", "7", '{"weight_map": 7}'])
def test_an_index_that_is_half_written(text: str) -> None:
    with pytest.raises(IncompleteError, match="is no index"):
        checkpoints.check_complete(files(INDEX), {INDEX: text})


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", 7])
def test_a_shard_outside_the_folder_is_refused(shard: str) -> None:
    with pytest.raises(RefusedError):
        checkpoints.check_complete(files(INDEX), {INDEX: index(shard)})


def test_what_is_chosen() -> None:
    listing = files("a.safetensors", "optimizer.pt", "modeling.py", "config.json")
    safe = ["a.safetensors", "config.json"]
    left = ["modeling.py", "optimizer.pt"]
    assert checkpoints.chosen(listing, all_files=False) == (safe, left)
    assert checkpoints.chosen(listing, all_files=True) == (sorted(listing), [])
    with pytest.raises(RefusedError, match="--all-files"):
        checkpoints.chosen(files("optimizer.pt"), all_files=False)
    with pytest.raises(RefusedError, match="no files"):
        checkpoints.chosen({}, all_files=True)
    with pytest.raises(RefusedError, match="link"):
        checkpoints.chosen({"a": State(1, 1, 1, is_file=False)}, all_files=True)


def test_which_folder_is_the_checkpoint() -> None:
    old = files("checkpoint-9/model.safetensors", "checkpoint-9/config.json", at=5)
    new = files("checkpoint-10/model.safetensors", at=6)
    beside = files("README.md", "logs/events", at=9)
    assert checkpoints.candidates({**old, **new, **beside}) == ["checkpoint-10", "checkpoint-9"]
    assert checkpoints.candidates({**old, **files("model.safetensors")}) == [""]
    assert checkpoints.candidates(beside) == [""]
    assert checkpoints.within({**old, **new}, "checkpoint-10").keys() == {"model.safetensors"}
    assert checkpoints.within(new, "") == new


def test_a_checkpoint_has_to_settle() -> None:
    watch = Watch(2.0)
    growing = [{"model.safetensors": State(size, size, 7)} for size in (1, 2, 3)]
    assert watch.look(0.0, growing[0]) == []
    assert watch.look(1.9, growing[1]) == []
    assert watch.look(3.8, growing[2]) == []
    assert watch.look(5.7, growing[2]) == []
    assert watch.look(5.8, growing[2]) == [""]
    assert watch.look(9.0, growing[2]) == [""]  # nobody has done it yet
    watch.done("")
    assert watch.look(19.0, growing[2]) == []
    assert watch.look(20.0, growing[0]) == []  # it was written anew
    assert watch.look(22.0, growing[0]) == [""]


def test_a_newer_checkpoint_that_is_still_written_does_not_hide_an_older_one() -> None:
    watch = Watch(2.0)
    old = files("a/model.safetensors", at=1)
    for now in (0.0, 1.0, 2.0):
        new = {"b/model.safetensors": State(1, int(now) + 5, 7)}
        found = watch.look(now, {**old, **new})
    assert found == ["a"]
    watch.done("a")
    assert watch.look(4.0, {**old, **new}) == ["b"]
    watch.done("b")
    assert watch.look(9.0, {**old, **new}) == []
    # The trainer removes the newest one: the one before is not published again.
    assert watch.look(10.0, old) == []
    assert watch.look(20.0, old) == []
    assert watch.look(30.0, {}) == []
