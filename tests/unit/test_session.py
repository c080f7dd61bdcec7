"""`aiodist.connect`: what it says where it is used in a way that it cannot be used."""

from __future__ import annotations

import asyncio

import pytest

import aiodist


def test_where_a_coroutine_is_wanted_the_error_says_what_to_do() -> None:
    connecting = aiodist.connect("inproc://nobody", size=1)
    with pytest.raises((TypeError, ValueError), match=r"aiodist\.connect.* to be awaited, or"):
        asyncio.run(connecting)  # type: ignore[arg-type]
