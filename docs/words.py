"""Counts how text reads, and says which text reads badly.

Some words show that a sentence has to be read twice: *where* in place of *if*, *who* without a
noun, *nobody* and *somebody* as subjects. Other words show that a text helps: *because* gives a
reason, *you* speaks to the reader. `check` counts both in the pages (`WRITTEN`) and in the code
(`ROOMS`) that are written by these rules. It names each sentence of more than 30 words there.

``words.py`` prints the rates of every page, and of the docstrings and comments of every room.
``words.py FILE …`` prints the sentences that a writer should look at.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The pages that follow the rules, so that the check fails if they stop to. Add a page here when it
# is rewritten.
WRITTEN = [
    "CHANGELOG.md",
    "README.md",
    "benchmarks/README.md",
    "docs/algorithms.md",
    "docs/architecture.md",
    "docs/averaging.md",
    "docs/benchmarks.md",
    "docs/blocking.md",
    "docs/codecs.md",
    "docs/coming-from-mpi4py.md",
    "docs/coming-from-torch.md",
    "docs/commands.md",
    "docs/concepts.md",
    "docs/dask.md",
    "docs/debugging.md",
    "docs/deployment.md",
    "docs/errors.md",
    "docs/glossary.md",
    "docs/gpu.md",
    "docs/guarantees.md",
    "docs/launchers.md",
    "docs/launchers/kubernetes.md",
    "docs/launchers/mpirun.md",
    "docs/launchers/slurm.md",
    "docs/launchers/torchrun.md",
    "docs/monitoring.md",
    "docs/patterns.md",
    "docs/performance.md",
    "docs/proof.md",
    "docs/quickstart.md",
    "docs/ray.md",
    "docs/recovery.md",
    "docs/resharding.md",
    "docs/scale.md",
    "docs/security.md",
    "docs/services.md",
    "docs/simulating.md",
    "docs/testing.md",
    "docs/torch.md",
    "docs/tutorial/1-first.md",
    "docs/tutorial/2-learn.md",
    "docs/tutorial/3-at-once.md",
    "docs/tutorial/4-survive.md",
    "docs/tutorial/5-serve.md",
    "docs/tutorial/6-watch.md",
    "docs/weights.md",
    "docs/windows.md",
]

# The folders and modules whose docstrings and comments follow the rules. Add a room here when it is
# rewritten.
ROOMS = [
    "aiodist/__init__.py",
    "aiodist/averaging",
    "aiodist/blocking",
    "aiodist/blocking_session.py",
    "aiodist/buffers",
    "aiodist/channels",
    "aiodist/codecs",
    "aiodist/collectives",
    "aiodist/composing.py",
    "aiodist/control",
    "aiodist/coordinator",
    "aiodist/debugging.py",
    "aiodist/device_programs",
    "aiodist/devices",
    "aiodist/engine",
    "aiodist/environment.py",
    "aiodist/errors.py",
    "aiodist/files.py",
    "aiodist/group.py",
    "aiodist/hostlist.py",
    "aiodist/launch.py",
    "aiodist/launching",
    "aiodist/links",
    "aiodist/membership",
    "aiodist/operations",
    "aiodist/p2p",
    "aiodist/phases",
    "aiodist/prepared",
    "aiodist/rank",
    "aiodist/reach.py",
    "aiodist/recorder.py",
    "aiodist/schedules",
    "aiodist/services",
    "aiodist/session.py",
    "aiodist/shared_memory",
    "aiodist/signatures.py",
    "aiodist/testing",
    "aiodist/threads",
    "aiodist/timeouts.py",
    "aiodist/topologies",
    "aiodist/trace.py",
    "aiodist/transports",
    "aiodist/types.py",
    "aiodist/windows",
    "aiodist/wire",
    "aiodist/work.py",
    "clients/aiodist_cli",
    "clients/aiodist_dask",
    "clients/aiodist_ray",
    "clients/aiodist_torch",
    "clients/aiodist_verl",
    "clients/aiodist_vllm",
    "server/aiodist_server",
]

LONGEST = 30
"""The words a sentence may have."""

MOST_PROSE = 40_000
"""The words that all pages may have together, without code and the reference."""

WORD = re.compile(r"[A-Za-z][\w'’-]*")
# A "where" of place stays: "is where", "where it lives" cannot be told apart without a parser, but
# "from where", "to where" and questions can.
PATTERNS = {
    "where": r"(?<!from )(?<!to )(?<!of )(?<!is )(?<!know )(?<!says )\bwhere\b(?! to\b)(?![^.]*\?)",
    "who": r"(?:^|[.;:(,] |\b(?:and|or|of|for|to|by|than|as|with|from|if) )(?:who|whoever|whom)\b",
    "nobody": r"\b(?:no|some|every)body\b",
    "because": r"\b(?:because|since|so that)\b",
    "you": r"\byou(?:r|rs|rself)?\b",
}
AT_MOST = {"where": 0.4, "who": 0.05, "nobody": 0.2}
AT_LEAST = {"because": 1.5, "you": 5.0}
AT_LEAST_IN_CODE = {"because": 1.5}


@dataclass(frozen=True)
class Count:
    """What is found in some text: the words in all, and each pattern's hits."""

    words: int
    hits: dict[str, int]
    too_long: int

    @classmethod
    def of(cls, sentences: list[str]) -> Count:
        found = dict.fromkeys(PATTERNS, 0)
        for sentence in sentences:
            for name, pattern in PATTERNS.items():
                found[name] += len(re.findall(pattern, sentence, re.IGNORECASE))
        lengths = [len(WORD.findall(sentence)) for sentence in sentences]
        return cls(sum(lengths), found, sum(length > LONGEST for length in lengths))

    def rate(self, name: str) -> float:
        """How often, for each 1,000 words."""
        return 1000 * self.hits[name] / max(self.words, 1)


