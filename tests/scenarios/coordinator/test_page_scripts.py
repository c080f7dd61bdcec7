"""Scripts of the page, in Node.js with a document of the test."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")

DOCUMENT = """
class Node {
  children = []; attributes = {}; dataset = {}; moves = 0; parent = null;
  append(...nodes) { nodes.forEach((node) => this.insertBefore(node, null)); }
  insertBefore(node, next) {
    if (node.parent) { node.remove(); node.moves += 1; }
    if (node instanceof Node) node.parent = this;
    this.children.splice(next ? this.children.indexOf(next) : this.children.length, 0, node);
  }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  replaceChildren(...nodes) { this.children = nodes; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  get firstChild() { return this.children[0] ?? null; }
  get nextSibling() { return this.parent.children[this.parent.children.indexOf(this) + 1] ?? null; }
  find(name) {
    const inside = this.children.filter((one) => one instanceof Node);
    return inside.filter((one) => one.attributes.class === name)
      .concat(inside.flatMap((one) => one.find(name)));
  }
}
globalThis.document = {
  getElementById() {}, createElement: () => new Node(), createElementNS: () => new Node(),
};
"""


def said(folder: Path, script: str) -> list[str]:
    """What a script prints that may import those of the page."""
    for file in (resources.files("aiodist_server") / "page").iterdir():
        (folder / file.name).write_text(file.read_text("utf-8"), "utf-8")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "document.js").write_text(DOCUMENT)
    (folder / "test.js").write_text('import "./document.js";\n' + script)
    done = subprocess.run(
        ["node", "test.js"], check=False, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nodes_that_stay_are_not_moved(tmp_path: Path) -> None:
    script = """
import { sync } from "./dom.js";
const parent = document.createElement();
const make = (text) => [Object.assign(document.createElement(), { text }), () => {}];
for (const items of ["abcd", "bcd", "bdec", "xbb"]) {
  sync(parent, [...items], (item) => item, make);
  console.log(parent.children.map(({ text, moves }) => `${text}${moves}`).join(" "));
}
"""
    assert said(tmp_path, script) == ["a0 b0 c0 d0", "b0 c0 d0", "b0 d1 e0 c0", "x0 b0 b0"]


def test_a_point_between_two_gaps_is_drawn(tmp_path: Path) -> None:
    script = """
import { makePlot } from "./plot.js";
const [node, update] = makePlot({ title: "", lines: [["wait", "wait"]], format: String });
update({ ago: [4, 3, 2, 1, 0], wait: [1, null, 2, 1, null] }, 10);
console.log(node.find("curve")[0].attributes.d);
"""
    assert said(tmp_path, script) == ["M180.0 45.0h0M240.0 0.0h0L270.0 45.0"]
