// Requests to the server and their answers as they come: server-sent events, errors in one sentence.

const at = (path) => new URL(path, document.baseURI);

/** What went wrong, in one sentence; `field` is the request's field, `gone` says that nobody answered. */
export class Failure extends Error {
  constructor(message, { field = "", status = 0, gone = false, wait = 0 } = {}) {
    super(message);
    Object.assign(this, { field, status, gone, wait });
  }
}

/** The events of a body of server-sent events: the text of each `data`, whatever pieces it came in. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A lone \r at the end may be half of \r\n: it waits for the next piece.
      const lines = rest.split(done ? /\r\n|\n|\r/ : /\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) {
        if (data.length) yield data.join("\n");
        return;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function failure(error, status, wait) {
  const { message, param, code } = error ?? {};
  if (code === "not_ready") return new Failure("The model is loading.", { gone: true, status });
  let said = message || (status ? `The server answered ${status}.` : "The server reported an error.");
  if (status === 429) said = `The server is busy${wait ? `; try again in ${wait} s` : "; try again soon"}.`;
  return new Failure(said, { field: status === 429 ? "" : (param ?? (status === 401 ? "api_key" : "")), status, wait });
}

async function ask(path, key, init) {
  const headers = { ...init.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(at(path), { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TypeError" && /header|ISO-8859/i.test(error.message)) {
      throw new Failure("An API key holds only plain letters, digits and signs.", { field: "api_key" });
    }
    throw new Failure("The server does not answer.", { gone: true });
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw failure(answer?.error, response.status, Number(response.headers.get("Retry-After")) || 0);
}

/** The chunks of a streamed completion. Ends quietly only if the server said that it was done. */
export async function* chunks(path, request, { key, signal }) {
  const response = await ask(path, key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(chunk.error, 0, 0);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    if (error instanceof SyntaxError) throw new Failure("The server sent something that is no answer.");
  }
  throw new Failure("The connection broke before the text was complete.", { gone: true });
}

/** What the server can do. */
export const options = async (key) => (await ask("polydraft/options", key, {})).json();

/** Whether the server is well. */
export async function healthy() {
  try {
    return (await fetch(at("health"), { cache: "no-store", signal: AbortSignal.timeout(3000) })).ok;
  } catch {
    return false;
  }
}
