"""Launchers as they are installed here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launched import clean_environment, namespace, programs_of
from slurm import NODES, SLURM, Cluster, connect_hosts, start_daemons


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with what the page that the test module names (`PAGE`) has saved."""
    for name, text in programs_of(request.module.PAGE).items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Skips where Slurm is not installed, or where network namespaces cannot be made."""
    path = clean_environment()["PATH"]
    missing = [name for name in SLURM if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)")
    with ExitStack() as stack:
        spaces = [stack.enter_context(namespace(node)) for node in NODES]
        cluster = Cluster(tmp_path_factory.mktemp("slurm"), spaces)
        connect_hosts(spaces)
        try:
            start_daemons(cluster)
            cluster.await_nodes()
            yield cluster
        finally:
            cluster.stop()
