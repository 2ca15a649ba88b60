// One request and everything that came of it: a text, or several that are written at once.

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
    let tokens = [];
    if (trace) {
      tokens = trace.tokens;
      this.steps.push(this.#completed(trace, now));
      for (const { origin } of tokens) this.origins.set(origin, (this.origins.get(origin) ?? 0) + 1);
      this.tokens += tokens.length;
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (tokens.length || delta) {
      this.first ||= now;
      this.last = now;
      if (this.steps.length === 1 && tokens.length) this.before = tokens.length;
      this.text += delta;
      const event = [this.steps.length, tokens, delta];
      this.events.push([now - this.start, ...event]);
      each?.(this, ...event);
    }
    if (this.finish) this.#end();
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
