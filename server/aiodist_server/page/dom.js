// Small helpers. All text from the network is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(kind, className, ...children) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function shape(kind, attributes) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Let `parent` hold one node for each item, in that order. A node stays the same for as long as its
// item is there, so that what is open stays open, and what is read is not moved away.
// `make(item)` gives [node, update].
export function sync(parent, items, keyOf, make) {
  const before = parent.kept ?? new Map();
  const wanted = new Map();
  for (const item of items) {
    let key = keyOf(item);
    while (wanted.has(key)) key = `${key} #`; // items may look alike, as two ranks of one name
    wanted.set(key, item);
  }
  // First, or each node behind one of these would be moved.
  for (const [key, [node]] of before) if (!wanted.has(key)) node.remove();
  const kept = new Map();
  let next = parent.firstChild;
  for (const [key, item] of wanted) {
    const [node, update] = before.get(key) ?? make(item);
    kept.set(key, [node, update]);
    update(item);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
  parent.kept = kept;
}

// Numbers for people.

export function rate(count) {
  if (count === null || count === undefined) return "–";
  if (count >= 10000) return `${(count / 1000).toFixed(0)} k`;
  return count >= 10 || count === 0 ? count.toFixed(0) : count.toFixed(1);
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit && count < 99.95 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Of times that are short: "12 µs", "3.4 ms".
export function shortly(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return duration(seconds);
  const [count, unit] = seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return `${count < 9.95 ? count.toFixed(1) : Math.round(count)} ${unit}`;
}

// "14:03:07 CET": whoever reads it may be elsewhere than the ranks, and their logs.
export function clock(ago) {
  return new Date(Date.now() - ago * 1000)
    .toLocaleTimeString([], { hour12: false, timeZoneName: "short" });
}

// One box with what is under the pointer.

const tip = document.getElementById("tip");

export function showTip(event, ...lines) {
  tip.replaceChildren(...lines.map((line) => element("div", "", line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - width - 8);
  const above = event.clientY - height - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above < 8 ? event.clientY + 16 : above}px`;
}

export function hideTip() {
  tip.hidden = true;
}
