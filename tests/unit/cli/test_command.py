"""How the command ends if it has hardly begun."""

from __future__ import annotations

import sys

import pytest

from aiodist_cli import command


class Cancelled:
    """A module whose import is interrupted."""

    @property
    def app(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_during_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiodist_cli.main", Cancelled())
    with pytest.raises(SystemExit) as info:
        command.main()
    assert info.value.code == 130
