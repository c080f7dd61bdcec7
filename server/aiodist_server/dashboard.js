// Asks for the status again and again, and shows it. All text from the network is set as text.
"use strict";

const EVERY_MS = 2000;
const COLUMNS = ["rank", "name", "host", "pid", "calls/s", "sent/s", "recv/s", "doing"];
const NUMBERS = new Set(["rank", "pid", "calls/s", "sent/s", "recv/s"]);

let before = new Map(); // by member: what it had done, and when it said so

function element(kind, text, className) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function doingText(member) {
  const doing = member.doing;
  if (doing === null) return `no answer; last sign of life ${duration(member.silent)} ago`;
  const at = doing.places.length ? ` at ${doing.places[0]}` : "";
  if (doing.busy) return `busy for ${duration(doing.busy)}${at}`;
  if (!doing.waits.length) return `in no operation${at}`;
  const wait = doing.waits[0];
  const missing = wait.missing ? `, for ${wait.missing}` : "";
  const lacking = wait.lacking ? `, ${wait.lacking}` : "";
  const more = doing.waits.length > 1 ? ` (and ${doing.waits.length - 1} more)` : "";
  return `${duration(wait.seconds)} in ${wait.what}${missing}${lacking}${more}${at}`;
}

function rates(last, said) {
  const seconds = last ? said.when - last.when : 0;
  if (seconds < 0.01) return ["", "", ""]; // new, or the same word of a rank that is busy
  return [
    ((said.collectives - last.collectives) / seconds).toFixed(1),
    bytes((said.sent - last.sent) / seconds),
    bytes((said.received - last.received) / seconds),
  ];
}

function table(group, now, after) {
  const culprits = new Set(group.findings.flatMap((finding) => finding.culprits));
  const made = element("table");
  const head = made.createTHead().insertRow();
  for (const name of COLUMNS) head.append(element("th", name, NUMBERS.has(name) ? "number" : ""));
  const body = made.createTBody();
  for (const member of group.members) {
    let rate = ["", "", ""];
    if (member.doing !== null) {
      const { collectives, sent, received, age } = member.doing;
      const key = `${group.run_id} ${member.rank} ${member.joined_at}`;
      const said = { when: now - age, collectives, sent, received };
      rate = rates(before.get(key), said);
      after.set(key, said);
    }
    const cells = [member.rank, member.name, member.host, member.pid, ...rate, doingText(member)];
    const row = body.insertRow();
    if (culprits.has(member.rank)) row.className = "culprit";
    cells.forEach((cell, index) => {
      row.append(element("td", cell, NUMBERS.has(COLUMNS[index]) ? "number" : ""));
    });
  }
  return made;
}

function section(group, now, after) {
  const state = group.epoch === null
    ? `forming, ${group.waiting.length} of ${group.wanted} here`
    : `epoch ${group.epoch}, ${group.members.length} of ${group.size} ranks`;
  const made = element("section");
  made.append(element("h2", `group ${group.name}: ${state}`), table(group, now, after));
  for (const [rank, reason] of Object.entries(group.lost)) {
    made.append(element("p", `rank ${rank} is lost: ${reason}`, "problem"));
  }
  for (const finding of group.findings) {
    const single = finding.culprits.length === 1;
    const who = `${single ? "rank" : "ranks"} ${finding.culprits.join(", ")}`;
    let text = `${who} ${single ? "holds" : "hold"} up others`;
    if (finding.lacking) text = finding.lacking;
    else if (finding.deadlock) text = `${who} wait for each other`;
    made.append(element("p", text, "problem"));
  }
  return made;
}

async function show() {
  const state = document.getElementById("state");
  try {
    const response = await fetch("status");
    if (!response.ok) throw new Error(await response.text());
    const found = await response.json();
    const now = performance.now() / 1000;
    const after = new Map();
    const sections = found.groups.map((group) => section(group, now, after));
    document.getElementById("groups").replaceChildren(...sections);
    before = after;
    document.getElementById("address").textContent = found.address;
    document.getElementById("command").textContent = found.address;
    const draining = found.draining ? "draining: it takes no new members; " : "";
    const count = found.groups.length;
    state.textContent = `${draining}${count} group${count === 1 ? "" : "s"}`;
    state.className = "";
  } catch (error) {
    state.textContent = `no answer: ${error.message}; asking again`;
    state.className = "problem";
  }
  setTimeout(show, EVERY_MS);
}

show();
