"""The alert rules and the dashboard in deploy/: what they ask for is what is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodist.coordinator.totals import Totals
from aiodist_server import metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "aiodist.json").read_text("utf-8"))

_NAME = re.compile(r"\b(?:aiodist|process)_[a-z_]+")
_INTERVAL = "$__rate_interval"


@pytest.fixture
def promtool() -> Callable[..., str]:
    """Runs promtool (Debian's package prometheus has it), which is to find nothing wrong."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool here: install prometheus, or set PROMTOOL")
    command: str = found

    def check(*arguments: object, input: str | None = None) -> str:
        ran = subprocess.run(
            [command, *map(str, arguments)],
            check=False,
            capture_output=True,
            text=True,
            input=input,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return check


def told() -> set[str]:
    """The names of all metrics, and of their samples."""
    doing = {"busy": 0.0, "waits": [], "collectives": 0, "sent": 0, "received": 0}
    doing |= {"saved": 0}
    group: dict[str, Any] = {
        "name": "g", "run_id": "r", "epoch": 1, "waiting": [], "lost": {}, "findings": [],
        "members": [{"rank": 0, "silent": 0.0, "doing": doing}], "store": {"keys": 0, "bytes": 0},
        "channel": "",
    }  # fmt: skip
    said = {"behind": 0.0, "lag": 0, "memory": 0, "sent": 0}
    said |= {"saved": 0, "changed": 0.0, "chain": 0, "fallbacks": 0}
    channel: dict[str, Any] = {
        "name": "c", "run_id": "r", "newest": 1, "nbytes": 1,
        "participants": [{"id": "p", "publishes": True, "said": said}],
    }  # fmt: skip
    found = {"draining": False, "groups": [group], "channels": [channel]}
    body, _ = metrics.exposition(found, metrics.Health(Totals(), (0.0, 0), metrics.Sums()))
    names = {*re.findall(r"^# TYPE (\S+)", body.decode(), re.MULTILINE)}
    return names | {"aiodist_operation_seconds" + end for end in ("_bucket", "_count", "_sum")}


def expressions() -> list[str]:
    """Those of the dashboard, with its variables replaced."""
    return [
        target["expr"].replace(_INTERVAL, "1m")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


def test_alerts_ask_for_what_is_told() -> None:
    lines = [line for line in ALERTS.read_text("utf-8").splitlines() if "expr:" in line]
    asked = {name for line in lines for name in _NAME.findall(line)}
    assert len(lines) > 5
    assert asked <= told()


def test_the_dashboard_asks_for_what_is_told() -> None:
    queries = [one["query"] for one in DASHBOARD["templating"]["list"]]
    assert {name for text in [*expressions(), *queries] for name in _NAME.findall(text)} <= told()


def test_alerts_and_dashboard_select_the_job_that_is_scraped() -> None:
    asked = re.findall(r'job="(.*?)"', "".join([ALERTS.read_text("utf-8"), *expressions()]))
    monitor = (DEPLOY / "kubernetes" / "podmonitor.yaml").read_text("utf-8")
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text("utf-8")
    (job,) = {*asked}
    assert f"- targetLabel: job\n          replacement: {job}\n" in monitor
    assert f"- job_name: {job}\n" in page


def test_panels_do_not_cover_each_other() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not covered & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= covered


def test_rules(promtool: Callable[..., str]) -> None:
    promtool("check", "rules", ALERTS)


def test_alerts_come_when_they_should(promtool: Callable[..., str]) -> None:
    promtool("test", "rules", ALERTS.with_name("alerts.test.yaml"))


def test_expressions_of_the_dashboard(promtool: Callable[..., str], tmp_path: Path) -> None:
    """As rules, which promtool reads; dashboards it does not."""
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(expressions())]
    file = tmp_path / "rules.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_what_is_told_is_well_formed(promtool: Callable[..., str]) -> None:
    health = metrics.Health(Totals(), (0.0, 0), metrics.Sums())
    body, _ = metrics.exposition({"draining": False, "groups": [], "channels": []}, health)
    promtool("check", "metrics", input=body.decode())
