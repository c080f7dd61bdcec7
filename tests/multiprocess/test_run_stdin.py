"""`aiodist run --stdin RANK`: one rank is debugged from where the command was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

UNFINISHED = """
import os
os.write(2, b"one\\ntwo")  # no end of line
os._exit(3)
"""

SCRIPT = """
import asyncio
import os
import aiodist


async def main():
    async with aiodist.connect() as group:
        number = group.rank * 11
        await aiodist.breakpoint(group, rank=1)
        total = await group.all_reduce(number)
        os.write(1, b"the sum is %d\\n" % total)  # whole lines: rank 1's go past the launcher


asyncio.run(main())
"""


def _start(tmp_path: Path, *arguments: object, script: str = SCRIPT) -> subprocess.Popen[str]:
    (tmp_path / "debugged.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    return subprocess.Popen(
        [sys.executable, "-m", "aiodist_cli", "run", *map(str, arguments), "debugged.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=env,
    )


def _until(stream: Any, text: str) -> str:
    """What is read up to `text`, which may be no whole line."""
    seen = ""
    while not seen.endswith(text):
        got = stream.read(1)
        assert got, seen
        seen += got
    return seen


def test_a_dialogue(tmp_path: Path) -> None:
    with _start(tmp_path, "-n", 3, "--stdin", 1) as process:
        assert process.stdin is not None
        assert "the others wait" in _until(process.stdout, "(Pdb) ")
        process.stdin.write("p number\n")
        process.stdin.flush()
        assert _until(process.stdout, "(Pdb) ") == "11\n(Pdb) "
        process.stdin.write("number = 100\ncontinue\n")
        process.stdin.flush()
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert sorted(out.removeprefix("(Pdb) ").splitlines()) == [
            "[0] the sum is 122",
            "[2] the sum is 122",
            "the sum is 122",
        ]


def test_without_it_the_error_says_what_to_do(tmp_path: Path) -> None:
    with _start(tmp_path, "-n", 2) as process:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 1
        assert "aiodist run --stdin 1" in err


def test_a_rank_of_this_node(tmp_path: Path) -> None:
    with _start(tmp_path, "-n", 2, "--stdin", 2) as process:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 2
        assert "0 to 1" in err


def test_a_last_line_without_an_end_is_written_once(tmp_path: Path) -> None:
    with _start(tmp_path, "-n", 1, "--stdin", 0, script=UNFINISHED) as process:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 3
        written, _, told = err.partition("aiodist run: ")
        assert written == "one\ntwo"
        assert "[0] one\n[0] two\n" in told
