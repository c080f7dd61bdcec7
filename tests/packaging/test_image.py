"""What the image installs is pinned by version and hash: all of it, and nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?P<hashes>( \\\n +--hash=\S+)*)$", re.MULTILINE
)


def pinned(file: str) -> dict[str, str]:
    """The versions of a file of hashed packages. There is no other line in it than packages with
    SHA-256 hashes, comments, and the option that refuses source packages."""
    text = (DEPLOY / file).read_text()
    rest = PACKAGE.sub("", text)
    told = [line for line in rest.splitlines() if line and not line.lstrip().startswith("#")]
    assert told == ["--only-binary :all:"]
    versions = {}
    for package in PACKAGE.finditer(text):
        hashes = re.findall(r"--hash=(\S+)", package["hashes"])
        assert hashes, f"{package['name']} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)
        versions[canonicalize_name(package["name"])] = package["version"]
    return versions


def needed(wanted: Iterable[str], processor: str) -> set[str]:
    """The packages that pip installs for `wanted` with the Python of the image."""
    (python,) = re.findall(r"^ARG PYTHON=\S+/python:(\d+\.\d+)-slim$", CONTAINERFILE, re.MULTILINE)
    system = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": processor,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**system, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for each in {"", *requirement.extras}:
            if (name, each) not in found:
                found.add((name, each))
                waiting += [(Requirement(line), each) for line in requires(name) or []]
    return {name for name, _ in found}


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_all_that_the_image_installs_is_pinned_and_nothing_else(processor: str) -> None:
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("cli", "server"):  # what `aiodist coordinator` needs
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    assert needed(wanted, processor) == pinned("requirements.txt").keys(), "run make pins"
    builds = PROJECT["build-system"]["requires"]
    assert needed(builds, processor) == pinned("build-requirements.txt").keys(), "run make pins"


@pytest.mark.parametrize("file", ["requirements.txt", "build-requirements.txt"])
def test_the_versions_are_those_that_are_tested(file: str) -> None:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tested: dict[str, str] = {canonicalize_name(name): version for name, version in lines}
    versions = pinned(file)
    assert versions == {name: tested.get(name) for name in versions}, "run make pins"


def test_the_image_has_the_compiled_part() -> None:
    """It is compiled with the compiler of the full image of Python. The last image must load it."""
    build, _, last = CONTAINERFILE.rpartition("\nFROM ")
    (python,) = re.findall(r"^ARG PYTHON=(\S+)-slim$", CONTAINERFILE, re.MULTILINE)
    assert f"\nARG BUILD={python}\n" in build
    assert "\nFROM ${BUILD} AS build\n" in build
    assert '\nRUN /opt/aiodist/bin/python -c "import aiodist._core"\n' in last


def test_each_download_of_the_image_looks_at_hashes() -> None:
    """And the Python that the packages are pinned for is that of the image."""
    (python,) = re.findall(r"--python-version (\S+)", (ROOT / "Makefile").read_text())
    assert f"ARG PYTHON=docker.io/library/python:{python}-slim\n" in CONTAINERFILE
    calls = re.findall(r"/pip (?:install|wheel) .*", CONTAINERFILE)
    hashed = [call for call in calls if re.search(r"--require-hashes -r [\w-]+\.txt$", call)]
    files = [call.split()[-1] for call in hashed]
    assert sorted(files) == ["build-requirements.txt", "requirements.txt"]
    # What is left takes no file from anywhere else.
    others = [call for call in calls if call not in hashed]
    assert len(others) == 2
    assert all("--no-deps" in call for call in others)
    assert all("--no-index" in call or "--no-build-isolation" in call for call in others)
