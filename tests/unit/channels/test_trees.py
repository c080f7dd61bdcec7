"""Trees whose leaves may be parts of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist import Shard
from aiodist.channels.trees import Extent, has_parts, joined, parts_wanted, unwrapped

PART = Shard(np.ones((2, 3)), (slice(1, 3),), (4, 3))


def test_parts_are_unwrapped():
    tree, extents = unwrapped({"a": [PART, 5], "b": (PART.array,), "c": "text"}, shares=2)
    assert tree["a"][0] is PART.array
    assert tree["b"] == (PART.array,)
    assert (tree["a"][1], tree["c"]) == (5, "text")
    assert extents == {"['a'][0]": Extent(((1, 3), (0, 3)), (4, 3))}
    assert unwrapped(PART, shares=2)[1] == {"": extents["['a'][0]"]}
    with pytest.raises(ValueError, match=r"value\['a'\]\[0\] is \[1:3, 0:3\] of an array of shape"):
        unwrapped({"a": [PART]}, shares=1)


def test_a_tree_that_contains_itself_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(ValueError, match="does it contain itself"):
        unwrapped(tree, shares=1)


def test_what_is_wanted():
    into = {"a": PART, "b": [np.zeros(3), 1.5, None, "x"]}
    parts, others = parts_wanted(into)
    assert [*parts] == ["['a']", "['b'][0]"]
    assert parts["['a']"] is PART
    assert others == {"['b'][1]": 1.5, "['b'][3]": "x"}
    assert has_parts(into)
    assert not has_parts(into["b"])
    with pytest.raises(TypeError, match=r"into\['a'\]: an array, an aiodist.Shard or a DTensor"):
        parts_wanted({"a": object()})


def test_trees_of_shares_are_joined():
    one = {"a": 1, "layers": [None, "first"], "t": (1,)}
    other = {"a": 2, "layers": ["zero", "other", "second"], "b": {"c": 3}, "t": ()}
    assert joined([one, other]) == {
        "a": 1,
        "layers": ["zero", "first", "second"],
        "t": (1,),
        "b": {"c": 3},
    }
    assert joined([None, None]) is None
