"""Which tests execute which lines of the library, for tests whose ranks share the process of the
test: recorded once, and asked for each fault.

Also a plugin for pytest. ``--tell-times FILE`` writes how long each test took; ``--only-in FILE``
runs the tests that are named there, in that order, and no other.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from coverage import CoverageData

HERE = str(Path(__file__).parent)
_SETTINGS = "[run]\nbranch = False\nsource = aiodist\n"


class Executed:
    """What was recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: dict[str, float] = {}  # by test
        self._data = CoverageData(str(folder / "lines"))

    def record(self, root: Path, folders: Sequence[str]) -> None:
        """Run the tests in `folders` of the tree at `root`, unless that was done."""
        times = self._folder / "seconds.json"
        if not times.exists():
            self._folder.mkdir(exist_ok=True)
            settings = self._folder / "settings"
            settings.write_text(_SETTINGS)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-n", "logical", "--dist", "worksteal", "-p", "executed"]
            command += [f"--tell-times={times}", "--cov=aiodist", "--cov-context=test"]
            command += [f"--cov-config={settings}", "--cov-report=", *folders]
            env = os.environ | {"COVERAGE_FILE": str(self._folder / "lines")}
            env["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
            subprocess.run(command, cwd=root, env=env, stdin=subprocess.DEVNULL, check=False)
        self._seconds = json.loads(times.read_text())
        self._data.read()
        seen = self._known(self._data.measured_contexts())
        print(f"of {len(self._seconds)} tests it is known which lines {len(seen)} execute")

    def tests(self, file: str, line: int) -> list[str]:
        """Those that execute this line of `file`, the quickest first. What is executed when the
        module is imported is nobody's: then those that execute any line of it."""
        by_line: dict[int, list[str]] = {}
        for path in self._data.measured_files():
            if path.endswith(f"/{file}"):
                by_line = self._data.contexts_by_lineno(path)
        found = self._known(by_line.get(line, []))
        found = found or self._known(itertools.chain.from_iterable(by_line.values()))
        return sorted(found, key=lambda test: self._seconds[test])

    def _known(self, contexts: Iterable[str]) -> set[str]:
        return {context.rpartition("|")[0] for context in contexts} & self._seconds.keys()


# -- the plugin -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tell-times", type=Path, help="where to write how long each test took")
    parser.addoption("--only-in", type=Path, help="a list of tests, one a line, to be run alone")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("tell_times")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Clock(path))


class _Clock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._seconds, indent=0) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path: Path | None = config.getoption("only_in")
    if path is not None:
        places: Mapping[str, int] = {
            test: place for place, test in enumerate(path.read_text().splitlines())
        }
        items[:] = sorted(
            (item for item in items if item.nodeid in places),
            key=lambda item: places[item.nodeid],
        )
