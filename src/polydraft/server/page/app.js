// The page: prompt, turns, stopping, errors, and what happens when the server goes away.

import { Comparison } from "./compare.js";
import { Figures } from "./figures.js";
import { healthy, learning, options, Run } from "./run.js";
import { field, Mistake, Settings } from "./settings.js";
import { counted, get, Painter, Palette, visible } from "./text.js";

const media = matchMedia("(prefers-reduced-motion: reduce)");
const calm = () => media.matches;
const typing = matchMedia("(hover: hover)"); // elsewhere the focus would open a keyboard over half of the page

const EXAMPLES = {
  chat: ["Explain in three sentences why the sky is blue.", "Write a Python function that merges two sorted lists.", "Count from one to thirty in words."],
  completion: ["def merge(left, right):\n    ", "Once upon a time, in a village by the sea,", "The days of the week are Monday, Tuesday,"],
};

const palette = new Palette();
const settings = new Settings();
const figures = new Figures(palette, calm, mark);
const comparison = new Comparison(palette, calm);
const prompt = get("prompt");
const turns = get("turns");

let conversation = []; // the chat: [words, run]
let running = null; // the run under way
let following = true; // whether the page scrolls with the text
let dirty = false;
let learns = false; // whether the server's draft learns

const mode = () => document.querySelector("input[name=mode]:checked").value;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, action) {
  const made = element("button", "quiet", text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

// Turns

/** JSON with a line for each of its parts; what is none, such as the beginning of a call, as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** A card of one answer: who, the text, and below it the numbers and what can be done. */
class Answer {
  constructor(run, before) {
    this.run = run;
    this.card = element("article", "turn answer");
    this.card.setAttribute("aria-busy", "true");
    const many = run.wanted > 1;
    this.card.append(element("h3", "", `${before === undefined ? "Answer" : "Text"}${many ? ` ${run.number + 1} of ${run.wanted}` : ""}`));
    const box = element("div", "text writing");
    if (before !== undefined) box.append(element("span", "given", visible(before)));
    this.foot = element("div", "foot");
    this.numbers = element("p", "numbers", "reading the prompt\u2026");
    this.foot.append(this.numbers);
    if (many) {
      this.choice = button("Show its tree", () => { chosen(run); figures.show(run); figures.reveal(); });
      this.foot.append(this.choice);
    }
    this.card.append(box, this.foot);
    this.box = box;
    this.called = [];
    this.painter = new Painter(box, palette);
    box.addEventListener("click", ({ target }) => {
      if (target.dataset.step && getSelection().isCollapsed) figures.show(run, Number(target.dataset.step));
    });
    turns.append(this.card);
    run.answer = this;
    if (many) chosen(run.all[0].chosen ?? run);
  }

  /** Reasoning before the text and calls behind it, all folded; a call's line says what is called with what. */
  #showBeside() {
    const { reasoning, calls } = this.run;
    if (reasoning) {
      this.thoughts ??= this.#folded(this.box.before.bind(this.box));
      this.thoughts.head.textContent = "Reasoning";
      this.thoughts.body.textContent = visible(reasoning);
    }
    calls.forEach(({ name, text }, place) => {
      const shown = this.called[place] ??= this.#folded(this.foot.before.bind(this.foot));
      shown.head.textContent = `Calls ${visible(name)} ${visible(text)}`;
      shown.body.textContent = visible(indented(text));
    });
    this.box.hidden = this.run.done && !this.box.textContent && Boolean(reasoning || calls.length);
  }

  #folded(put) {
    const folded = element("details", "in-words");
    const [head, body] = [element("summary"), element("pre")];
    folded.append(head, body);
    put(folded);
    return { head, body };
  }

  flush() {
    this.painter.flush();
    this.#showBeside();
    const last = this.run.steps.at(-1);
    if (this.run.done) this.box.classList.remove("writing");
    if (last) this.numbers.textContent = `${counted(this.run.tokens, "token")} \u00b7 ${last.tokens_per_second.toFixed(1)} per second \u00b7 ${last.tokens_per_call.toFixed(2)} per call`;
  }

  end(onCompare) {
    const { run } = this;
    this.painter.end();
    this.flush();
    this.box.classList.remove("writing");
    this.card.setAttribute("aria-busy", "false");
    const cut = run.finish === "length" ? "cut at the maximum of tokens" : "";
    const why = run.finish ? cut : run.stopped ? "stopped" : run.failure ? "broken off" : "";
    if (why) this.numbers.textContent = [run.tokens ? this.numbers.textContent : "", why].filter(Boolean).join(" \u00b7 ");
    else if (!run.steps.length) this.numbers.textContent = `${counted(run.tokens, "token")} in ${run.seconds.toFixed(1)} s`;
    const copy = button("Copy", async () => {
      const done = await navigator.clipboard.writeText(run.text).then(() => true, () => false);
      copy.textContent = done ? "Copied" : "Copying is not allowed here";
      get("news").textContent = copy.textContent;
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    if (run.text) this.foot.append(copy);
    if (run.text && run.request.speculative.enabled && !run.failure && !run.stopped) {
      const compare = button("Compare with plain decoding", () => onCompare(run, compare));
      compare.classList.add("comparing");
      this.foot.append(compare);
    }
  }
}

/** Of several answers the one whose tree is shown is the chosen one, with which a chat goes on. */
function chosen(run) {
  run.all[0].chosen = run;
  for (const { answer } of run.all) answer?.choice?.setAttribute("aria-pressed", answer.run === run);
}

/** Mark the words of a step in the text they belong to; step 0 marks none. */
function mark(run, step) {
  if (run.wanted > 1) chosen(run);
  for (const old of turns.querySelectorAll(".chosen")) old.classList.remove("chosen");
  if (!step) return;
  for (const words of run.answer.box.querySelectorAll(`[data-step="${step}"]`)) words.classList.add("chosen");
}

// Drawing: at most once a frame

function paint() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    if (!running) return;
    for (const one of running.all) one.answer?.flush();
    follow();
    figures.touch();
  });
}

