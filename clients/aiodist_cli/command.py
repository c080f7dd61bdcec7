"""Where the `aiodist` command begins: before anything is imported that may not be installed."""

from __future__ import annotations

import sys

LIBRARIES = frozenset({"click", "rich", "typer"})
"""What the commands are made with, and the library does without: the extra `cli`."""


def main() -> None:
    """Run the command; where a library is missing that it is made with, say how to get it."""
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
