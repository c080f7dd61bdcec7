// Hears what the coordinator tells, and shows it. Each event is the whole picture.
import { setText, sync } from "./dom.js";
import { makeAverager } from "./averager.js";
import { makeChannel } from "./channel.js";
import { makeGroup, showEvents } from "./group.js";
import { makeLatencies } from "./latencies.js";

const AGAIN_MS = 3000;
const by = (id) => document.getElementById(id);
const showLatencies = makeLatencies(by("latencies"));

function show(shown) {
  by("problem").hidden = !shown.problem;
  setText(by("problem"), shown.problem ? `The coordinator: ${shown.problem}` : "");
  document.body.classList.toggle("stale", Boolean(shown.problem));
  if (shown.problem) return;
  const { address, count, draining, groups } = shown;
  setText(by("address"), address);
  setText(by("command"), address);
  const drains = draining ? ", draining: it takes no new members" : "";
  setText(by("count"), `${count} group${count === 1 ? "" : "s"}${drains}`);
  const known = ({ name, run }) => JSON.stringify([name, run]);
  sync(by("groups"), groups.map((group) => ({ ...group, seconds: shown.window })), known, makeGroup);
  const channels = shown.channels.map((one) => ({ ...one, seconds: shown.window }));
  sync(by("channels"), channels, known, makeChannel);
  sync(by("averagers"), shown.averagers, known, makeAverager);
  by("empty").hidden = groups.length + channels.length + shown.averagers.length > 0;
  const unnamed = shown.others_left_out ? `, and ${shown.others_left_out} more` : "";
  setText(by("others"), `Not shown: ${shown.others.join(", ")}${unnamed}`);
  by("others").hidden = !shown.others.length;
  showLatencies(shown.latencies, shown.window);
  showEvents(by("elsewhere").querySelector("ol"), shown.events);
  by("elsewhere").hidden = !shown.events.length;
  const verdict = groups.flatMap((group) => group.findings).map(({ text }) => text)[0];
  document.title = verdict ? `${verdict} · aiodist` : `aiodist ${address}`;
  document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
}

function state(kind, text) {
  by("live").dataset.state = kind;
  setText(by("live"), text);
  document.body.classList.toggle("stale", kind !== "live");
}

let source = null;

function listen() {
  source = new EventSource("events");
  source.onmessage = ({ data }) => {
    state("live", "live");
    show(JSON.parse(data));
  };
  source.onerror = () => {
    state("lost", "no connection, trying again");
    if (source.readyState !== EventSource.CLOSED) return; // the browser tries by itself
    source = null;
    setTimeout(() => { if (!document.hidden && source === null) listen(); }, AGAIN_MS);
  };
}

// Nobody looks at a page in the background: it costs nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    source = null;
  } else if (source === null) {
    listen();
  }
});
listen();
