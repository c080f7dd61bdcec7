"""What is done when aiodist is built: its description for PyPI, and its compiled part.

**The description.** PyPI shows README.md, with links that lead somewhere from there. A link to a
file beside README.md, as ``docs/quickstart.md``, leads nowhere on PyPI. If ``[project.urls]`` has
the address of a repository, as ``Source``, it becomes a link to that file as of this version
(``/blob/v0.1.0/…``, as GitHub, GitLab and Gitea have it). As long as there is none, it becomes the
file's name, and the first line says where the files are.

**The compiled part.** ``aiodist/_core.c`` is compiled by the C compiler that built Python. Without
a compiler the wheel is a pure one, and one line says so: everything works without it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


FLAGS = "-O3 -ffp-contract=off -fno-trapping-math -fPIC -shared -pthread"
"""No -march=native: a wheel may be used on another machine."""


def compile_core(source: Path, into: Path) -> str:
    """Compile `source` to the extension module `into`. Returns why that failed; "": it did not."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [
        *compiler,
        *shlex.split(FLAGS),
        f"-I{sysconfig.get_path('include')}",
        str(source),
        "-o",
        str(into),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or "the compiler failed")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the compiled part to a wheel, or puts it beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. `version`: "standard" or "editable"."""
        source = Path(self.root) / "aiodist" / "_core.c"
        name = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._folder = tempfile.TemporaryDirectory(prefix="aiodist-build-")
        is_editable = version == "editable"
        built = source.with_name(name) if is_editable else Path(self._folder.name) / name
        why = "no extension modules here" if os.name != "posix" else compile_core(source, built)
        if why:
            first = why.splitlines()[0]
            self.app.display_warning(f"aiodist is installed without its compiled part: {first}")
            return
        if not is_editable:
            build_data["force_include"][str(built)] = f"aiodist/{name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written: remove what was compiled for it."""
        self._folder.cleanup()


class CustomMetadataHook(MetadataHookInterface):
    """Gives the description when anything is built, or installed, from this folder."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's description; the rest of `metadata` is that of pyproject.toml."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        shown = as_shown(readme, metadata["version"], metadata["urls"])
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
