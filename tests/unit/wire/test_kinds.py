"""The kinds of frames between ranks."""

from __future__ import annotations

from aiodist.wire import kinds


def test_each_kind_has_a_number_of_its_own_and_is_explained() -> None:
    numbers = {
        name: value
        for name, value in vars(kinds).items()
        if name.isupper() and type(value) is int and name != "VERSION"
    }
    assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
    assert [name for name in numbers if name not in (kinds.__doc__ or "")] == []
