// One request and everything that came of it: a text, or several that are written at once. Answers are server-sent
// events; errors are told in one sentence.

const at = (path) => new URL(path, document.baseURI);

/** What went wrong, in one sentence; `field` is the request's field, `gone` says that nobody answered. */
class Failure extends Error {
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
async function* chunks(path, request, { key, signal }) {
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

/** Of a server that learns: tokens per call of all texts in the last minute, and the version of the draft. */
export async function learning() {
  const text = await (await ask("metrics", "", {})).text();
  return ["tokens_per_call", "learn_version"].map((name) => Number(text.match(new RegExp(`^polydraft:${name}\\{.*\\} (\\S+)$`, "m"))?.[1]));
}

/** Whether the server is well. */
export async function healthy() {
  try {
    return (await fetch(at("health"), { cache: "no-store", signal: AbortSignal.timeout(3000) })).ok;
  } catch {
    return false;
  }
}

export class Run {
  steps = [];
  events = [];
  text = "";
  reasoning = "";
  calls = [];
  tokens = 0;
  origins = new Map();
  usage = null;
  finish = "";
  stopped = false;
  failure = null;
  start = 0;
  first = 0;
  last = 0;

  /** `first` is the request's first text, which sends it and speaks for all; it has none itself. */
  constructor(path, request, first = null) {
    this.path = path;
    this.request = request;
    this.abort = first?.abort ?? new AbortController();
    this.start = first?.start ?? 0;
    this.all = first?.all ?? [];
    this.number = this.all.push(this) - 1;
  }

  /** How many texts the request asks for. */
  get wanted() {
    return this.request.n ?? 1;
  }

  /** The request's text of a number. */
  of(number) {
    while (this.all.length <= number) new Run(this.path, this.request, this);
    return this.all[number];
  }

  /** Send the request; `each` is called with [text, step, tokens, delta] for every chunk. Failures are kept, not thrown. */
  async go(key, each) {
    for (const one of this.all) one.start = performance.now();
    try {
      for await (const chunk of chunks(this.path, this.request, { key, signal: this.abort.signal })) this.#take(chunk, each);
    } catch (error) {
      for (const one of this.all) {
        if (one.done && one !== this) continue; // it was whole before
        if (error.name === "AbortError") one.stopped = true;
        else one.failure = error;
      }
    }
    for (const one of this.all) one.#end();
    return this;
  }

  #end() {
    if (!this.done) this.last = this.stopped ? performance.now() : this.last || performance.now();
    this.done = true;
  }

  #take(chunk, each) {
    const trace = chunk.polydraft?.tokens?.length ? chunk.polydraft : null;
    const choices = new Map((chunk.choices ?? []).map((choice) => [choice.index ?? 0, choice]));
    const places = new Set(choices.keys());
    if (trace) places.add(trace.index ?? 0);
    for (const place of places) {
      this.of(place).#add(choices.get(place), place === (trace?.index ?? 0) ? trace : null, each);
    }
    if (chunk.usage) {
      this.usage = chunk.usage;
      if (this.wanted === 1 && !this.steps.length) this.tokens = chunk.usage.completion_tokens ?? this.tokens;
    }
  }

  #add(choice, trace, each) {
    const now = performance.now();
    const delta = (choice && (choice.delta ? choice.delta.content : choice.text)) ?? "";
    const beside = this.#beside(choice?.delta ?? {});
    let tokens = [];
    if (trace) {
      tokens = trace.tokens;
      this.steps.push(this.#completed(trace, now));
      for (const { origin } of tokens) this.origins.set(origin, (this.origins.get(origin) ?? 0) + 1);
      this.tokens += tokens.length;
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (tokens.length || delta || beside) {
      this.first ||= now;
      this.last = now;
      if (this.steps.length === 1 && tokens.length) this.before = tokens.length;
      this.text += delta;
      const event = [this.steps.length, beside ? [] : tokens, delta]; // words of reasoning and calls are not painted
      this.events.push([now - this.start, ...event]);
      each?.(this, ...event);
    }
    if (this.finish) this.#end();
  }

  /** Take what is no content: pieces of reasoning and of calls. Tells whether there was any. */
  #beside({ reasoning_content: thought = "", tool_calls: pieces = [] }) {
    this.reasoning += thought;
    for (const { index, function: piece } of pieces) {
      const call = (this.calls[index] ??= { name: "", text: "" });
      call.name += piece.name ?? "";
      call.text += piece.arguments ?? "";
    }
    return Boolean(thought || pieces.length);
  }

  /** A step as the figures want it; what the server left out is counted here. */
  #completed(trace, now) {
    const elapsed = trace.elapsed ?? (now - this.start) / 1000;
    const tokens = this.tokens + trace.tokens.length;
    return {
      ...trace,
      elapsed,
      tokens_per_second: trace.tokens_per_second ?? tokens / Math.max(elapsed, 1e-3),
      tokens_per_call: trace.tokens_per_call ?? tokens / (this.steps.length + 1),
    };
  }

  abortNow() {
    this.abort.abort();
  }

  /** Seconds from sending to the last token, or to now. */
  get seconds() {
    if (!this.start) return 0;
    return ((this.done ? this.last : performance.now()) - this.start) / 1000;
  }

  /** Tokens per second from the first token on: reading the prompt does not count. */
  get rate() {
    const time = (this.last - this.first) / 1000;
    const later = this.tokens - (this.before ?? 1);
    return time > 0 && later > 0 ? later / time : NaN;
  }
}
