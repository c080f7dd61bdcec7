"""What mkdocstrings shows of the code beyond what stands in one place: an extension of griffe.

The overloads of an operation stand in `aiodist.signatures`, and are shown with the operation. And
docstrings are written for `help()`: an example stands behind ``::``, which Markdown does not know.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

LITERAL = re.compile(r"::\n\n((?: {4,}\S.*\n|\n)+)")


class Docstrings(griffe.Extension):
    """Gives operations their overloads, and docstrings the Markdown that they mean."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """A package was read."""
        if pkg.name == "aiodist":
            signatures = pkg["signatures.Signatures"]
            for path in ("operations.Operations", "group.Group", "blocking.group.BlockingGroup"):
                for member in pkg[path].members.values():
                    if isinstance(member, griffe.Function):
                        self._overload(member, signatures)

    def _overload(self, function: griffe.Function, signatures: Any) -> None:
        for decorator in function.decorators:
            match = re.fullmatch(r"typed\(Signatures\.(\w+)\)", str(decorator.value))
            if match is not None:
                function.overloads = signatures.overloads[match[1]]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Something with a docstring was read."""
        if obj.docstring is not None:
            obj.docstring.value = LITERAL.sub(_fenced, f"{obj.docstring.value}\n")


def _fenced(match: re.Match[str]) -> str:
    return f":\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n"
