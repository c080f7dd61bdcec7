// The last minutes of one rank, as a strip: when it was there, and when it waited, and for what.
import { clock, duration, hideTip, shape, showTip } from "./dom.js";

const HEIGHT = 20;

export function spanText([start, end, , text]) {
  const until = end <= 3 ? "" : ` until ${clock(end)}`;
  return `since ${clock(start)}${until}, ${duration(start - end)}: ${text}`;
}

export function makeStrip() {
  const svg = shape("svg", { class: "strip", preserveAspectRatio: "none", role: "img" });
  let shown = null;
  let spread = 1;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const ago = spread * (1 - (event.clientX - box.left) / box.width);
    const slack = (4 / box.width) * spread; // what is narrow can be hit, too
    const span = shown.spans.findLast(([s, e]) => s >= ago - slack && e <= ago + slack);
    if (span) showTip(event, `rank ${shown.rank}`, spanText(span));
    else if (shown.gone !== null && ago < shown.gone) {
      showTip(event, `rank ${shown.rank}`, `${shown.doing}, ${clock(shown.gone)}`);
    } else hideTip();
  });
  svg.addEventListener("pointerleave", hideTip);

  function update(row, window, marks) {
    shown = row;
    spread = window;
    const x = (ago) => Math.max(0, window - ago);
    const rect = (from, to, kind) => shape("rect", {
      x: x(from), width: Math.max(window / 400, x(to) - x(from)), y: 0, height: HEIGHT,
      "data-kind": kind,
    });
    const end = row.gone ?? 0;
    const parts = [rect(Math.min(row.came, window), end, "")];
    for (const [from, to, kind] of row.spans) parts.push(rect(Math.min(from, window), to, kind));
    if (row.how === "lost" || row.how === "aborted") {
      parts.push(shape("rect", {
        x: x(end), width: window / 150, y: 0, height: HEIGHT, "data-kind": "lost",
      }));
    }
    for (const ago of marks) {
      parts.push(shape("line", { x1: x(ago), x2: x(ago), y1: 0, y2: HEIGHT, class: "mark" }));
    }
    svg.setAttribute("viewBox", `0 0 ${window} ${HEIGHT}`);
    svg.setAttribute("aria-label", `the last ${duration(window)} of rank ${row.rank}`);
    svg.replaceChildren(...parts);
  }
  return [svg, update];
}
