// One channel of weights: who publishes, which version each subscriber has, and what happened.
import { bytes, duration, element, setText, sync } from "./dom.js";
import { showEvents } from "./group.js";
import { makePlot } from "./plot.js";

const PLOTS = [
  { title: "Furthest behind", lines: [["behind", "behind"]], format: duration },
  { title: "Received/s", lines: [["received", "recv"]], format: bytes },
];
const HEADS = ["version", "behind", "newest", "memory", "sent", "recv", "deltas"];

export function makeChannel() {
  const name = element("h2", "");
  const state = element("span", "state");
  const heads = element("tr", "", element("th", "", "participant"),
    ...HEADS.map((text) => element("th", "number", text)));
  const body = element("tbody", "");
  const table = element("table", "", element("thead", "", heads), body);
  const more = element("p", "more");
  const plots = PLOTS.map(makePlot);
  const events = element("ol", "events");
  const history = element("details", "happened", element("summary", "", "What happened"), events);
  history.open = true;
  const node = element("section", "group channel", element("header", "", name, state),
    element("div", "scroll", table), more,
    element("div", "plots", ...plots.map(([plot]) => plot)), history);

  function update(channel) {
    setText(name, channel.name);
    name.title = channel.run ? `run ${channel.run}` : "";
    const { newest, nbytes, count } = channel;
    const version = newest === null ? "no version yet" : `version ${newest}, ${bytes(nbytes)}`;
    setText(state, `channel, ${version}, ${count} subscriber${count === 1 ? "" : "s"}`);
    const rows = [
      ...channel.publishers.map((one) => ({ ...one, publishes: true })),
      ...channel.subscribers,
    ];
    sync(body, rows, ({ key }) => key, makeParticipant);
    setText(more, `and ${channel.left_out} more subscribers, none of which is further behind`);
    more.hidden = !channel.left_out;
    plots.forEach(([, draw]) => draw(channel.series, channel.seconds));
    showEvents(events, channel.events);
    history.hidden = !channel.events.length;
  }
  return [node, update];
}

function makeParticipant() {
  const who = element("span", "name");
  const role = element("span", "role");
  const bar = element("progress", "");
  const cells = HEADS.map(() => element("td", "number"));
  const node = element("tr", "", element("td", "", who, role), ...cells);

  function update({ name, where, publishes, said }) {
    setText(who, name);
    who.title = where;
    setText(role, publishes ? "publishes" : "");
    role.hidden = !publishes;
    node.dataset.kind = said === null ? "silent" : said.behind ? "behind" : "";
    if (said === null) {
      cells.forEach((cell, at) => setText(cell, at === 1 ? "no sign of life" : ""));
      return;
    }
    const { version, lag, behind, here, nbytes, memory, sent, received } = said;
    const deltas = [
      said.changed ? `${(100 * said.changed).toFixed(2)} % changed` : "",
      said.chain > 1 ? `chain of ${said.chain}` : "",
      said.saved ? `${bytes(said.saved)} saved` : "",
      said.fallbacks ? `${said.fallbacks} chunks failed` : "",
    ].filter(Boolean).join(", ");
    const far = lag ? `by ${lag}, ${duration(behind)}` : duration(behind);
    const texts = [version ?? "none", behind ? far : "", null, bytes(memory), bytes(sent),
      bytes(received), deltas];
    texts.forEach((text, at) => { if (text !== null) setText(cells[at], String(text)); });
    bar.value = here;
    bar.max = nbytes || 1;
    bar.title = `${bytes(here)} of ${bytes(nbytes)} of version ${said.newest} are here`;
    cells[2].replaceChildren(...(nbytes ? [bar] : []));
  }
  return [node, update];
}
