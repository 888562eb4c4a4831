// The state of the cluster, kept up to date from GET /admin/events (docs/live-page.md).

import { call, events, Refused } from "./api.js";

const SILENCE_MS = 8000;
const RETRY_MS = [500, 1000, 2000, 5000];
const MAX_ENTRIES = 256;

// RFC 7396.
export function patched(target, patch) {
  const changed = { ...target };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete changed[name];
    else if (typeof value === "object" && !Array.isArray(value)) changed[name] = patched(changed[name] ?? {}, value);
    else changed[name] = value;
  }
  return changed;
}

export class ClusterStream {
  // `onChange(state, timeline)`, `onConnection("live" | "lost")`, `onRefused(status, reason)`.
  constructor({ onChange, onConnection, onRefused }) {
    Object.assign(this, { onChange, onConnection, onRefused });
    this.state = null;
    this.timeline = [];
    this.tries = 0;
    this.run = 0;
  }

  restart() {
    this.run += 1;
    this.abort?.abort();
    this.tries = 0;
    this.follow(this.run);
  }

  async follow(run) {
    while (run === this.run) {
      try {
        await this.read();
      } catch (error) {
        if (run !== this.run) return;
        if (error instanceof Refused && [401, 403].includes(error.status)) {
          this.onRefused(error.status, error.message);
          return;
        }
      }
      if (run !== this.run) return;
      this.onConnection("lost");
      const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
      this.tries += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async read() {
    const abort = new AbortController();
    this.abort = abort;
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await call("admin/events", { signal: abort.signal, accept: "text/event-stream" });
      for await (const { name, data } of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
        this.take(name, JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }

  take(name, told) {
    if (name === "snapshot") {
      this.state = told.state;
      this.timeline = told.timeline;
      this.tries = 0;
      this.onConnection("live");
    } else if (name === "delta") {
      this.state = patched(this.state, told.patch);
    } else if (name === "event") {
      this.timeline = [...this.timeline, told].slice(-MAX_ENTRIES);
    }
    this.onChange(this.state, this.timeline);
  }
}
