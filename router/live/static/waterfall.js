// Where a request's time went: the spans of GET /v1/requests/{id}/trace, one a line.

import { byId, make, milliseconds, svg } from "./dom.js";
import { call, Refused } from "./api.js";

const WAITS = ["queue", "prefill_queue", "decode_queue"];
const MOVES = ["transfer", "transfer_part", "move"];
const TRIES = 8;
const WIDTH = 1000;

export async function showWaterfall(requestId) {
  const place = byId("waterfall");
  try {
    draw(place, await traceOf(requestId));
  } catch (error) {
    const text = error instanceof Refused && error.status === 404 ? "No trace of this request." : `No trace: ${error.message}`;
    place.replaceChildren(make("p", { text }));
  }
}

// A trace may be completed a moment after the last token.
async function traceOf(requestId) {
  for (let tries = 1; ; tries += 1) {
    const trace = await (await call(`v1/requests/${encodeURIComponent(requestId)}/trace`)).json();
    if (trace.state !== "running" || tries === TRIES) return trace;
    await new Promise((resolve) => setTimeout(resolve, 100 * tries));
  }
}

function draw(place, trace) {
  const total = Math.max(trace.total_ms, 0.001);
  const facts = [
    `${trace.prompt_tokens} prompt tokens`,
    `${trace.completion_tokens} tokens`,
    trace.cached_tokens ? `${trace.cached_tokens} cached` : "",
    trace.choices?.[0]?.reason ?? "",
  ];
  place.replaceChildren(
    make("h3", { text: `Where ${milliseconds(trace.total_ms)} went` }),
    make("p", { text: facts.filter(Boolean).join(" · ") }),
    ...trace.spans.map((span) => line(span, total)),
  );
}

function line(span, total) {
  const kind = WAITS.includes(span.name) ? "is-wait" : MOVES.includes(span.name) ? "is-move" : "is-work";
  const bar = svg("rect", {
    x: (WIDTH * span.start_ms) / total,
    y: 2,
    width: Math.max((WIDTH * span.duration_ms) / total, 2),
    height: 12,
    rx: 2,
  });
  const chart = svg("svg", { class: kind, viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", "aria-hidden": "true" }, bar);
  const isChild = span.parent !== null && span.parent !== undefined;
  const element = make(
    "div",
    { name: isChild ? "span child" : "span", title: span.where ?? "" },
    make("b", { text: span.name.replaceAll("_", " ") }),
    chart,
    make("output", { text: milliseconds(span.duration_ms) }),
  );
  return element;
}
