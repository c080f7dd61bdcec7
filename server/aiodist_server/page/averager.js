// One averager: for each part its last rounds as strips, with the members that were in them.
import { bytes, duration, element, hideTip, setText, shape, showTip, sync } from "./dom.js";

const HEIGHT = 20;
const GAP = 0.15; // of the width of a round

export function makeAverager() {
  const name = element("h2", "");
  const state = element("span", "state");
  const parts = element("div", "");
  const more = element("p", "more");
  const node = element("section", "group averager", element("header", "", name, state), parts, more);

  function update(averager) {
    const { count, silent, quorum, grace, codec, op, saved } = averager;
    setText(name, averager.name);
    name.title = averager.run ? `run ${averager.run}` : "";
    setText(state, [
      `averager, ${count} member${count === 1 ? "" : "s"}`,
      silent ? `${silent} without a sign of life` : "",
      `quorum ${quorum}`,
      `grace ${grace === null ? "auto" : duration(grace)}`,
      op === "AVG" ? "" : op,
      codec,
      saved ? `${bytes(saved)} saved` : "",
    ].filter(Boolean).join(", "));
    sync(parts, averager.parts, ({ part }) => part, makePart);
    setText(more, `and ${averager.left_out} more parts`);
    more.hidden = !averager.left_out;
  }
  return [node, update];
}

function makePart() {
  const name = element("span", "name");
  const state = element("span", "state");
  const axis = element("div", "axis", element("span", ""), element("span", ""));
  const heads = element("div", "round heads", element("span", "", "member"), axis,
    ...["in", "last late"].map((text) => element("span", "number", text)));
  const rows = element("div", "rows");
  const more = element("p", "more");
  const node = element("div", "part", element("p", "", name, state), heads, rows, more);

  function update(part) {
    const { round, rounds, missing, contributed } = part;
    setText(name, part.part ? `part ${part.part}` : "");
    name.hidden = !part.part;
    setText(state, [
      round ? `round ${round} took ${duration(rounds.at(-1)?.[1])}` : "no round yet",
      `the next one is ${part.state}, ${contributed} in`,
      missing.length ? `waits for ${missing.join(", ")}` : "",
    ].filter(Boolean).join("; "));
    setText(axis.firstChild, rounds.length ? `round ${rounds[0][0]}` : "");
    setText(axis.lastChild, rounds.length > 1 ? `round ${rounds.at(-1)[0]}` : "");
    heads.hidden = rows.hidden = !part.members.length;
    const members = part.members.map((one) => ({ ...one, rounds }));
    sync(rows, members, (one) => one.name, makeMember);
    setText(more, `and ${part.left_out} more members`);
    more.hidden = !part.left_out;
  }
  return [node, update];
}

function makeMember() {
  const who = element("span", "name");
  const svg = shape("svg", { class: "strip", preserveAspectRatio: "none", role: "img" });
  const share = element("span", "number");
  const late = element("span", "number");
  const node = element("div", "round", who, svg, share, late);
  let shown = null;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * shown.rounds.length);
    if (shown.rounds[at]) showTip(event, shown.name, cellText(shown.rounds[at], shown.cells[at]));
  });
  svg.addEventListener("pointerleave", hideTip);

  function update(member) {
    shown = member;
    const { name, where, gone, cells } = member;
    setText(who, name);
    who.title = where;
    node.classList.toggle("gone", gone);
    svg.setAttribute("viewBox", `0 0 ${cells.length || 1} ${HEIGHT}`);
    svg.setAttribute("aria-label", `the last rounds of ${name}`);
    svg.replaceChildren(...cells.map(([kind], at) => shape("rect", {
      x: at, width: 1 - GAP, y: 0, height: HEIGHT, "data-kind": kind,
    })));
    const count = cells.filter(([kind]) => kind === "in").length;
    setText(share, `${count} of ${cells.length}`);
    const last = cells.findLast(([kind]) => kind === "late");
    setText(late, last ? duration(last[1]) : "");
  }
  return [node, update];
}

function cellText([round, seconds], [kind, value]) {
  const what = {
    in: `it is in, with weight ${value}`, late: `it came ${duration(value)} too late`,
    out: "it is not in it",
  };
  return `round ${round}, which took ${duration(seconds)}: ${what[kind]}`;
}
