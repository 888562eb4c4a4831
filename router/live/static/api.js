// Requests to the router that served this page, with the key of this tab. The key is kept nowhere else.

const KEY = "baton-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, { body, signal, accept } = {}) {
  const headers = {};
  if (accept) headers.Accept = accept;
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (!response.ok) throw new Refused(response.status, await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}

// The events of a stream: {name, data}, where data is text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield eventOf(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(part) {
  let name = "message";
  const data = [];
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { name, data: data.join("\n") };
}
