"""`python -m aiodist_cli` is the `aiodist` command."""

from __future__ import annotations

from aiodist_cli.command import main

main()
