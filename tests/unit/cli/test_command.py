"""How the command ends if it has hardly begun."""

from __future__ import annotations

import os
import subprocess
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


COMMAND = """
import contextlib, sys
from aiodist_cli import command

sys.argv[1:] = ["--version"]
with contextlib.suppress(SystemExit):
    command.main()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_opened(closed: str) -> None:
    program = f"{COMMAND}import os\n[os.fstat(fd) for fd in range(3)]; sys.stdin.isatty()"
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program]
    assert subprocess.run(shell, check=False).returncode == 0


def test_what_the_locale_cannot_show_is_replaced() -> None:
    program = f"{COMMAND}print('g\u00e9')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True)
    assert said.stdout.splitlines(keepends=True)[-1] == b"g?\n"