function follow(answer = running?.answer) {
  if (!following || !answer) return;
  const below = answer.card.getBoundingClientRect().bottom + 12 - get("composer").getBoundingClientRect().top;
  if (below > 0) scrollBy({ top: below, behavior: "instant" });
}

let seen = 0;
addEventListener("scroll", () => {
  if (scrollY < seen - 2) following = false;
  else if (running?.answer && running.answer.card.getBoundingClientRect().bottom < get("composer").getBoundingClientRect().top + 40) following = true;
  seen = scrollY;
}, { passive: true });

// Sending and stopping

function busy(run) {
  running = run;
  const focus = document.activeElement;
  get("send").hidden = Boolean(run);
  get("stop").hidden = !run;
  if (run && focus === get("send")) get("stop").focus();
  if (!run && focus === get("stop")) get("send").focus();
  get("clear").disabled = Boolean(run);
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.disabled = Boolean(run) || (radio.value === "chat" && settings.options?.chat === false);
  for (const compare of turns.querySelectorAll(".comparing")) compare.disabled = Boolean(run);
}

async function send() {
  const written = prompt.value;
  const chat = mode() === "chat";
  if (running || connection.away) return;
  quietly();
  if (!written.trim() && chat) {
    complain(new Mistake("prompt", "Write something first."));
    return;
  }
  let request;
  try {
    request = settings.request();
  } catch (error) {
    complain(error);
    return;
  }
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const told = conversation.flatMap(([words, { chosen, text }]) => [
    { role: "user", content: words }, { role: "assistant", content: chosen?.text ?? text },
  ]);
  if (chat) request.messages = [...system, ...told, { role: "user", content: written }];
  else {
    request.prompt = written;
    delete request.tools;
  }
  const run = new Run(chat ? "v1/chat/completions" : "v1/completions", request);
  get("welcome").hidden = true;
  const said = element("article", "turn said");
  if (chat) {
    said.append(element("h3", "", "You"), element("div", "text", visible(written)));
    turns.append(said);
    prompt.value = "";
    fit();
  } else {
    turns.replaceChildren();
  }
  const before = chat ? undefined : written;
  const hint = element("p", "hint", `${run.wanted} answers are written at once.${chat ? " The chat goes on with the one whose tree is shown." : ""}`);
  if (run.wanted > 1) turns.append(hint);
  const answer = new Answer(run, before);
  following = true;
  busy(run);
  get("clear").hidden = false;
  get("news").textContent = "The answer is coming.";
  figures.show(run);
  paint();
  await run.go(settings.key, (one, ...event) => {
    for (const each of run.all) if (!each.answer) new Answer(each, before);
    one.answer.painter.add(...event);
    paint();
  });
  for (const one of run.all) one.answer.end(compare);
  busy(null);
  follow(answer);
  figures.touch();
  if (run.failure && !run.all.some(({ text }) => text)) {
    // Nothing came: as if it had not been sent.
    for (const gone of [...run.all.map((one) => one.answer.card), said, hint]) gone.remove();
    if (chat && !prompt.value) prompt.value = written;
    fit();
    if (!turns.children.length) start();
    else figures.show(conversation.at(-1)?.[1].chosen ?? conversation.at(-1)?.[1] ?? null);
  } else if (chat) {
    conversation.push([written, run]);
  }
  finished(run);
}