def of_page(markdown: str) -> list[str]:
    """The sentences of a page, without its code. A cell of a table counts as a sentence."""
    text = re.sub(r"^```.*?^```$", "\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\1.\n", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(
        r"^\|(.*)$", lambda row: "\n\n".join(row[1].split("|")) + "\n", text, flags=re.MULTILINE
    )
    text = re.sub(r"^#+ (.*)$", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return _sentences(text)


def of_module(source: str) -> list[str]:
    """The sentences of the docstrings and comments of a module, without examples."""
    sentences = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sentences += _sentences(_without_examples(ast.get_docstring(node) or ""))
            sentences += [
                sentence
                for one in node.body[1:]  # below an attribute
                if isinstance(one, ast.Expr)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
                for sentence in _sentences(one.value.value)
            ]
    for block in _comments(source):
        sentences += _sentences(_without_examples(block))
    return sentences


def _comments(source: str) -> Iterator[str]:
    """Comments on lines of their own that follow each other are one text."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#\s*(?:noqa|type:|pyright:|!)", token.string
        ):
            continue
        behind_code = token.line[: token.start[1]].strip() != ""
        if (token.start[0] != last + 1 or behind_code) and block:
            yield "\n".join(block)
            block = []
        block.append(re.sub(r"^#:? ?", "", token.string))
        last = -1 if behind_code else token.start[0]
    yield "\n".join(block)


def _without_examples(docstring: str) -> str:
    text = re.sub(r"^```.*?^```$", "\n", docstring, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^==+ +==.*\n(?:.+\n?)+", "\n", text, flags=re.MULTILINE)  # a table
    kept, inside = [], False
    for line in textwrap.dedent(text).splitlines():
        if inside and line.strip() and not line.startswith(" "):
            inside = False
        if inside and not line.strip():
            kept.append("")
        elif not inside and not line.lstrip().startswith((">>>", "...")):
            kept.append(line)
        inside = inside or line.rstrip().endswith("::")
    # A line of "Args:" is a text of its own.
    return re.sub(r"^(\s+\w+): ", r"\n\n\1.\n\n", "\n".join(kept), flags=re.MULTILINE)


def _sentences(text: str) -> list[str]:
    text = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        found += [one for one in re.split(r"(?<=[.!?])\)?\s+", flat) if one]
    return found


def of_room(name: str) -> dict[str, list[str]]:
    """The sentences of each module of a folder, or of one module."""
    path = ROOT / name
    modules = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return {str(one.relative_to(ROOT)): of_module(one.read_text()) for one in modules}


def check() -> list[str]:
    """What is wrong with the pages and the code that are written by the rules."""
    pages = {name: of_page((ROOT / name).read_text()) for name in WRITTEN}
    modules = {name: found for room in ROOMS for name, found in of_room(room).items()}
    problems = [*_check("docs", pages, AT_LEAST), *_check("code", modules, AT_LEAST_IN_CODE)]
    if (prose := words_of_prose()) > MOST_PROSE:
        problems.append(f"docs: {prose} words in all pages, {MOST_PROSE} are allowed: shorten one")
    return problems


def words_of_prose() -> int:
    """The words of all pages, without code in blocks and lines, and without the reference: the API,
    and the map of files."""
    sentences = [one for page in _all_pages() for one in of_page(page.read_text())]
    return sum(word != "code" for one in sentences for word in WORD.findall(one))


def _check(what: str, texts: dict[str, list[str]], at_least: dict[str, float]) -> list[str]:
    problems = [
        f"{name}: {length} words in one sentence: {sentence[:70]} …"
        for name, sentences in texts.items()
        for sentence in sentences
        if (length := len(WORD.findall(sentence))) > LONGEST
    ]
    count = Count.of([sentence for sentences in texts.values() for sentence in sentences])
    for name, most in AT_MOST.items():
        if count.rate(name) > most:
            problems.append(
                f"{what}: {count.rate(name):.2f} of {name!r} in 1,000 words, {most} are allowed:"
                " `docs/words.py FILE …` shows them"
            )
    for name, least in at_least.items():
        if count.words and count.rate(name) < least:
            problems.append(
                f"{what}: {count.rate(name):.2f} of {name!r} for each 1,000 words, at least {least}"
                " are asked"
            )
    return problems


def _show(name: str, count: Count) -> None:
    rates = "".join(f"{count.rate(pattern):8.2f}" for pattern in PATTERNS)
    print(f"{name:40} {count.words:7}{rates} {count.too_long:6}")


def _all_pages() -> list[Path]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # The map of files is reference, too: a program writes it from docstrings.
    reference = {ROOT / "docs" / "files.md"}
    found = [page for page in pages if "api" not in page.parts and page not in reference]
    return [page for page in found if page.exists()]


def main(names: list[str]) -> None:
    if names:
        for name in names:
            path = ROOT / name
            read = of_module if path.suffix == ".py" else of_page
            for sentence in read(path.read_text()):
                bad = [key for key in AT_MOST if re.search(PATTERNS[key], sentence, re.IGNORECASE)]
                if len(WORD.findall(sentence)) > LONGEST:
                    bad.append("long")
                if bad:
                    print(f"{name}: {', '.join(bad)}: {sentence}")
        return
    print(f"{'':40} {'words':>7}{''.join(f'{name:>8}' for name in PATTERNS)}   long")
    everything = []
    for page in _all_pages():
        sentences = of_page(page.read_text())
        everything += sentences
        _show(str(page.relative_to(ROOT)), Count.of(sentences))
    _show("all pages", Count.of(everything))
    print(f"{'all pages, without code':40} {words_of_prose():7}")
    everything = []
    roots = ("aiodist", "server", "clients")
    modules = [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]
    for room in sorted({path.parent for path in modules}):
        sentences = [
            sentence
            for path in modules
            if path.parent == room
            for sentence in of_module(path.read_text())
        ]
        everything += sentences
        _show(str(room.relative_to(ROOT)), Count.of(sentences))
    _show("all code", Count.of(everything))


if __name__ == "__main__":
    main(sys.argv[1:])
