"""`docs/check.py` finds what it is there to find."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, with an empty folder as the repository."""
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("docs_check", DOCS / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    yield module
    for path in DOCS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def problems(check: Any, tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return list(check.check_page(page))


def test_links(check: Any, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, here\n")
    good = "[a](other.md) [b](other.md#a-title-here) [c](#top) [d](https://x.y).\n\n# Top\n"
    assert problems(check, tmp_path, good) == []
    assert problems(check, tmp_path, "[a](gone.md).") == [
        "page.md: the link to gone.md leads nowhere"
    ]
    assert problems(check, tmp_path, "[a](other.md#no).") == [
        "page.md: other.md has no heading #no"
    ]


GOOD = """# A heading

Text of `code`, which
goes on. A list:

- one thing
- another

| | a |
| --- | ---: |
| b | c |

![a picture](x.svg)

This leads to

```console not-run="no"
$ true
| --- |
```

*The end.*
"""


def test_prose_is_whole(check: Any, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(GOOD)
    assert list(check.check_prose(tmp_path / "page.md")) == []


@pytest.mark.parametrize(
    ("whole", "broken", "problem"),
    [
        ("| | a |\n", "", "page.md:9: this table has no header row"),
        ("| | a |\n| --- | ---: |\n", "", "page.md:9: this table has no header row"),
        ("| | a |", "| a |", "page.md:9: the header row of this table has another number of col"),
        ("*The end.*", "The end of", "page.md:22: this paragraph stops amid a sentence: … The end"),
        (
            "goes on. A list:\n\n- one thing\n- another\n",
            "goes\n",
            "page.md:3: this paragraph stops amid a sentence: … goes",
        ),
    ],
)
def test_tables_and_sentences_that_are_broken(
    check: Any, tmp_path: Path, whole: str, broken: str, problem: str
) -> None:
    (tmp_path / "page.md").write_text(GOOD.replace(whole, broken))
    (found,) = check.check_prose(tmp_path / "page.md")
    assert found.startswith(problem)


def test_python_is_run_by_the_ranks_of_a_group(check: Any, tmp_path: Path) -> None:
    good = "```python ranks=3\nassert await group.all_reduce(1) == 3\n```\n"
    assert problems(check, tmp_path, good) == []
    (problem,) = problems(check, tmp_path, "text\n\n```python\nawait x\n```\n")
    assert problem.startswith("page.md:3: ")
    assert "name 'x' is not defined" in problem
    (problem,) = problems(check, tmp_path, good.replace("ranks=3", ""))
    assert "AssertionError" in problem
    (problem,) = problems(check, tmp_path, "```python\nawait (\n```\n")
    assert "SyntaxError" in problem


@pytest.mark.parametrize("end", ["assert y == 2", "if group.rank:\n    # here\n    assert y == 2"])
def test_what_a_block_needs_stands_in_a_comment(check: Any, tmp_path: Path, end: str) -> None:
    here = "" if "# here" in end else "# here\n"
    page = f"<!-- run\ny = 1\n{here}{end}\n-->\n```python\ny += 1\n```\n"
    assert problems(check, tmp_path, page) == []
    (problem,) = problems(check, tmp_path, page.replace("y = 1", "y = 2"))
    assert "AssertionError" in problem
    (problem,) = problems(check, tmp_path, page.replace("-->\n", "-->\nwords\n"))
    assert "name 'y' is not defined" in problem


def test_a_block_with_imports_imports_all_that_it_uses(check: Any, tmp_path: Path) -> None:
    page = "```python\n{}assert np.ones(group.size).sum() == 2\n```\n"
    assert problems(check, tmp_path, page.format("")) == []
    assert problems(check, tmp_path, page.format("import numpy as np\n")) == []
    (problem,) = problems(check, tmp_path, page.format("import math\n"))
    assert "name 'np' is not defined" in problem


@pytest.mark.long
def test_blocks_may_want_processes(check: Any, tmp_path: Path) -> None:
    page = (
        "```python in=processes\nwith aiodist.connect_blocking() as group:\n"
        "    assert group.all_reduce(1) == 2\n```\n\n```python in=processes\nassert {}\n```\n"
    )
    assert problems(check, tmp_path, page.format("True")) == []
    (problem,) = problems(check, tmp_path, page.format("False"))
    assert problem.startswith("page.md:1, or a block behind it: ")
    assert 'File "page.md:6", line 2' in problem


@pytest.mark.parametrize("where", ["", " in=processes"])
def test_no_block_leads_to_another_host(check: Any, tmp_path: Path, where: str) -> None:
    page = f"```python{where}\nawait aiodist.connect('tcp://10.0.0.1:29500', size=1)\n```\n"
    (problem,) = problems(check, tmp_path, page)
    assert problem.startswith("page.md:1: tcp://10.0.0.1 is another host: ")


def test_what_is_not_run_says_why(check: Any, tmp_path: Path) -> None:
    wrong = 'nothing runs this: have it run, or say why not by not-run="…"'
    python, command = "```python{}\nawait x\n```\n", "```console{}\n$ rm x\n```\n"
    assert problems(check, tmp_path, python.format(' not-run="no GPU"')) == []
    (problem,) = problems(check, tmp_path, python.replace("x", "(").format(' not-run="no GPU"'))
    assert problem.startswith("page.md:1: ")
    assert problems(check, tmp_path, python.format(" file=x.py")) == [f"page.md:1: {wrong}"]
    assert problems(check, tmp_path, command.format("")) == [f"page.md:1: {wrong}"]
    assert problems(check, tmp_path, command.format(' not-run="it is long"')) == []
    page = "<!-- commands are not run:\nthey are long -->\n" + command.format("")
    assert problems(check, tmp_path, page) == []
    ((block, why),) = check.not_run(tmp_path / "page.md")
    assert (block.line, why) == (3, "they are long")


def test_names_that_python_imports_are_there(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # not installed
    for name in [one for one in sys.modules if one.startswith("aiodist_vllm")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have imported it with a stand-in
    page = '```python not-run="no GPU"\nfrom {} import {}\nawait x\n```\n'
    for good in [
        ("aiodist.testing", "explore, judge"),
        ("aiodist_vllm.trainer", "whatever"),
        ("elsewhere", "whatever"),
    ]:
        assert problems(check, tmp_path, page.format(*good)) == []
    (problem,) = problems(check, tmp_path, page.format("aiodist.testing", "explore, Line"))
    assert problem.startswith("page.md:1: cannot import name 'Line' from 'aiodist.testing'")
    (problem,) = problems(check, tmp_path, page.format("aiodist.gone", "x"))
    assert problem == "page.md:1: No module named 'aiodist.gone'"


def test_excerpts_stand_in_their_file(check: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def f():\n    a()\n\n    b()\n")
    page = "```python from=program.py\na()\nb()\n```\n"
    assert problems(check, tmp_path, page) == [
        "page.md:1: no test speaks of program.py, so nothing runs it"
    ]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("import program\n")
    check._tests.cache_clear()
    assert problems(check, tmp_path, page) == []
    assert problems(check, tmp_path, "```python from=program.py\nb()\na()\n```\n") == [
        "page.md:1: this is not, or no longer, in program.py"
    ]


def test_commands_print_what_is_said(check: Any, tmp_path: Path) -> None:
    page = (
        "```python file=x.py\nprint(2)\nprint(1)\n```\n\n```console run\n$ python x.py\n{}\n```\n"
    )
    assert problems(check, tmp_path, page.format("1\n2")) == []
    (problem,) = problems(check, tmp_path, page.format("1\n3"))
    assert problem == "page.md:6: `python x.py` printed\n2\n1\n"


def test_named_functions_exist(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "LIMIT = 1\n\nclass B:\n    size: int = 2\n\n    def c(self): ...\n"
    )
    good = "`a.py: LIMIT` `a.py: B` `a.py: B.size`, and over two lines `a.py:\nB.c`.\n"
    assert problems(check, tmp_path, good) == []
    wrong = "text\n`a.py: B.d` `a.py: c` `gone.py: c`.\n"
    assert problems(check, tmp_path, wrong) == [
        "page.md:2: there is no B.d in a.py",
        "page.md:2: there is no c in a.py",
        "page.md:2: there is no file gone.py",
    ]
    (tmp_path / "docs").mkdir()
    assert problems(check, tmp_path, "`docs/`, `docs/gone.py`, `other/gone.py`.\n") == [
        "page.md: there is no docs/gone.py"
    ]


def test_lives_name_a_function_in_each_of_ten_steps(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(): ...\n")
    step = "{}. The call\n   goes by `a.py: f`.\n"
    life = "## The life of a call\n\n" + "".join(step.format(number) for number in range(1, 11))
    assert problems(check, tmp_path, f"{life}\n## Else\n\n1. No function.\n") == []
    assert problems(check, tmp_path, life + step.format(11)) == [
        "page.md: The life of a call: it has 11 steps, not 1 to 10"
    ]
    assert problems(check, tmp_path, "## The life of a call\n\n1. It is made.\n") == [
        "page.md: The life of a call: step 1 names no function"
    ]


def test_pages_are_as_the_code_is(check: Any) -> None:
    import names
    import written

    root = DOCS.parent
    assert written.check(root, write=False) == []
    for page in check.PAGES:
        assert [*names.check(root, page), *names.check_lives(root, page)] == []
    lives = names.LIFE.findall((DOCS / "architecture.md").read_text())
    assert len(lives) == 4


def test_a_part_that_is_old_is_found(check: Any, tmp_path: Path) -> None:
    import written

    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- p: written by docs/check.py --write --><!-- end of p -->\nafter\n"
    )
    written.file_map.SOURCES = ()
    written.PARTS = {("page.md", "p"): lambda root: iter(["new\n"])}
    written.message_table.problems = lambda root: []
    written.diagrams.files = lambda root: iter([(root / "images" / "p.svg", "<svg/>")])
    written.sequences.files = lambda root: iter(())
    assert written.check(tmp_path, write=False) == [
        "page.md: the part 'p' is old: docs/check.py --write",
        "images/p.svg is old: docs/check.py --write",
    ]
    assert written.check(tmp_path, write=True) == []
    assert written.check(tmp_path, write=False) == []
    assert page.read_text().splitlines()[3] == "new"
    with pytest.raises(ValueError, match="has the part 'q' once"):
        written.replaced(page.read_text(), "q", "")


def test_rooms_stand_on_the_floors_of_the_contract(check: Any, tmp_path: Path) -> None:
    import rooms

    (tmp_path / "aiodist/low").mkdir(parents=True)
    (tmp_path / "aiodist/low/__init__.py").write_text('"""The cellar."""')
    for name in ("one", "two"):
        (tmp_path / f"aiodist/{name}.py").write_text(f'"""Room {name}."""')
    contract = '[[tool.importlinter.contracts]]\nname = "import direction"\nlayers = ["{}", "{}"]\n'
    (tmp_path / "pyproject.toml").write_text(contract.format("one | two", "low"))
    assert list(rooms.render(tmp_path))[1:] == [
        "| 2 | `one.py` | Room one. |\n",
        "|  | `two.py` | Room two. |\n",
        "| 1 | `low/` | The cellar. |\n",
    ]


def test_messages_say_what_they_are_for_and_somebody_takes_them(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import message_table

    from aiodist.wire import kinds, messages

    root = DOCS.parent
    monkeypatch.setattr(messages, "_CLASSES", dict(messages._CLASSES))
    monkeypatch.setattr(kinds, "LATEST", 99, raising=False)

    class Nobodys(messages.Message, code=99):
        pass

    row = "| rank | `Nobodys` | the coordinator, as an answer |  |\n"
    assert row in message_table.render(root)
    no_docstring, no_taker, no_kind = message_table.problems(root)
    assert no_docstring == "aiodist/wire: Nobodys has no docstring that says what it is for"
    assert no_taker.startswith("aiodist/wire: nobody takes Nobodys: ")
    assert no_kind.endswith("the docstring does not say what LATEST is for")


def test_public_functions_have_examples_that_run(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import examples

    def good() -> None:
        """What it does.

        For example::

            y = [
                await group.all_reduce(1)]

            assert y == [2]

        And so on.
        """

    def wrong() -> None:
        """What it does::

            await group.gone()

        No more.
        """

    def silent() -> None:
        """Ends in a colon::"""

    assert {"aiodist.connect", "aiodist.Group.all_reduce", "aiodist.Work.wait"} <= {
        *examples.public()
    }
    assert {*examples.SETUPS, *examples.ELSEWHERE} <= {*examples.public()}
    some = {"f.good": good, "f.wrong": wrong, "f.silent": silent}
    monkeypatch.setattr(examples, "public", lambda: some)
    failed, missing = examples.check()
    assert failed.startswith("the example of f.wrong: ")
    assert missing == "f.silent has no example in its docstring"


def test_the_site_has_a_page_for_each_file_that_is_linked(check: Any, tmp_path: Path) -> None:
    import site_hooks
    from mkdocs.exceptions import PluginError

    site_hooks.ROOT, site_hooks.DOCS = tmp_path, tmp_path / "docs"
    (tmp_path / "docs").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.py").write_text("x = 1\n")
    (tmp_path / "READ.md").write_text("[b](docs/b.md) [a](more/a.py#x)\n")
    page = tmp_path / "docs" / "b.md"
    page.write_text("[1](../READ.md#top) [2](../more) [3](https://x.y) `x`\n")
    assert [*site_hooks._targets(page)] == [tmp_path / "READ.md", tmp_path / "more"]
    assert site_hooks._linked(page.read_text(), page, "b.md") == (
        "[1](source/READ.md#top) [2](source/more.md) [3](https://x.y) `x`\n"
    )
    assert site_hooks._text(tmp_path / "READ.md") == "[b](../b.md) [a](more/a.py.md#x)\n"
    assert site_hooks._text(tmp_path / "more") == "# `more`\n\n- [a.py](more/a.py.md)\n"
    assert "x = 1" in site_hooks._text(tmp_path / "more" / "a.py")

    class Page:
        file = type("File", (), {"src_uri": "b.md"})

    assert site_hooks.on_post_page('<a href="https://x.y">', page=Page) == '<a href="https://x.y">'
    with pytest.raises(PluginError, match=r"b\.md loads from elsewhere"):
        site_hooks.on_post_page('<script src="https://x.y/z.js">', page=Page)


def test_a_page_that_is_not_in_the_navigation_fails_the_site(tmp_path: Path) -> None:
    """As `make site` calls mkdocs, and by its configuration. The pages of files that others link to
    need not be there."""
    root = DOCS.parent
    (options,) = re.findall(r"-m mkdocs build(.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "mkdocs", "build", *options.split()]
    own = {"INHERIT": f"{root}/mkdocs.yml", "docs_dir": "docs", "plugins": [], "hooks": []}
    config = {**own, "nav": ["index.md"]}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(config))  # JSON is YAML
    for name in ("index", "source/linked"):
        page = tmp_path / "docs" / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text("# A page\n")

    def build() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    built = build()
    assert built.returncode == 0, built.stderr
    (tmp_path / "docs" / "stray.md").write_text("# Nobody finds this\n")
    built = build()
    assert built.returncode != 0
    assert "stray.md" in built.stderr
    assert "linked.md" not in built.stderr


def test_text_is_counted_as_a_reader_reads_it(check: Any) -> None:
    """Without code, a cell of a table for itself, and comments as one text."""
    words = check.words
    page = "# A title\n\nUse it where you can. Who waits?\n\n```python\nwho = 1\n```\n| a | b c |\n"
    assert words.of_page(page) == ["A title", "Use it where you can.", "Who waits?", "a", "b c"]
    source = (
        '"""Do it.\n\nSo that::\n\n    who()\n"""\n# This is\n# one text.\n\n# `Who`: another.\n'
        'x = 1\n"""Of x."""\n'
    )
    assert words.of_module(source) == [
        "Do it.",
        "So that::",
        "Of x.",
        "This is one text.",
        "code: another.",
    ]
    count = words.Count.of([*words.of_page(page), "word " * 31])
    assert (count.hits["where"], count.hits["who"], count.hits["you"]) == (1, 1, 1)
    assert (count.words, count.too_long) == (43, 1)


def test_text_that_breaks_the_rules_is_found(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = check.words
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "WRITTEN", ["page.md"])
    monkeypatch.setattr(words, "ROOMS", ["room", "module.py"])
    (tmp_path / "room").mkdir()
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("You do this because it helps you.\n")
    module.write_text('"""It is needed because of this."""\n')
    (tmp_path / "room" / "file.py").write_text('"""It is here."""\n')
    assert words.check() == []
    monkeypatch.setattr(words, "MOST_PROSE", 5)
    (tmp_path / "README.md").write_text("Two words, `code` and five.\n")
    assert words.check() == []
    (tmp_path / "README.md").write_text("Two words, `code` and five or six.\n")
    (problem,) = words.check()
    assert problem == "docs: 6 words in all pages, 5 are allowed: shorten one"
    (tmp_path / "README.md").unlink()
    bad = f"Nobody starts where it is raised. Who reads on? {'word ' * 31}."
    page.write_text(f"{bad}\n")
    module.write_text(f'"""{bad}"""\n')
    assert [problem.split(" ")[:2] for problem in words.check()] == [
        *(["page.md:", "31"], ["docs:", "25.00"], ["docs:", "25.00"], ["docs:", "25.00"]),
        *(["docs:", "0.00"], ["docs:", "0.00"]),
        *(["module.py:", "31"], ["code:", "23.26"], ["code:", "23.26"], ["code:", "23.26"]),
        ["code:", "0.00"],
    ]
