"""How the ranks of `aiodist.run` get their work."""

from __future__ import annotations

import os
import pickle
import tempfile

import pytest

from aiodist import launch


def test_all_of_the_work_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read gives 2 GiB at most."""
    monkeypatch.setattr(os, "pread", lambda *_: b"a part of it")
    with tempfile.TemporaryFile() as file:
        file.write(pickle.dumps(["all", "of it"]))
        file.flush()
        assert launch._read(os.dup(file.fileno())) == ["all", "of it"]
