// The settings of a request: from the form to OpenAI's fields, and from a failure back to the field that it names.

import { counted, get } from "./text.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const MORE = ["top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n"];

/** What the text of each kind of structured output is called. */
const FORMS = { json_schema: "The schema, as JSON", regex: "The regular expression", grammar: "The grammar\u2019s rules" };

/** The form's field for a name in an error, and what people call it. */
const FIELDS = {
  temperature: ["temperature", "Temperature"],
  top_p: ["top_p", "Top p"],
  max_tokens: ["max_tokens", "Max tokens"],
  max_completion_tokens: ["max_tokens", "Max tokens"],
  seed: ["seed", "Seed"],
  top_k: ["top_k", "Top k"],
  min_p: ["min_p", "Min p"],
  presence_penalty: ["presence_penalty", "Presence penalty"],
  frequency_penalty: ["frequency_penalty", "Frequency penalty"],
  repetition_penalty: ["repetition_penalty", "Repetition penalty"],
  n: ["n", "Answers at once"],
  response_format: ["form", "Structured output"],
  prediction: ["prediction", "Prediction"],
  tools: ["tools", "Tools"],
  stop: ["stop_strings", "Stop strings"],
  model: ["model", "Model"],
  api_key: ["key", "API key"],
  prompt: ["prompt", "Prompt"],
  messages: ["prompt", "Messages"],
  speculative: ["drafter", "Speculation"],
  "speculative.enabled": ["enabled", "Use drafts"],
  "speculative.drafter": ["drafter", "Drafter"],
  "speculative.verifier": ["verifier", "Verifier"],
  "speculative.tree": ["tree", "Tree"],
  "speculative.max_draft_tokens": ["max_draft_tokens", "Max draft tokens"],
};

/** The input and the name of a request's field, or nothing: of `messages[0].content` those of `messages`. */
export function field(name) {
  const found = FIELDS[name] ?? FIELDS[name.split(/[.[]/)[0]];
  if (!found) return undefined;
  const id = found[0] === "form" && get("form-label").hidden ? "format" : found[0];
  return { input: get(id), name: found[1] };
}

function fill(select, lines, first) {
  const before = select.value;
  select.replaceChildren();
  if (first) select.add(new Option(first, ""));
  for (const line of lines ?? []) select.add(new Option(line.word ?? line, line.word ?? line));
  if ([...select.options].some(({ value }) => value === before)) select.value = before;
}

/** Numbers that are no numbers, named before anything is sent. */
export class Mistake extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

function number(id) {
  const input = get(id);
  if (input.validity.badInput) throw new Mistake(id === "max_draft_tokens" ? `speculative.${id}` : id, "This is not a number.");
  return input.value === "" ? undefined : Number(input.value);
}

const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
const unescaped = (line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]);

export class Settings {
  #meanings = { drafter: new Map(), verifier: new Map() };

  constructor() {
    try {
      get("key").value = sessionStorage.getItem("polydraft-key") ?? "";
    } catch {
      // Storage may be forbidden; the key then lives as long as the page.
    }
    get("key").addEventListener("input", () => {
      try {
        sessionStorage.setItem("polydraft-key", this.key);
      } catch {
        // As above.
      }
    });
    get("settings-form").addEventListener("input", ({ target }) => {
      target.removeAttribute("aria-invalid");
      this.show();
    });
  }

  get key() {
    return get("key").value.trim();
  }

  /** Take what the server offers. Values that were set stay. */
  offer(options) {
    this.options = options;
    this.#meanings.drafter = new Map((options.drafters ?? []).map(({ word, meaning }) => [word, meaning]));
    this.#meanings.verifier = new Map((options.verifiers ?? []).map(({ word, meaning }) => [word, meaning]));
    const own = options.defaults ?? {};
    get("tree").placeholder = own.tree || "server\u2019s choice";
    get("trees").replaceChildren(...(options.trees ?? []).map((word) => new Option(word)));
    for (const name of ["drafter", "verifier"]) {
      fill(get(name), options[`${name}s`], `server\u2019s choice${own[name] ? `: ${own[name]}` : ""}`);
    }
    fill(get("model"), options.models);
    get("model-label").hidden = (options.models ?? []).length < 2;
    for (const name of NUMBERS) {
      const value = options.defaults?.[name];
      if (value !== undefined && value !== null && !this.offered) get(name).value = value;
    }
    this.offered = true;
    this.show();
  }

  /** The meanings of what is chosen, and all of it in a line. */
  show() {
    for (const name of ["drafter", "verifier"]) get(`${name}-meaning`).textContent = this.#meanings[name].get(get(name).value) ?? "";
    if (!get("drafter").value && !this.options?.defaults?.drafter) get("drafter-meaning").textContent = "It depends on model and temperature; an answer\u2019s legend says who drafted.";
    for (const id of ["drafter", "verifier", "tree", "max_draft_tokens", "prediction"]) get(id).disabled = !get("enabled").checked;
    const kind = get("format").value;
    get("form-label").hidden = !FORMS[kind];
    get("form-name").textContent = FORMS[kind] ?? "";
    const more = [...MORE, "format", "tools", "prediction"].filter((id) => get(id).value !== "" && !get(id).disabled).length;
    get("more-set").textContent = more ? `${more} set` : "penalties, answers, structure, prediction";
    const parts = [
      get("temperature").value !== "" && `temp. ${get("temperature").value}`,
      get("max_tokens").value && counted(get("max_tokens").value, "token"),
      get("enabled").checked ? get("drafter").value : "no drafts",
      more && `${more} more`,
    ];
    get("summary").textContent = parts.filter(Boolean).join(" \u00b7 ");
  }

  get system() {
    return get("system").value;
  }

  /** What the answer must match, or nothing for any text. */
  #format() {
    const type = get("format").value;
    if (!FORMS[type]) return type ? { type } : undefined;
    const text = get("form").value;
    if (!text.trim()) throw new Mistake("response_format", "This field is empty.");
    if (type !== "json_schema") return { type, [type]: text };
    try {
      return { type, json_schema: { name: "answer", schema: JSON.parse(text) } };
    } catch (error) {
      throw new Mistake("response_format", `The schema is no JSON: ${error.message}.`);
    }
  }

  /** What may be called, or nothing. */
  #tools() {
    const text = get("tools").value;
    if (!text.trim()) return undefined;
    try {
      const found = JSON.parse(text);
      return Array.isArray(found) ? found : [found];
    } catch (error) {
      throw new Mistake("tools", `The tools are no JSON: ${error.message}.`);
    }
  }

  /** The fields of a request, without the prompt. */
  request() {
    const stop = get("stop_strings").value.split("\n").filter(Boolean).map(unescaped);
    const speculative = { enabled: get("enabled").checked, trace: true };
    if (speculative.enabled) {
      for (const name of ["drafter", "verifier", "tree"]) if (get(name).value.trim()) speculative[name] = get(name).value.trim();
      const most = number("max_draft_tokens");
      if (most !== undefined) speculative.max_draft_tokens = most;
    }
    const request = {
      model: get("model").value || this.options?.models?.[0] || this.options?.target || "default",
      stream: true,
      stream_options: { include_usage: true },
      speculative,
    };
    for (const name of [...NUMBERS, ...MORE]) {
      const value = number(name);
      if (value !== undefined) request[name] = value;
    }
    if (stop.length) request.stop = stop;
    const format = this.#format();
    if (format) request.response_format = format;
    const tools = this.#tools();
    if (tools) request.tools = tools;
    const prediction = get("prediction").value;
    if (prediction && speculative.enabled) request.prediction = { type: "content", content: prediction };
    return request;
  }
}
