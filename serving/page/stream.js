// Requests to this server: headers, errors in words, and server-sent events.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

async function ask(path, key, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(key), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server can't be reached. Is it still running?");
  }
  if (!answer.ok) throw new ServerError(await inWords(answer), answer.status);
  return answer;
}

async function inWords(answer) {
  const body = await answer.json().catch(() => null);
  const said = body?.error?.message ?? `The server answered ${answer.status}.`;
  if (answer.status === 401) return "This server wants an API key. Put it into the settings.";
  if (answer.status === 429) {
    const wait = answer.headers.get("Retry-After");
    return `The server is busy: ${said}${wait ? ` Try again in ${wait} s.` : ""}`;
  }
  return said;
}

export async function getJson(path, key, signal) {
  return (await ask(path, key, { signal })).json();
}

// The chunks of a streamed chat answer, as they come. Aborting `signal` ends it with AbortError.
export async function* streamChat(body, key, signal) {
  const request = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  const answer = await ask("/v1/chat/completions", key, request);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer broke off.");
    yield chunk;
  }
  throw new ServerError("The connection broke before the answer was whole.");
}

// The data of each event. This server ends lines with a line feed and an event's data is one line.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection broke before the answer was whole.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
