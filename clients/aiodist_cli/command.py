"""The start of the `aiodist` command, before it imports anything that may not be installed."""

from __future__ import annotations

import sys

LIBRARIES = frozenset({"click", "rich", "typer"})
"""The libraries of the commands, from the extra `cli`."""


def main() -> None:
    """Run the command. If a library is missing, say how to install it."""
    try:
        from aiodist_cli.main import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        sys.exit(
            f"aiodist: the commands need {missing}, which is not installed: "
            "pip install 'aiodist[cli]'"
        )
    app(prog_name="aiodist")
