// The settings of a request: from the form to OpenAI's fields, and from a failure back to the field that it names.

const get = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The form's field for a name in an error, and what people call it. */
const FIELDS = {
  temperature: ["temperature", "Temperature"],
  top_p: ["top_p", "Top p"],
  max_tokens: ["max_tokens", "Max tokens"],
  max_completion_tokens: ["max_tokens", "Max tokens"],
  seed: ["seed", "Seed"],
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
  return found && { input: get(found[0]), name: found[1] };
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
    for (const id of ["drafter", "verifier", "tree", "max_draft_tokens"]) get(id).disabled = !get("enabled").checked;
    const parts = [
      get("temperature").value !== "" && `temperature ${get("temperature").value}`,
      get("max_tokens").value && `${get("max_tokens").value} tokens`,
      get("enabled").checked ? get("drafter").value : "no drafts",
    ];
    get("summary").textContent = parts.filter(Boolean).join(" \u00b7 ");
  }

  get system() {
    return get("system").value;
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
    for (const name of NUMBERS) {
      const value = number(name);
      if (value !== undefined) request[name] = value;
    }
    if (stop.length) request.stop = stop;
    return request;
  }
}