function finished(run) {
  if (run.failure) complain(run.failure);
  else if (run.stopped) get("news").textContent = "Stopped.";
  else {
    const tokens = run.all.reduce((sum, one) => sum + one.tokens, 0);
    get("news").textContent = `The ${run.wanted > 1 ? "answers are" : "answer is"} complete: ${counted(tokens, "token")}.`;
  }
}

async function compare(run, back) {
  if (running || connection.away) return;
  quietly();
  figures.show(run);
  const plain = await comparison.go(run, settings.key, {
    back,
    begun: (begun) => {
      busy(begun);
      figures.beside(begun);
      const tick = setInterval(() => (begun.done ? clearInterval(tick) : figures.touch()), 150);
    },
  });
  figures.touch();
  busy(null);
  if (plain.failure) complain(plain.failure);
  get("news").textContent = get("ratio").textContent;
}

function stop() {
  running?.abortNow();
}

function start() {
  conversation = [];
  turns.replaceChildren();
  get("welcome").hidden = false;
  get("clear").hidden = true;
  comparison.run?.abortNow();
  get("compare").hidden = true;
  figures.show(null);
}

// Errors

function quietly() {
  get("alert").replaceChildren();
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
}

/** One sentence in the alert, with the field's name, and a way to that field. */
function complain(error) {
  if (error.gone) {
    connection.lost();
    return;
  }
  if (!error.field && error.status === undefined && !(error instanceof Mistake)) console.error(error);
  const found = error.field ? field(error.field) : null;
  const name = found?.name ?? error.field;
  let { message } = error;
  if (name && message.startsWith(`${error.field} `)) message = name + message.slice(error.field.length);
  else if (name && ![error.field, name].some((word) => word.length > 1 && message.includes(word))) message = `${name}: ${message}`;
  const said = element("span", "", message);
  get("alert").replaceChildren(said);
  if (!found) return;
  found.input.setAttribute("aria-invalid", "true");
  if (found.input === prompt) prompt.focus();
  else get("alert").append(button("Change it", () => openSettings(found.input)));
}

// The server goes away and comes back

const connection = {
  away: false,

  say(state, text) {
    get("link").dataset.state = state;
    get("link").textContent = text;
  },

  why: "",

  /** Nobody answers: say so, and ask until somebody does. */
  async lost() {
    if (this.away) return;
    this.away = true;
    this.say("away", "no server");
    get("send").disabled = true;
    get("alert").replaceChildren(element("span", "", `${this.why || "The server does not answer."} The page goes on by itself; nothing that you wrote is lost.`));
    for (let wait = 1000; ; wait = Math.min(wait * 1.4, 5000)) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, wait);
        addEventListener("online", () => { clearTimeout(timer); resolve(); }, { once: true });
      });
      if ((await healthy()) && (await load())) break;
    }
    this.away = false;
    get("send").disabled = false;
    get("alert").replaceChildren();
    get("news").textContent = "The server is back.";
  },
};

