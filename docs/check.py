"""Checks that README and docs/ tell the truth: ``make docs``.

Links inside the repository lead somewhere. Functions that are named with their file exist (see
`names`). The parts that are made of the code, as the map of files, are up to date (see `written`).
And code is real. What stands behind the language of a code block says how it is checked:

- ``python``: it compiles (``await`` is allowed anywhere);
- ``python from=FILE``: it also stands, as it is, in that file, which has a test;
- ``python file=NAME``: it is saved under that name for the commands of the same page;
- ``console run``: the commands, behind ``$``, print the lines below them, in any order.

``check.py --write`` brings the parts that are made of the code up to date.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import names
import written

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block: its language, what stands behind that, and the code."""

    page: Path
    line: int
    language: str
    settings: dict[str, str]
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        words = (word.partition("=") for word in match[2].split())
        settings = {name: value for name, _, value in words}
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[1], settings, match[3])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


def check_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists():
            yield f"{page.relative_to(ROOT)}: the link to {target} leads nowhere"
        elif anchor and anchor not in anchors(to):
            yield f"{page.relative_to(ROOT)}: {name or 'this page'} has no heading #{anchor}"


def check_python(block: Block) -> Iterator[str]:
    try:
        compile(block.code, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        yield f"{block.place}: {error}"
    source = block.settings.get("from")
    if source is not None and _lines(block.code) not in _lines((ROOT / source).read_text()):
        yield f"{block.place}: this is not, or no longer, in {source}"


def _lines(code: str) -> str:
    """Code without indentation and empty lines, between line ends."""
    return "\n" + "".join(f"{line.strip()}\n" for line in code.splitlines() if line.strip())


def check_console(block: Block, folder: Path) -> Iterator[str]:
    for command, expected in commands(block.code):
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        env |= {"NO_COLOR": "1"}
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=120,
        )
        if sorted(done.stdout.splitlines()) != sorted(expected):
            yield f"{block.place}: `{command}` printed\n{done.stdout}"


def commands(code: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a session, and the lines that each of them prints."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, *output = part.splitlines()
        yield command, output


def check_page(page: Path) -> Iterator[str]:
    yield from check_links(page)
    yield from names.check(ROOT, page)
    yield from names.check_lives(ROOT, page)
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(page):
            if block.language == "python":
                yield from check_python(block)
                if "file" in block.settings:
                    Path(folder, block.settings["file"]).write_text(block.code)
            elif block.language == "console" and "run" in block.settings:
                yield from check_console(block, Path(folder))


def main() -> int:
    problems = written.check(ROOT, write="--write" in sys.argv)
    for page in PAGES:
        print(page.relative_to(ROOT))
        problems += check_page(page)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(PAGES)} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
