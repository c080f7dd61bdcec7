// A plot of one or two lines over the last minutes, with a band if there is one.
import { clock, element, hideTip, setText, shape, showTip } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 90;

// The next of 1, 2, 5, 10, … that is not below the largest value.
function niceTop(largest) {
  if (!(largest > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(largest));
  return [1, 2, 5, 10].map((step) => step * unit).find((top) => top >= largest * 0.999);
}

// The path through all points that are known, with gaps where none is. A round end shows a point
// between two gaps.
function line(values, at) {
  let path = "";
  let drawn = false;
  values.forEach((value, index) => {
    if (value !== null) path += drawn ? `L${at(index, value)}` : `M${at(index, value)}h0`;
    drawn = value !== null;
  });
  return path;
}

// The area between two lines: one piece for each stretch in which both are known.
function area(low, high, at) {
  let path = "";
  let piece = [];
  const close = () => {
    if (piece.length > 1) {
      const up = piece.map((index) => at(index, high[index]));
      const down = piece.toReversed().map((index) => at(index, low[index]));
      path += `M${[...up, ...down].join("L")}Z`;
    }
    piece = [];
  };
  high.forEach((value, index) => { if (value === null) close(); else piece.push(index); });
  close();
  return path;
}

// Where a value is, as a share of the height, and the values at the bottom and the top.
function makeScale(values, logarithmic) {
  if (!logarithmic) {
    const top = niceTop(Math.max(0, ...values));
    return [(one) => one / top, 0, top];
  }
  const decades = values.filter((one) => one > 0).map(Math.log10);
  const low = Math.floor(Math.min(...decades, 0));
  const high = Math.max(low + 1, Math.ceil(Math.max(...decades, low)));
  return [(one) => Math.max(0, (Math.log10(one) - low) / (high - low)), 10 ** low, 10 ** high];
}

// `lines`: [name in the series, label]; `band`: names of the lowest and the highest.
export function makePlot({ title, lines, band, format, logarithmic }) {
  const top = element("span", "top-tick");
  const bottom = element("span", "bottom-tick");
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
  });
  const start = element("span", "");
  const axis = element("div", "axis", start, element("span", "", "now"));
  const values = lines.map(([, label], number) => {
    const value = element("b", "");
    const key = element("span", "value", lines.length > 1 ? `${label} ` : "", value);
    if (lines.length > 1) key.dataset.line = number;
    return [key, value];
  });
  const caption = element("figcaption", "", element("span", "name", title),
    ...values.map(([key]) => key));
  const node = element("figure", "plot", caption, element("div", "canvas", top, bottom, svg), axis);
  let shown = null;
  let spread = 1;

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const ago = spread * (1 - (event.clientX - box.left) / box.width);
    let nearest = -1;
    shown.ago.forEach((one, index) => {
      if (nearest < 0 || Math.abs(one - ago) < Math.abs(shown.ago[nearest] - ago)) nearest = index;
    });
    if (nearest < 0) return;
    const said = lines.map(([name, label]) => `${label}: ${format(shown[name][nearest])}`);
    if (band) said.push(`ranks: ${band.map((name) => format(shown[name][nearest])).join(" to ")}`);
    showTip(event, clock(shown.ago[nearest]), ...said);
  });
  svg.addEventListener("pointerleave", hideTip);

  function update(series, window) {
    shown = series;
    spread = window;
    const all = [...lines.map(([name]) => name), ...(band ?? [])].flatMap((name) => series[name]);
    const known = all.filter((one) => one !== null);
    const [height, lowest, highest] = makeScale(known, logarithmic);
    const at = (index, one) => {
      const x = WIDTH * (1 - series.ago[index] / window);
      return `${x.toFixed(1)} ${(HEIGHT * (1 - height(one))).toFixed(1)}`;
    };
    const parts = [0, 0.5, 1].map((share) => shape("line", {
      x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share, class: "grid",
    }));
    if (band) {
      const [low, high] = band;
      parts.push(shape("path", { class: "band", d: area(series[low], series[high], at) }));
    }
    lines.forEach(([name], number) => {
      parts.push(shape("path", { class: "curve", "data-line": number, d: line(series[name], at) }));
    });
    svg.replaceChildren(...parts);
    setText(top, format(highest));
    setText(bottom, logarithmic ? format(lowest) : "");
    setText(start, `${Math.round(window / 60)} min ago`);
    const last = lines.map(([name]) => format(series[name].at(-1) ?? null));
    last.forEach((text, number) => setText(values[number][1], text));
    svg.setAttribute("aria-label", `${title}: now ${last.join(" and ")}`);
  }
  return [node, update];
}
