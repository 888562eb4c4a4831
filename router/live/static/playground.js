// A conversation with the model, streamed, and where the time of the last answer went.

import { byId, make } from "./dom.js";
import { call, events } from "./api.js";
import { showWaterfall } from "./waterfall.js";

const WAITING = "…";
const turns = [];
let running = null;

export function startPlayground(onDone) {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send(onDone);
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(onDone);
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
}

function clear() {
  running?.abort();
  turns.length = 0;
  byId("conversation").replaceChildren();
  byId("waterfall").replaceChildren();
  byId("message").focus();
}

async function send(onDone) {
  const text = byId("message").value.trim();
  if (!text || running) return;
  running = new AbortController();
  setRunning(true);
  byId("message").value = "";
  byId("waterfall").replaceChildren();
  const turn = { role: "user", content: text };
  turns.push(turn);
  show("user", text);
  const bubble = show("assistant", WAITING);
  try {
    const { requestId, answer } = await stream(running.signal, bubble);
    turns.push({ role: "assistant", content: answer });
    await showWaterfall(requestId);
  } catch (error) {
    if (turns.at(-1) !== turn) return; // the conversation was cleared
    const wasStopped = error.name === "AbortError";
    if (wasStopped && bubble.textContent !== WAITING) {
      turns.push({ role: "assistant", content: bubble.textContent });
    } else {
      turns.pop();
      bubble.className = "turn error";
      bubble.textContent = wasStopped ? "stopped" : error.message;
    }
  } finally {
    running = null;
    setRunning(false);
    onDone();
  }
}

async function stream(signal, bubble) {
  const response = await call("v1/chat/completions", { body: body(), signal });
  const requestId = response.headers.get("X-Request-Id");
  let answer = "";
  let id = requestId;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    id = requestId ?? chunk.id;
    const delta = chunk.choices?.[0]?.delta ?? {};
    answer += delta.content ?? "";
    if (answer) bubble.textContent = answer;
    follow();
  }
  if (!answer) bubble.textContent = "(no text)";
  return { requestId: id, answer };
}

function body() {
  const system = byId("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...turns] : turns,
    stream: true,
    temperature: Number(byId("temperature").value),
    max_tokens: Math.max(Number(byId("max-tokens").value) || 1, 1),
  };
}

function show(role, text) {
  const bubble = make("div", { name: `turn ${role}`, text });
  byId("conversation").append(bubble);
  follow();
  return bubble;
}

function follow() {
  const place = byId("conversation");
  place.scrollTop = place.scrollHeight;
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
}
