// What is told of the cluster beside its workers: figures, timeline, hand-overs, tiers and choices.

import { byId, bytes, clock, count, make } from "./dom.js";
import { call } from "./api.js";

const SHOWN_ENTRIES = 120;
const TIER_NAMES = { host: "Memory", disk: "Disk" };
const REASONS = {
  colocated: "one worker does both",
  apart: "two workers",
  overflow_to_prefill: "tokens on a prompt worker",
  overflow_to_decode: "prompt on a token worker",
  models_unknown: "no predictions yet",
  override: "a setting decides",
  session: "its session's worker",
  leader: "follows its first choice",
  split: "two workers share the prompt",
};
let lastEntry = -1;
let shownRequests = "";

export function showFigures(state) {
  const { totals, routers } = state;
  const sum = (key) => Object.values(routers).reduce((all, router) => all + router[key], 0);
  const workers = Object.values(state.workers);
  const up = workers.filter((worker) => worker.state === "running").length;
  const wanted = Object.values(state.wanted).reduce((all, number) => all + number, 0);
  const due = Math.max(workers.length, wanted);
  const figures = [
    [count(totals.tokens_per_s), "tokens/s"],
    [count(totals.prompt_tokens_per_s), "prompt tokens/s"],
    [count(sum("in_progress")), "requests in progress"],
    [count(sum("waiting")), "wait for room"],
    [`${up} / ${due}`, "workers running", up < due],
    [count(totals.failed), "failed", totals.failed > 0],
  ];
  byId("figures").replaceChildren(
    ...figures.map(([value, label, isBad]) =>
      make("div", { name: isBad ? "figure bad" : "figure" }, make("b", { text: value }), make("span", { text: label })),
    ),
  );
}

export function showTimeline(timeline) {
  const newest = timeline.at(-1)?.number ?? 0;
  if (newest === lastEntry) return;
  lastEntry = newest;
  const list = byId("timeline");
  if (!timeline.length) {
    list.replaceChildren(make("p", { name: "empty", text: "Nothing happened yet." }));
    return;
  }
  list.replaceChildren(...timeline.slice(-SHOWN_ENTRIES).reverse().map(entryOf));
}

function entryOf(entry) {
  const text = make("span", { text: entry.text });
  if (entry.replica) text.append(" ", make("small", { text: entry.replica }));
  const kind = make("i", { title: entry.kind.replaceAll("_", " "), role: "img", "aria-label": entry.kind.replaceAll("_", " ") });
  return make("li", { name: `is-${entry.kind}` }, make("time", { text: clock(entry.at_unix_s) }), kind, text);
}

export function showHandOvers({ hand_overs: moved, tiers, totals }) {
  const rows = [
    ["Hand-overs", count(moved.count)],
    ["KV moved", bytes(moved.bytes)],
    ["Now", `${bytes(totals.kv_bytes_per_s)}/s`],
    ["Blocks handed over early", count(moved.streamed_blocks)],
    ["Failed loads", count(moved.failed)],
    ["Leases that ran out", count(moved.leases_expired)],
    ["Tokens computed again", count(totals.recomputed_tokens)],
  ];
  for (const [name, tier] of Object.entries(tiers)) {
    if (!tier.stored_blocks && !tier.hit_blocks) continue;
    rows.push([`${TIER_NAMES[name] ?? name} tier: stored`, bytes(tier.stored_bytes)]);
    rows.push([`${TIER_NAMES[name] ?? name} tier: loaded`, bytes(tier.loaded_bytes)]);
  }
  byId("hand-overs").replaceChildren(
    ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]),
  );
}

export function showChoices({ choices, roles }) {
  const all = Object.values(choices).reduce((sum, value) => sum + value, 0);
  if (!all) {
    const text = roles === "elastic" ? "No request was placed yet." : "Roles are fixed: each request goes to both pools, as their policies choose.";
    byId("choices").replaceChildren(make("p", { name: "empty", text }));
    return;
  }
  const rows = Object.entries(choices).filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
  byId("choices").replaceChildren(
    ...rows.map(([reason, value]) => {
      const share = make("i");
      share.style.width = `${(100 * value) / all}%`;
      const label = make("span", { text: REASONS[reason] ?? reason, title: reason });
      return make("div", { name: "share" }, label, make("span", { name: "track" }, share), make("span", { text: count(value) }));
    }),
  );
}

// The last requests and who was chosen for them, where the router keeps traces. `onOpen(id)` shows one of them.
export async function showRecent(onOpen) {
  let requests;
  try {
    requests = await (await call("v1/requests?limit=6")).json();
  } catch {
    shownRequests = "";
    byId("recent").replaceChildren();
    return;
  }
  const rows = requests.data ?? requests.requests ?? requests;
  if (!Array.isArray(rows) || !rows.length) return;
  const told = JSON.stringify(rows.map(({ id, state, prefill, decode, reason }) => [id, state, prefill, decode, reason]));
  if (told === shownRequests) return;
  shownRequests = told;
  const focused = byId("recent").contains(document.activeElement) ? document.activeElement.dataset.request : undefined;
  let toFocus;
  byId("recent").replaceChildren(
    make(
      "ul",
      { name: "recent" },
      ...rows.map((row) => {
        const way = [...new Set([row.prefill, row.decode].filter(Boolean))].join(" → ");
        const open = make("button", { type: "button", name: "link", "data-request": row.id, text: way || row.state, title: `Where the time of ${row.id} went` });
        open.addEventListener("click", () => onOpen(row.id));
        if (row.id === focused) toFocus = open;
        return make("li", {}, open, make("span", { text: (row.reason ?? "").replaceAll("_", " ") }));
      }),
    ),
  );
  toFocus?.focus({ preventScroll: true }); // whoever is there with the keyboard stays there
}
