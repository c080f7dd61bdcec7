"""The wheel holds what it should, and importing aiodist brings in nothing that it should not."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import aiodist

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: nothing is downloaded.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "aiodist",
        "aiodist_cli",
        "aiodist_server",
        "aiodist_torch",
        f"aiodist-{aiodist.__version__}.dist-info",
    }


@pytest.mark.parametrize("package", ["aiodist", "aiodist_cli", "aiodist_server", "aiodist_torch"])
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
    assert dict(points["console_scripts"]) == {"aiodist": "aiodist_cli.main:app"}
    assert dict(points["torch.backends"]) == {"aiodist": "aiodist_torch.registration:register"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("aiodist", aiodist.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"torch", "server", "bench", "all", "dev"}
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert not [r for r in required if r.startswith(("torch", "pydantic", "structlog", "aiohttp"))]
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_importing_aiodist_is_light() -> None:
    heavy = "{'torch', 'typer', 'rich', 'pydantic', 'structlog', 'aiohttp', 'aiodist.testing'}"
    code = f"import sys, aiodist; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_public_names_exist_and_are_sorted() -> None:
    assert sorted(aiodist.__all__) == sorted(set(aiodist.__all__))
    assert [name for name in aiodist.__all__ if not hasattr(aiodist, name)] == []
