"""The compiled part of aiodist (`_core.c`), if it was built when aiodist was installed.

Everything works without it, and gives the same bits: the Python code is the reference. `core` is
None if it was not built, or if the environment variable AIODIST_CORE is "python"; `reason` says
why. A build of another version is not used, because its functions may take other arguments.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

LAYOUT = 21
"""What the compiled part has to say of itself: see `LAYOUT` in _core.c."""


def _found() -> tuple[ModuleType | None, str]:
    asked = os.environ.get("AIODIST_CORE", "")
    if asked == "python":
        return None, "AIODIST_CORE=python"
    try:
        found = import_module("aiodist._core")
    except ModuleNotFoundError:
        return None, (
            "it was not built: there was no C compiler, or no headers of Python. "
            "Install both (Debian: gcc, python3-dev), then install aiodist again"
        )
    except ImportError as error:
        return None, f"it cannot be loaded ({error}): install aiodist again"
    if found.LAYOUT != LAYOUT:
        return (
            None,
            f"it is of another version ({found.LAYOUT}, not {LAYOUT}): install aiodist again",
        )
    return found, ""


core, reason = _found()
