"""Checks that README and docs/ tell the truth: ``make docs``.

Links inside the repository lead somewhere. Tables have a header row, and paragraphs end with a
sentence. Functions that are named with their file exist (see
`names`). The parts that are made of the code, as the map of files, are up to date (see `written`).
And code is real. What stands behind the language of a code block says how it is checked:

- ``python``: it is run, by all ranks of a group: see `running`;
- ``python from=FILE``: it stands, as it is, in that file, which a test runs;
- ``python file=NAME``: it is saved under that name, for the commands of the same page, or for the
  test in tests/launchers that is about the page. So are other languages, as ``sh file=NAME``. A
  comment, ``<!-- files of PAGE -->``, saves those of another page, too;
- ``console run``: the commands, behind ``$``, print the lines below them, in any order.

Python, and commands, that are not run here say why: ``not-run="needs a GPU"`` behind the language,
or for all commands of a page in a comment, ``<!-- commands are not run: they need a cluster -->``.
All that is not run is listed at the end. Python that is not run has to compile, and what it imports
from aiodist has to be there.

The pages that follow the rules for text are held to them (see `words`).

``check.py --write`` brings the parts that are made of the code up to date. ``check.py --text`` runs
no code, and looks at links, tables and sentences alone: `make site` does that.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import names
import running
import words
import written

import examples

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"<!-- run\n((?:(?!-->).)*)-->\s*\Z", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
PARAGRAPH = re.compile(r"^[^\n]+(?:\n[^\n]+)*", re.MULTILINE)
DELIMITER = re.compile(r"\|(?: *:?-+:? *\|)+$")
NO_PROSE = re.compile(r"#|\s*[-*] |\s*\d+\. |<|:::|!\[|```|\s{4}|---$")
GOES_ON = re.compile(r"\n*(?:[-*] |\d+\. |```)")
ENDS = re.compile(r"[.:!?][)\"'*_`”]*$")
FILES = re.compile(r"<!-- files of (\S+) -->")
WHY = re.compile(r"<!-- commands are not run:\s+(.+?)\s+-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block: its language, what stands behind that, the code, and what stands before it, to
    run it."""

    page: Path
    line: int
    language: str
    settings: dict[str, str]
    code: str
    setup: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run_here(self) -> bool:
        """By itself, as Python."""
        return self.language == "python" and not self.settings.keys() & {"from", "file", "not-run"}


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        words = (word.partition("=") for word in shlex.split(match[2]))
        settings = {name: value for name, _, value in words}
        line = text.count("\n", 0, match.start()) + 1
        setup = SETUP.search(text, 0, match.start())
        yield Block(page, line, match[1], settings, match[3], setup[1] if setup else "")


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


def check_prose(page: Path) -> Iterator[str]:
    """Tables without a header row, which no page shows as tables, and sentences that stop."""
    text = FENCE.sub(lambda code: "```" + "\n" * code[0].count("\n"), page.read_text())
    text = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for match in PARAGRAPH.finditer(text):
        lines = match[0].split("\n")
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        if lines[0].startswith("|"):
            cells = [line.count("|") for line in lines[:2]]
            if DELIMITER.match(lines[0]) or len(lines) < 2 or not DELIMITER.match(lines[1]):
                yield f"{place}: this table has no header row"
            elif cells[0] != cells[1]:
                yield f"{place}: the header row of this table has another number of columns"
        elif not (
            NO_PROSE.match(lines[-1]) or ENDS.search(lines[-1]) or GOES_ON.match(text, match.end())
        ):
            yield f"{place}: this paragraph stops amid a sentence: … {lines[-1][-40:]}"


TEXT = (check_links, check_prose)
"""What is checked of the text of a page."""


