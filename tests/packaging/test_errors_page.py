"""The page about errors has all of them, in the table and each with what to do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import aiodist
from aiodist.session import _PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()

ERRORS = [
    name
    for name in aiodist.__all__
    if inspect.isclass(one := getattr(aiodist, name)) and issubclass(one, aiodist.AiodistError)
]


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_on_the_page(name: str) -> None:
    if name == "AiodistError":  # what they all are
        assert f"`aiodist.{name}`" in PAGE
        return
    assert re.search(rf"^##+ {name}$", PAGE, re.MULTILINE)
    if name != "JoinError":  # it is never raised itself
        assert f"[`{name}`](#{name.lower()})" in PAGE


def test_no_other_error_is_on_the_page() -> None:
    assert set(re.findall(r"^##+ (\w+Error)$", PAGE, re.MULTILINE)) <= set(ERRORS)


def test_defaults_are_those_of_connect() -> None:
    parameters = inspect.signature(aiodist.connect).parameters
    assert f"`lease` ({parameters['lease'].default:g} s)" in PAGE
    assert f"`timeout` ({_PATIENCE[False]:g} s, or {_PATIENCE[True]:g} s if" in PAGE
    limit = parameters["max_message_bytes"].default >> 30
    assert f"`max_message_bytes` ({limit} GiB)" in PAGE
