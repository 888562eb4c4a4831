// Workers as cards: whose the KV blocks are, how fast it goes, what waits, and an operator's orders.

import { byId, count, make, setText, svg } from "./dom.js";

const OWNERS = ["running", "leased", "loading", "early", "cached", "free"];
const MEANING = {
  running: "held by running requests",
  leased: "kept for a reader on another worker",
  loading: "being filled from another worker or a tier",
  early: "held for requests that will arrive",
  cached: "free, but with content that can be reused",
  free: "without content",
};
const STATES = { left_out: "left out", running: "running", draining: "draining", starting: "starting", silent: "silent" };
const NUM_POINTS = 60;
const GONE_MS = 6000;

const cards = new Map();

export function showLegend() {
  byId("legend").replaceChildren(
    ...OWNERS.map((owner) => make("li", { title: MEANING[owner] }, make("span", { name: `swatch kv-${owner}` }), owner)),
  );
}

// `orders(action, replica, role)` carries out what a button says.
export function showWorkers(state, orders) {
  const names = Object.keys(state.workers).sort((a, b) => place(state, a).localeCompare(place(state, b)));
  const grid = byId("workers");
  for (const name of names) {
    let card = cards.get(name);
    if (!card) {
      card = newCard(name, orders);
      cards.set(name, card);
    }
    const before = grid.children[names.indexOf(name)];
    if (before !== card.element) grid.insertBefore(card.element, before ?? null);
    fill(card, name, state);
  }
  for (const [name, card] of cards) if (!(name in state.workers)) leave(name, card);
}

const place = (state, name) => `${state.pools.indexOf(state.workers[name].role)} ${name}`;

// The role that an order would have a worker lean to: the next one.
const nextRole = (pools, leaning) => pools[(pools.indexOf(leaning) + 1) % pools.length];

function newCard(name, orders) {
  const part = {
    title: make("h3", { text: shortName(name), title: name }),
    role: make("span", { name: "role" }),
    state: make("span", { name: "state" }),
    bar: make("div", { name: "bar", role: "img" }, ...OWNERS.map((owner) => make("i", { name: `kv-${owner}` }))),
    line: svg("polyline", { points: "" }),
    speed: make("span", { name: "speed" }),
    queue: make("p", { name: "queue" }),
    drain: make("button", { text: "Drain", name: "quiet small", type: "button" }),
    lean: make("button", { text: "Lean", name: "quiet small", type: "button" }),
    points: Array(NUM_POINTS).fill(0),
    seenAt: 0,
  };
  const spark = svg("svg", { class: "spark", viewBox: `0 0 ${NUM_POINTS - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, part.line);
  part.element = make(
    "article",
    { name: "card", "data-replica": name },
    make("header", {}, part.title, part.role, part.state),
    part.bar,
    make("div", { name: "line" }, spark, part.speed),
    make("div", { name: "foot" }, part.queue, make("div", { name: "actions" }, part.drain, part.lean)),
  );
  part.drain.setAttribute("aria-label", `Drain ${name}`);
  part.drain.addEventListener("click", () => orders("drain", name));
  part.lean.addEventListener("click", () => orders("lean", name, part.next));
  return part;
}

function fill(card, name, state) {
  const worker = state.workers[name];
  card.next = nextRole(state.pools, worker.leaning);
  clearTimeout(card.leaving);
  card.leaving = undefined;
  card.element.className = `card ${worker.state}`;
  const leans = worker.leaning !== worker.role ? ` · leans to ${worker.leaning}` : "";
  const keeps = worker.keeps_to ? ` · ${worker.keeps_to}s only` : "";
  setText(card.role, worker.role + leans + keeps);
  card.state.className = `state ${worker.state}`;
  setText(card.state, worker.unhealthy ?? STATES[worker.state] ?? worker.state);
  showBlocks(card.bar, worker.kv);
  if (state.at_unix_s !== card.seenAt) {
    card.seenAt = state.at_unix_s;
    card.points = [...card.points, worker.tokens_per_s + worker.prompt_tokens_per_s].slice(-NUM_POINTS);
    card.line.setAttribute("points", points(card.points));
  }
  setText(card.speed, `${count(worker.tokens_per_s + worker.prompt_tokens_per_s)} tok/s`);
  setText(card.queue, queueText(worker));
  const takesOrders = state.takes_orders && worker.state === "running";
  card.drain.disabled = !takesOrders;
  card.lean.hidden = state.roles !== "elastic";
  card.lean.disabled = !takesOrders;
  setText(card.lean, `Lean to ${card.next}`);
  card.lean.setAttribute("aria-label", `Have ${name} lean to ${card.next}`);
}

function showBlocks(bar, kv) {
  const total = Math.max(kv.total, 1);
  OWNERS.forEach((owner, at) => {
    bar.children[at].style.flexBasis = `${(100 * kv[owner]) / total}%`;
    bar.children[at].classList.toggle("some", kv[owner] > 0);
  });
  const text = OWNERS.filter((owner) => kv[owner]).map((owner) => `${owner} ${count(kv[owner])}`).join(", ");
  bar.setAttribute("aria-label", `${count(kv.total)} KV blocks: ${text}`);
  bar.title = text;
}

function points(values) {
  const most = Math.max(...values, 1);
  const start = NUM_POINTS - values.length;
  return values.map((value, at) => `${start + at},${(19 - (18 * value) / most).toFixed(1)}`).join(" ");
}

function queueText({ queue, kv }) {
  const parts = [];
  if (queue.running) parts.push(`${queue.running} running`);
  if (queue.loading) parts.push(`${queue.loading} loading`);
  if (queue.waiting) parts.push(`${queue.waiting} waiting`);
  if (queue.prompt_tokens) parts.push(`${count(queue.prompt_tokens)} prompt tokens queued`);
  const used = kv.total - kv.free - kv.cached;
  return `${parts.join(", ") || "idle"} · KV ${Math.round((100 * used) / Math.max(kv.total, 1))}%`;
}

function leave(name, card) {
  if (card.leaving !== undefined) return;
  card.element.className = "card gone";
  card.state.className = "state gone";
  setText(card.state, "gone");
  setText(card.queue, "");
  setText(card.speed, "");
  card.drain.disabled = card.lean.disabled = true;
  card.leaving = setTimeout(() => {
    card.element.remove();
    cards.delete(name);
  }, GONE_MS);
}

export const shortName = (name) => (name.length > 18 ? name.slice(0, 14) + "…" : name);
