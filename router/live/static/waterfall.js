// Where a request's time went: the spans of GET /v1/requests/{id}/trace, one a line.

import { byId, make, milliseconds, svg } from "./dom.js";
import { call, Refused } from "./api.js";

const WAITS = ["queue", "prefill_queue", "decode_queue", "first_choice", "other_choices"];
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
    trace.state === "finished" ? "" : trace.state,
    `${trace.prompt_tokens} prompt tokens`,
    `${trace.completion_tokens} tokens`,
    trace.cached_tokens ? `${trace.cached_tokens} cached` : "",
    trace.num_choices > 1 ? `${trace.num_choices} choices` : "",
    trace.gaps.count ? `${milliseconds(trace.gaps.p50_ms)} between tokens, ${milliseconds(trace.gaps.max_ms)} at most` : "",
  ];
  place.replaceChildren(
    make("h3", { text: `Where ${milliseconds(trace.total_ms)} went` }),
    make("p", { text: facts.filter(Boolean).join(" · ") }),
    ...parts(trace, total),
    ...(trace.other_choices ?? []).flatMap((other) => [make("h3", { text: `Choice ${other.index + 1}` }), ...parts(other, total)]),
  );
}

// The spans of one choice, each behind what it lies in, then what was chosen for it, and what went wrong.
function parts(trace, total) {
  const inside = (index) => trace.spans.filter((span) => (span.parent ?? null) === index);
  const lines = trace.spans.flatMap((span, index) => (inside(null).includes(span) ? [span, ...inside(index)] : []));
  const troubles = trace.spans.map((span) => span.attributes.error ?? span.attributes.reason).filter(Boolean);
  return [
    ...lines.map((span) => line(span, total)),
    ...trace.choices.map((choice) => make("p", { name: "chosen", text: choiceText(choice) })),
    ...(trace.state === "finished" ? [] : troubles.map((text) => make("p", { name: "trouble", text }))),
  ];
}

function choiceText(choice) {
  const others = choice.alternatives.map((option) => planText(option)).join(", ");
  return `${planText({ ...choice.chosen, predicted_ttft_ms: choice.predicted_ttft_ms })}: ${choice.reason.replaceAll("_", " ")}${others ? `; instead of ${others}` : ""}`;
}

function planText({ prefill, decode, head_tokens: head, predicted_ttft_ms: ttft }) {
  const where = [...new Set([prefill, decode].filter(Boolean))].join(" → ");
  const split = head ? `, the first computes ${head} tokens of the prompt` : "";
  return `${where}${split}${ttft === null || ttft === undefined ? "" : ` (first token in ${milliseconds(ttft)})`}`;
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
    make("output", { text: span.duration_ms ? milliseconds(span.duration_ms) : `at ${milliseconds(span.start_ms)}` }),
  );
  return element;
}
