// Brings the parts of the page together: the stream of the cluster, the key, and orders.

import { byId, setText } from "./dom.js";
import { call, key } from "./api.js";
import { ClusterStream } from "./stream.js";
import { showFigures, showChoices, showHandOvers, showRecent, showTimeline } from "./panels.js";
import { showLegend, showWorkers } from "./workers.js";
import { showFaults, startFaults } from "./faults.js";
import { startPlayground } from "./playground.js";
import { showWaterfall } from "./waterfall.js";

const TOAST_MS = 6000;
const RECENT_MS = 5000;

const stream = new ClusterStream({
  onChange(state, timeline) {
    setText(byId("model"), state.model);
    showFigures(state);
    showWorkers(state, order);
    showTimeline(timeline);
    showHandOvers(state);
    showChoices(state);
    showFaults(state);
  },
  onConnection(state) {
    byId("refused").hidden = true;
    connection(state, state === "live" ? "live" : "connection lost, trying again");
    if (state === "live") recent();
  },
  onRefused(status, reason) {
    connection("lost", "refused");
    byId("refused").hidden = false;
    setText(byId("refused-reason"), reason);
    byId("key").focus();
  },
});

function connection(state, text) {
  byId("connection").className = `connection ${state}`;
  setText(byId("connection-text"), text);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  connection("", "connecting");
  stream.restart();
});

byId("key-button").addEventListener("click", () => {
  byId("refused").hidden = !byId("refused").hidden;
  setText(byId("refused-title"), key.get() ? "Another key" : "A key for this cluster");
  setText(byId("refused-reason"), "An admin key opens everything here; a user's key opens the playground.");
  byId("key").focus();
});

byId("show-traffic").addEventListener("change", (event) => {
  byId("timeline").classList.toggle("without-traffic", !event.target.checked);
});

function order(action, replica, role) {
  const asked = {
    drain: {
      title: "Drain this worker?",
      text: `${replica} finishes its requests or moves them to others, then stops; the cluster starts a replacement.`,
      body: { replica },
      done: `${replica} drains`,
    },
    lean: {
      title: `Have this worker lean to ${role}?`,
      text: `${replica} prefers the work of ${role} from now on; its running requests continue.`,
      body: { replica, role },
      done: `${replica} leans to ${role}`,
    },
  }[action];
  return give(action, asked);
}

// Gives an order once it was confirmed, and says what became of it.
async function give(action, { title, text, body, done }) {
  if (!(await confirmed(title, text))) return;
  try {
    await call(`admin/${action}`, { body });
    toast(done);
  } catch (error) {
    toast(error.message);
    if (error.status === 401) byId("refused").hidden = false;
  }
}

function confirmed(title, text) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

const recent = () => showRecent(openTrace);

async function openTrace(id) {
  await showWaterfall(id);
  byId("waterfall").scrollIntoView({ block: "nearest" });
}

let hiding;

function toast(text) {
  setText(byId("toast"), text);
  byId("toast").hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => {
    byId("toast").hidden = true;
  }, TOAST_MS);
}

showLegend();
startFaults((asked) => give("faults", asked));
startPlayground(recent);
setInterval(recent, RECENT_MS);
stream.restart();
