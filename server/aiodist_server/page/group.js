// One group: who holds it up, its ranks with their last minutes, plots, and what happened.
import { bytes, clock, duration, element, rate, setText, sync } from "./dom.js";
import { makePlot } from "./plot.js";
import { makeStrip, spanText } from "./strip.js";

const PLOTS = [
  {
    title: "Collectives/s", lines: [["calls", "median"]], band: ["slowest", "fastest"],
    format: rate,
  },
  {
    title: "Bytes/s", lines: [["sent", "sent"], ["received", "recv"]],
    format: bytes,
  },
  { title: "Longest wait", lines: [["wait", "wait"]], format: duration },
];
const LISTED = 20; // so many spans of a rank are written out

export function makeGroup() {
  const name = element("h2", "");
  const state = element("span", "state");
  const findings = element("div", "findings");
  const notices = element("ul", "notices");
  const axis = element("div", "axis", element("span", ""), element("span", "", "now"));
  const heads = element("div", "row heads", element("span", "", "rank"), axis,
    ...["calls/s", "sent/s", "recv/s"].map((text) => element("span", "number", text)));
  const rows = element("div", "rows");
  const more = element("p", "more");
  const plots = PLOTS.map(makePlot);
  const events = element("ol", "events");
  const history = element("details", "happened", element("summary", "", "What happened"), events);
  history.open = true;
  const context = { seconds: 0, marks: [] }; // what all strips have in common
  const drawn = element("div", "plots", ...plots.map(([plot]) => plot));
  const node = element("section", "group", element("header", "", name, state), findings, notices,
    heads, rows, more, drawn, history);

  function update(group) {
    const { seconds } = group;
    setText(name, group.name);
    name.title = group.run ? `run ${group.run}` : "";
    const saved = group.saved ? `, ${bytes(group.saved)} saved by codecs` : "";
    setText(state, group.state + saved);
    node.classList.toggle("ended", group.ended);
    sync(findings, group.findings, (one) => one.text, makeFinding);
    sync(notices, group.notices, (one) => one.text, makeNotice);
    notices.hidden = !group.notices.length;
    setText(axis.firstChild, `${Math.round(seconds / 60)} min ago`);
    context.seconds = seconds;
    context.marks = group.events
      .filter(({ kind }) => kind === "formed" || kind === "went on")
      .map(({ ago }) => ago);
    heads.hidden = rows.hidden = !group.rows.length;
    sync(rows, group.rows, (row) => row.key, () => makeRow(context));
    setText(more, `and ${group.rows_left_out} more ranks, none of which is worse off`);
    more.hidden = !group.rows_left_out;
    plots.forEach(([, draw]) => draw(group.series, seconds));
    showEvents(events, group.events);
    history.hidden = !group.events.length;
    drawn.hidden = !group.series.ago.length;
  }
  return [node, update];
}

export function showEvents(list, events) {
  list.replaceChildren(...events.map(({ ago, kind, text }) => {
    const item = element("li", "", element("time", "", clock(ago)), element("span", "", text));
    item.dataset.kind = kind;
    return item;
  }));
}

function makeNotice() {
  const node = element("li", "");
  return [node, ({ kind, text }) => {
    node.dataset.kind = kind;
    setText(node, text);
  }];
}

function makeFinding() {
  const text = element("strong", "");
  const held = element("p", "held");
  const culprits = element("div", "culprits");
  const more = element("p", "more");
  const node = element("div", "finding", text, held, culprits, more);
  node.setAttribute("role", "alert");
  return [node, (finding) => {
    setText(text, finding.text);
    setText(held, finding.held);
    sync(culprits, finding.culprits, (one) => one.rank, makeCulprit);
    setText(more, finding.left_out ? `and ${finding.left_out} more` : "");
  }];
}

function makeCulprit() {
  const who = element("p", "who");
  const stack = element("pre", "stack");
  return [element("div", "culprit", who, stack), ({ rank, who: name, doing, places }) => {
    setText(who, `rank ${rank} (${name}): ${doing}`);
    setText(stack, places.join("\n"));
    stack.hidden = !places.length;
  }];
}

function makeRow(context) {
  const rank = element("span", "rank");
  const name = element("span", "name");
  const [strip, draw] = makeStrip();
  const numbers = [0, 1, 2].map(() => element("span", "number"));
  const doing = element("span", "doing");
  const stack = element("pre", "stack");
  const spans = element("ul", "spans");
  const where = element("p", "where");
  const summary = element("summary", "row", element("span", "who", rank, name),
    strip, ...numbers, doing);
  const node = element("details", "member", summary, element("div", "more", where, stack, spans));

  function update(row) {
    node.dataset.kind = row.kind;
    node.classList.toggle("gone", row.gone !== null);
    setText(rank, String(row.rank));
    setText(name, row.name || `${row.host}:${row.pid}`);
    const [calls, sent, received] = row.rate ?? [];
    [rate(calls), bytes(sent), bytes(received)].forEach((text, i) => setText(numbers[i], text));
    const place = row.places.length ? ` at ${row.places[0]}` : "";
    setText(doing, `${row.doing}${place}`);
    doing.title = doing.textContent;
    setText(where, `pid ${row.pid} on ${row.host || "an unknown host"}`);
    setText(stack, row.places.join("\n"));
    stack.hidden = !row.places.length;
    draw(row, context.seconds, context.marks);
    const said = row.spans.slice(-LISTED).toReversed().map(spanText);
    spans.replaceChildren(...said.map((text) => element("li", "", text)));
  }
  return [node, update];
}
