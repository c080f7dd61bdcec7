"""The wheel holds what it should, and importing aiodist brings in nothing that it should not."""

from __future__ import annotations

import ast
import configparser
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import aiodist

pytestmark = pytest.mark.timeout(300)  # it builds wheels, for which a busy machine takes long

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "aiodist",
    "aiodist_cli",
    "aiodist_dask",
    "aiodist_pytest",
    "aiodist_ray",
    "aiodist_server",
    "aiodist_torch",
    "aiodist_verl",
    "aiodist_vllm",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """One without its compiled part, because the compiler takes most of the time of a build."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: nothing is downloaded.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    env = os.environ | {"CC": "/no/compiler"}
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, env=env)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.long
@pytest.mark.parametrize("compiler", [None, "/no/compiler"])
def test_with_and_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    """What is installed works, and says whether it has its compiled part."""
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    folder = tmp_path / "installed"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, str(ROOT)], check=True, capture_output=True, text=True)
    (path,) = tmp_path.glob("*.whl")
    is_pure = path.name.endswith("-py3-none-any.whl")
    assert is_pure == ("without its compiled part" in done.stdout + done.stderr)
    if compiler is not None:
        assert is_pure
    zipfile.ZipFile(path).extractall(folder)
    code = (
        "import numpy as np; from aiodist import compiled; from aiodist.types import SUM;"
        "from aiodist.buffers.kernels import Kernel; x = np.ones(5000, '<f2'); y = x.copy();"
        "Kernel.of(SUM, 'float16').reduce([x, x, x], y, 3); assert (y == 3).all();"
        "print(compiled.__file__, compiled.core is None)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert shown.stdout.split() == [str(folder / "aiodist" / "compiled.py"), str(is_pure)]


def test_the_source_distribution_has_the_files_that_the_description_names(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    there = files | {str(folder) for file in files for folder in Path(file).parents}
    named = {link.partition("#")[0] for link in relative_links((ROOT / "README.md").read_text())}
    assert named - there == set()
    # What `make demo` and `make lint` need besides.
    assert {"Makefile", "constraints.txt", "mkdocs.yml", ".ci/run"} <= there
    assert "typings/msgpack/__init__.pyi" in there


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        *PACKAGES,
        f"aiodist-{aiodist.__version__}.dist-info",
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_complete(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()
    (source,) = [path for path in ROOT.glob(f"**/{package}/py.typed") if ".venv" not in path.parts]
    files = {
        str(path.relative_to(source.parents[1]))
        for suffix in ("py", "html", "js", "css")
        for path in source.parent.rglob(f"*.{suffix}")
    }
    assert files <= set(wheel.namelist())


def test_command_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"aiodist": "aiodist_cli.command:main"}
    assert dict(points["torch.backends"]) == {"aiodist": "aiodist_torch.registration:register"}
    assert dict(points["vllm.general_plugins"]) == {"aiodist": "aiodist_vllm:register"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("aiodist", aiodist.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "cli",
        "torch",
        "server",
        "bench",
        "weights",
        "docs",
        "notebook",
        "otel",
        "ray",
        "dask",
        "all",
        "dev",
    }
    assert metadata.get_all("Project-URL") == ["Homepage, https://pypi.org/project/aiodist/"]
    # PyPI shows this, where no link to a file of the repository leads anywhere.
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown = metadata.get_payload()
    assert isinstance(shown, str)
    assert "# aiodist\n" in shown
    assert f"(https://pypi.org/project/aiodist/{aiodist.__version__}/#files)" in shown
    assert " Quickstart (`docs/quickstart.md`), then " in shown
    assert relative_links(shown) == []
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in required}
    assert names == {"msgpack", "numpy", "uvloop"}
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def relative_links(markdown: str) -> list[str]:
    """What the links and images of a page lead to, but for whole addresses and its own headings."""
    targets = re.findall(
        r"\]\(([^)]*)\)|^\[[^\]]+\]: (\S+)|(?:href|src)=\"([^\"]*)", markdown, re.MULTILINE
    )
    return [t for t in map("".join, targets) if not t.startswith(("https://", "#"))]


def test_with_the_address_of_a_repository_the_description_links_to_its_files() -> None:
    build = runpy.run_path(str(ROOT / "hatch_build.py"))
    readme = (
        "See [the tour](docs/a.md#b), ![plot](c.svg), [PyPI](https://pypi.org) and [below](#x)."
    )
    assert relative_links(readme) == ["docs/a.md#b", "c.svg"]
    shown = build["as_shown"](readme, "1.2", {"Source": "https://forge.example/aiodist"})
    assert shown == (
        "See [the tour](https://forge.example/aiodist/blob/v1.2/docs/a.md#b), "
        "![plot](https://forge.example/aiodist/raw/v1.2/c.svg), [PyPI](https://pypi.org) "
        "and [below](#x)."
    )


def loaded_by(code: str, names: set[str]) -> set[str]:
    """Which of these modules are there once a new interpreter has run `code`."""
    code = f"{code}; import sys; print(*sorted({names!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_aiodist_is_light() -> None:
    heavy = {"asyncio", "msgpack", "multiprocessing", "numpy", "torch", "aiodist.group"}
    assert loaded_by("import aiodist; aiodist.PeerLostError, aiodist.ReduceOp.SUM", heavy) == set()


def test_the_library_is_without_what_the_extras_bring() -> None:
    extras = {"torch", "typer", "rich", "pydantic", "structlog", "aiohttp", "aiodist.testing"}
    assert loaded_by("from aiodist import *", {*extras, "aiodist.group"}) == {"aiodist.group"}


def test_names_that_are_loaded_when_asked_for_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(aiodist.__file__).read_text(encoding="utf-8"))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {
        name.name: module.module
        for module in seen.body
        if isinstance(module, ast.ImportFrom)
        for name in module.names
    }
    for module in ("rank.flight_recorder", "rank.telemetry", "codecs"):  # not names in one
        imports[module.rpartition(".")[2]] = f"aiodist.{module}"
    assert imports == aiodist._LOADED_WHEN_ASKED_FOR


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'aiodist' has no attribute 'all_reduce'"):
        _ = aiodist.all_reduce
    assert {"connect", "PeerLostError"} <= set(dir(aiodist))


@pytest.mark.parametrize("library", ["rich", "typer"])
def test_the_command_without_its_libraries_says_how_to_get_them(library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; sys.argv[1:] = ['doctor']"
    code = f"{code}; from aiodist_cli.command import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    advice = f"{library}, which is not installed: pip install 'aiodist[cli]'"
    assert (done.returncode, done.stderr) == (1, f"aiodist: the commands need {advice}\n")


def test_public_names_exist_and_are_sorted() -> None:
    assert sorted(aiodist.__all__) == sorted(set(aiodist.__all__))
    assert [name for name in aiodist.__all__ if not hasattr(aiodist, name)] == []
