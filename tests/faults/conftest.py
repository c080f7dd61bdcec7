"""Faults of processes and peers."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is tested here is above the event loop: one kind of it does."""
    item.add_marker("one_loop")