def check_python(block: Block) -> Iterator[str]:
    """What is wrong with a block that is not run here."""
    try:
        compile(block.code, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        yield from check_imports(block)
    except SyntaxError as error:
        yield f"{block.place}: {error}"
    source = block.settings.get("from")
    if source is None:
        return
    if _lines(block.code) not in _lines((ROOT / source).read_text()):
        yield f"{block.place}: this is not, or no longer, in {source}"
    if not source.startswith("tests/") and Path(source).stem not in _tests():
        yield f"{block.place}: no test speaks of {source}, so nothing runs it"


def check_imports(block: Block) -> Iterator[str]:
    """Names that a block imports from packages of aiodist, and that are not there."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiodist"):
            try:
                exec(ast.unparse(node), {})
            except ImportError as error:
                # A package that such a module needs, as vllm, need not be installed here.
                if type(error) is ImportError or (error.name or "").startswith("aiodist"):
                    yield f"{block.place}: {error}"


@functools.cache
def _tests() -> str:
    """The texts of all tests."""
    return "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))


def check_runs(page: Path) -> Iterator[str]:
    """Run the blocks of a page that are to be run here."""
    together: dict[tuple[str, int], list[tuple[str, str, str]]] = {}
    for block in blocks(page):
        if block.is_run_here:
            ranks = int(block.settings.get("ranks", 2))
            where, parts = block.settings.get("in"), (block.place, block.setup, block.code)
            if where is None:
                yield from running.run(*parts, ranks)
            else:
                together.setdefault((where, ranks), []).append(parts)
    for (_, ranks), several in together.items():
        yield from running.run_in_processes(several, ranks)


def not_run(page: Path) -> Iterator[tuple[Block, str]]:
    """The blocks of a page that nothing runs, and why; "" where that is not said."""
    commands = WHY.search(page.read_text())
    launched = f'PAGE = "{page.name}"' in _tests()
    # A script that is started may start others.
    started = [
        block.code
        for block in blocks(page)
        if "run" in block.settings or (block.language == "sh" and "file" in block.settings)
    ]
    for block in blocks(page):
        why, name = block.settings.get("not-run", ""), block.settings.get("file")
        is_started = name is not None and (launched or any(f" {name}" in one for one in started))
        if block.language == "python":
            if why or (name is not None and not is_started):
                yield block, why
        elif block.language in ("console", "sh", "bash") and not (
            is_started or "run" in block.settings
        ):
            yield block, why or (" ".join(commands[1].split()) if commands else "")


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


def save(block: Block, folder: str) -> None:
    """Save a block that has a name, for commands that are run in `folder`."""
    if "file" in block.settings:
        Path(folder, block.settings["file"]).write_text(block.code)


def check_page(page: Path) -> Iterator[str]:
    for check in TEXT:
        yield from check(page)
    yield from names.check(ROOT, page)
    yield from names.check_lives(ROOT, page)
    with tempfile.TemporaryDirectory() as folder:
        for other in FILES.findall(page.read_text()):
            for block in blocks(page.parent / other):
                save(block, folder)
        for block in blocks(page):
            save(block, folder)
            if block.language == "python" and not block.is_run_here:
                yield from check_python(block)
            elif block.language == "console" and "run" in block.settings:
                yield from check_console(block, Path(folder))
    for block, why in not_run(page):
        if not why:
            yield f'{block.place}: nothing runs this: have it run, or say why not by not-run="…"'
    yield from check_runs(page)


def check_text() -> int:
    problems = [problem for page in PAGES for check in TEXT for problem in check(page)]
    problems += words.check()
    for problem in problems:
        print(problem, file=sys.stderr)
    return bool(problems)


def main() -> int:
    if "--text" in sys.argv:
        return check_text()
    problems = written.check(ROOT, write="--write" in sys.argv)
    for page in PAGES:
        begun = time.monotonic()
        problems += check_page(page)
        print(f"{page.relative_to(ROOT)} {time.monotonic() - begun:.1f} s")
    problems += examples.check()
    problems += words.check()
    for page in PAGES:
        for block, why in not_run(page):
            print(f"not run: {block.place}: {why}")
    for name, why in examples.ELSEWHERE.items():
        print(f"not run: the example of {name}: {why}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(PAGES)} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
