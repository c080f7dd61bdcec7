"""What PyPI shows of this project: README.md, with links that lead somewhere from there.

A link to a file beside README.md, as ``docs/quickstart.md``, leads nowhere on PyPI. Where
``[project.urls]`` has the address of a repository, as ``Source``, it becomes a link to that file as
of this version (``/blob/v0.1.0/…``, as GitHub, GitLab and Gitea have it). As long as there is none,
it becomes the file's name, and the first line says where the files are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https://|#)(?P<path>[^)]+)\)")


def as_shown(readme: str, version: str, urls: dict[str, str]) -> str:
    """`readme` without relative links. `urls`: those of the project."""
    source = urls.get("Source")

    def link(found: re.Match[str]) -> str:
        image, text, path = found["image"], found["text"], found["path"]
        if source is None:
            return f"{text} (`{path}`)"
        return f"{image}[{text}]({source}/{'raw' if image else 'blob'}/v{version}/{path})"

    shown = _LINK.sub(link, readme)
    if source is not None:
        return shown
    files = f"{urls['Homepage']}{version}/#files"
    return f"*The files that this page names are in the [source distribution]({files}).*\n\n{shown}"


class CustomMetadataHook(MetadataHookInterface):
    """Gives the description when anything is built, or installed, from this folder."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's description; the rest of `metadata` is that of pyproject.toml."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        shown = as_shown(readme, metadata["version"], metadata["urls"])
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
