// One request and everything that came of it.

import { chunks } from "./stream.js";

export class Run {
  steps = [];
  events = [];
  text = "";
  tokens = 0;
  origins = new Map();
  usage = null;
  finish = "";
  stopped = false;
  failure = null;
  start = 0;
  first = 0;
  last = 0;

  constructor(path, request) {
    this.path = path;
    this.request = request;
    this.abort = new AbortController();
  }

  /** Send the request; `each` is called with [step, tokens, delta] for every chunk. Failures are kept, not thrown. */
  async go(key, each) {
    this.start = performance.now();
    try {
      for await (const chunk of chunks(this.path, this.request, { key, signal: this.abort.signal })) this.#take(chunk, each);
    } catch (error) {
      if (error.name === "AbortError") this.stopped = true;
      else this.failure = error;
    }
    this.last = this.stopped ? performance.now() : this.last || performance.now();
    this.done = true;
    return this;
  }

  #take(chunk, each) {
    const now = performance.now();
    const choice = chunk.choices?.find(({ index }) => !index);
    const trace = chunk.polydraft;
    const delta = (choice && (choice.delta ? choice.delta.content : choice.text)) ?? "";
    let tokens = [];
    if (trace?.tokens?.length && !trace.index) {
      tokens = trace.tokens;
      this.steps.push(this.#completed(trace, now));
      for (const { origin } of tokens) this.origins.set(origin, (this.origins.get(origin) ?? 0) + 1);
      this.tokens += tokens.length;
    }
    if (chunk.usage) {
      this.usage = chunk.usage;
      if (!this.steps.length) this.tokens = chunk.usage.completion_tokens ?? this.tokens;
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (!tokens.length && !delta) return;
    this.first ||= now;
    this.last = now;
    if (this.steps.length === 1 && tokens.length) this.before = tokens.length;
    this.text += delta;
    const event = [this.steps.length, tokens, delta];
    this.events.push([now - this.start, ...event]);
    each?.(...event);
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
