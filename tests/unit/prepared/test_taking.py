"""What a waiting call keeps of its arguments."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from aiodist.prepared.taking import kept

X = np.ones(2)
VALUES: list[Any] = [
    *(None, 3, "word", X),
    *([], (), {}, [1, 2], (1, "two"), {"a": 1, "b": None}),
    *([[1], (2, [3])], ([1],), {"a": [1, {"b": (X, [])}]}, [1, 2, [X]]),
]


def containers(value: Any) -> list[Any]:
    """The lists and dicts in `value`."""
    found: list[Any] = []
    if type(value) in (list, tuple, dict):
        found = [] if type(value) is tuple else [value]
        for each in value.values() if type(value) is dict else value:
            found += containers(each)
    return found


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_program_may_change_all_lists_and_dicts(value: Any) -> None:
    copy = kept(value)
    assert repr(copy) == repr(value)
    assert type(copy) is type(value)
    ours, theirs = containers(copy), containers(value)
    assert len(ours) == len(theirs)
    assert not {id(each) for each in ours} & {id(each) for each in theirs}


def test_a_long_list_takes_one_call() -> None:
    calls: list[str] = []
    value = [*range(5000)]
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    copy = kept(value)
    sys.setprofile(None)
    assert copy == value
    assert len(calls) == 1