/** Ask what the server offers; whether it answered. */
async function load() {
  try {
    const offer = await options(settings.key);
    settings.offer(offer);
    learns = Boolean(offer.learns);
    get("target").textContent = [offer.target, offer.context && `context ${counted(offer.context, "token")}`].filter(Boolean).join(" \u00b7 ");
    const chat = document.querySelector("input[name=mode][value=chat]");
    chat.disabled = offer.chat === false;
    get("no-chat").hidden = !chat.disabled;
    if (chat.disabled && chat.checked) document.querySelector("input[name=mode][value=completion]").checked = true;
    connection.why = "";
    connection.say("well", "connected");
    if (get("welcome").dataset.mode !== mode()) switchMode();
    return true;
  } catch (error) {
    connection.why = error.gone ? error.message : "";
    if (error.gone) return false;
    connection.say("well", "connected");
    complain(error);
    return true;
  }
}

// While nothing runs, look now and then whether the server is still there.
setInterval(async () => {
  if (running || connection.away || document.hidden) return;
  if (await healthy()) return;
  await new Promise((resolve) => setTimeout(resolve, 500)); // one lost answer is no proof
  if (!(await healthy()) && !running) connection.lost();
}, 5000);

// Where the draft learns, ask what it comes to.
setInterval(async () => {
  if (!learns || connection.away || document.hidden) return;
  const found = await learning().catch(() => null);
  if (found) figures.learnt(...found);
}, 5000);

// Controls

/** The prompt grows with what is written in it. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.35)}px`;
}

function switchMode() {
  const now = mode();
  start();
  get("welcome").dataset.mode = now;
  get("prompt-label").textContent = now === "chat" ? "Your message" : "Text to go on with";
  prompt.placeholder = now === "chat" ? "Ask something" : "Begin a text; the model goes on";
  get("system-label").hidden = now !== "chat";
  get("examples").replaceChildren(...EXAMPLES[now].map((text) => {
    const item = element("li");
    item.append(button(text.trim(), () => {
      prompt.value = text;
      fit();
      (typing.matches ? prompt : get("send")).focus();
      send();
    }));
    return item;
  }));
}

function openSettings(input) {
  get("settings").showModal();
  if (input?.closest("#more")) get("more").open = true;
  (input ?? get("temperature")).focus();
}

get("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
prompt.addEventListener("input", () => { prompt.removeAttribute("aria-invalid"); fit(); });
get("stop").addEventListener("click", stop);
get("clear").addEventListener("click", () => { start(); prompt.focus(); });
get("open-settings").addEventListener("click", () => openSettings());
get("settings").addEventListener("click", ({ target }) => { if (target === get("settings")) get("settings").close(); });
get("settings").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); get("settings").close(); }
});
get("key").addEventListener("change", () => { quietly(); load(); });
for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", switchMode);

addEventListener("keydown", (event) => {
  if (get("settings").open) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape" && running) {
    event.preventDefault();
    stop();
  }
});

const THEMES = { "": "automatic", light: "light", dark: "dark" };
function theme(next) {
  const root = document.documentElement;
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  get("theme").textContent = `Theme: ${THEMES[next]}`;
  try {
    localStorage.setItem("polydraft-theme", next);
  } catch {
    // Not kept, then.
  }
}
get("theme").addEventListener("click", () => {
  const all = Object.keys(THEMES);
  theme(all[(all.indexOf(document.documentElement.dataset.theme ?? "") + 1) % all.length]);
});
theme(document.documentElement.dataset.theme ?? "");

switchMode();
if (!(await load())) connection.lost();
if (typing.matches) prompt.focus({ preventScroll: true });
