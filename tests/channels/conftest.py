"""Channels are above the event loop: one kind of it does."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("one_loop")
