// The figures beside the text: the tree of a step with its slider, the legend, and three small charts, whose lines have
// at most 240 points: tokens per second, tokens per call, acceptance by depth. They show one run at a time.

import { counted, get } from "./text.js";
import { draw, list, sentence, svg } from "./tree.js";

const POINTS = 240;
const WINDOW = 12;
const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(value >= 100 ? 0 : digits) : "\u2013");

/** Means of a few neighbours, so that the line is calm, and no more points than can be seen. */
function thin(points) {
  const size = Math.ceil(points.length / POINTS);
  if (size <= 1) return points;
  const less = [];
  for (let i = 0; i < points.length; i += size) less.push(points[Math.min(points.length - 1, i + size - 1)]);
  return less;
}

/** Tokens per second over the last steps, at each step: [seconds, rate]. */
function speeds(steps) {
  const points = [];
  const totals = [];
  steps.forEach(({ elapsed, tokens }, i) => {
    totals.push((totals[i - 1] ?? 0) + tokens.length);
    const from = Math.max(0, i - WINDOW);
    const time = elapsed - steps[from].elapsed;
    if (i >= 3 && time > 0) points.push([elapsed, (totals[i] - totals[from]) / time]);
  });
  return points;
}

/** Tokens per call over the last steps, at each step: [step, tokens]. */
function yields(steps) {
  let sum = 0;
  return steps.map(({ tokens }, i) => {
    sum += tokens.length - (i >= WINDOW ? steps[i - WINDOW].tokens.length : 0);
    return [i + 1, sum / Math.min(i + 1, WINDOW)];
  });
}

const nice = (value) => {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * unit >= value * 0.9999);
};

let tips = 0;

/** A button and the text that it shows: at a press, a key or below a mouse; Escape or a press elsewhere hides it. */
function explained(name, meaning) {
  const tip = Object.assign(document.createElement("p"), { className: "tip", id: `tip-${(tips += 1)}`, popover: "auto", textContent: meaning });
  const button = Object.assign(document.createElement("button"), { type: "button", className: "why", textContent: "?" });
  for (const [key, value] of Object.entries({ "aria-label": `What does \u201c${name}\u201d mean?`, "aria-describedby": tip.id, popovertarget: tip.id, popovertargetaction: "show" })) button.setAttribute(key, value);
  const place = () => {
    const at = button.getBoundingClientRect();
    const width = Math.min(320, innerWidth - 32);
    const below = at.bottom < innerHeight / 2;
    Object.assign(tip.style, {
      width: `${width}px`,
      left: `${Math.max(16, Math.min(at.left - 16, innerWidth - width - 16))}px`,
      top: below ? `${at.bottom + 6}px` : "auto",
      bottom: below ? "auto" : `${innerHeight - at.top + 6}px`,
    });
  };
  const leave = () => setTimeout(() => {
    if (document.activeElement !== button && !button.matches(":hover") && !tip.matches(":hover")) tip.hidePopover?.();
  }, 200);
  tip.addEventListener("beforetoggle", place);
  addEventListener("scroll", () => tip.isConnected && place(), { passive: true, capture: true });
  button.addEventListener("pointerenter", ({ pointerType }) => { if (pointerType === "mouse") tip.showPopover?.(); });
  for (const one of [button, tip]) one.addEventListener("pointerleave", leave);
  button.addEventListener("blur", leave);
  // Escape hides the text, and does not stop the answer as well.
  button.addEventListener("keydown", (event) => { if (event.key === "Escape" && tip.matches(":popover-open")) event.stopPropagation(); });
  return [button, tip];
}

/** A meter: a name, a number, and a chart beside it. */
class Meter {
  constructor(box, name, description, meaning) {
    this.name = name;
    this.value = Object.assign(document.createElement("span"), { className: "value", textContent: "\u2013" });
    this.chart = svg("svg", { role: "img", "aria-label": `${name}: nothing yet` });
    const words = document.createElement("div");
    const title = Object.assign(document.createElement("h3"), { textContent: name });
    const hint = Object.assign(document.createElement("p"), { className: "hint", textContent: description });
    const head = document.createElement("div");
    head.className = "named";
    head.append(title, "\u00a0", ...explained(name, meaning));
    words.append(head, this.value, hint);
    const row = document.createElement("div");
    row.className = "meter";
    row.append(words, this.chart);
    box.append(row);
  }

  frame() {
    this.width = this.chart.clientWidth || 240;
    this.height = this.chart.clientHeight || 84;
    this.chart.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    return { left: 36, right: this.width - 4, top: 8, bottom: this.height - 18 };
  }

  text(x, y, text, anchor = "end", kind = "tick") {
    const element = svg("text", { x, y, "text-anchor": anchor, class: kind });
    element.textContent = text;
    return element;
  }

  say(value, more = "") {
    this.value.textContent = value;
    this.chart.setAttribute("aria-label", `${this.name}: ${value}${more}`);
  }
}

class Line extends Meter {
  /** Draw lines [{points, kind, name}] with a grid; `base` is a value that is marked, and `marks` are places [x, name]. */
  draw(lines, { from = 0, to, unit, base, marks = [] } = {}) {
    const { left, right, top, bottom } = this.frame();
    if (!lines.some(({ points }) => points.length)) {
      this.chart.replaceChildren(svg("path", { class: "grid", d: `M${left} ${bottom}H${right}` }));
      return;
    }
    const all = lines.flatMap(({ points }) => points);
    const high = nice(Math.max(base ?? 0, ...all.map(([, y]) => y)) || 1);
    const end = Math.max(to ?? 0, ...all.map(([x]) => x), from + 1e-9);
    const X = (x) => left + ((x - from) / (end - from)) * (right - left);
    const Y = (y) => bottom - (y / high) * (bottom - top);
    const parts = [0, high / 2, high].map((y) => svg("path", { class: "grid", d: `M${left} ${Y(y)}H${right}` }));
    parts.push(...[0, high].map((y) => this.text(left - 6, Y(y) + 4, `${+y.toPrecision(3)}`)));
    const last = end < 10 ? +end.toFixed(1) : Math.round(end);
    parts.push(this.text(right, this.height - 2, unit === "s" ? `${last} s` : counted(last, unit)));
    if (base !== undefined) parts.push(svg("path", { class: "base", d: `M${left} ${Y(base)}H${right}` }), this.text(right, Y(base) - 4, "plain", "end", "tick name"));
    for (const [x, name] of marks) {
      const [way, anchor] = X(x) > (left + right) / 2 ? [-4, "end"] : [4, "start"];
      parts.push(svg("path", { class: "base mark", d: `M${X(x)} ${top}V${bottom}` }), this.text(X(x) + way, bottom - 5, name, anchor, "tick name"));
    }
    for (const { points, kind, name } of lines) {
      const kept = thin(points);
      if (!kept.length) continue;
      parts.push(svg("path", { class: `line ${kind}`, d: `M${kept.map(([x, y]) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("L")}` }));
      const [x, y] = kept.at(-1);
      parts.push(svg("circle", { class: `dot ${kind}`, cx: X(x), cy: Y(y), r: 3 }));
      if (name) parts.push(this.text(X(x), Y(y) < 22 ? Y(y) + 16 : Y(y) - 7, name, "end", "tick name"));
    }
    this.chart.replaceChildren(...parts);
  }
}

class Bars extends Meter {
  /** Draw shares between 0 and 1, one bar each. */
  draw(shares) {
    const { left, right, top, bottom } = this.frame();
    const ceiling = top + 8;
    const parts = [svg("path", { class: "grid", d: `M${left} ${bottom}H${right}` })];
    if (shares.length) parts.push(this.text(left - 6, bottom + 4, "0"), this.text(left - 6, ceiling + 4, "100 %"), this.text(left - 6, this.height - 2, "depth"));
    const pitch = Math.min(60, (right - left) / Math.max(1, shares.length));
    const every = pitch < 30 ? 2 : 1;
    shares.forEach((share, i) => {
      const x = left + pitch * i;
      const height = Math.max(1, share * (bottom - ceiling));
      parts.push(svg("rect", { class: "bar", x: x + pitch * 0.14, y: bottom - height, width: pitch * 0.72, height, rx: 2 }));
      if (i % every) return;
      parts.push(this.text(x + pitch / 2, bottom - height - 4, `${Math.round(share * 100)}`, "middle", "tick strong"));
      parts.push(this.text(x + pitch / 2, this.height - 2, `${i + 1}`, "middle"));
    });
    this.chart.replaceChildren(...parts);
  }
}

/** All three, for a run and, where there is one, its plain twin; and one of all texts, where the draft learns. */
class Charts {
  #notes = []; // [minutes, tokens per call, version]

  constructor(box) {
    this.box = box;
    this.speed = new Line(box, "Tokens per second", "average; the line shows the last 12 steps",
      "A token is a word or a part of one. The number counts all tokens of the answer, over the time since the model took up your message.");
    this.call = new Line(box, "Tokens per call", "1 without drafts",
      "A call is one pass through the target, the large model. Without drafts each call writes one token: the dashed line. With drafts a call checks several guesses at once; it writes those that it keeps, and one token of its own. So 3 means a third of the calls.");
    this.depth = new Bars(box, "Accepted, by depth", "of first guesses were kept",
      "A guess for the next token has depth 1, a guess for the token after it depth 2, and so on. A bar says how often a guess of its depth was kept, in the steps that had kept one at every depth before. The number is depth 1.");
  }

  /** Take what a server that learns says of its last minute; what is older than two hours is forgotten. */
  learnt(call, version) {
    this.learning ??= new Line(this.box, "Tokens per call over time", "of all texts in the last minute",
      "The draft of this server learns from finished texts. The line shows what all texts of the server brought per call since this page was opened. A dashed line is where another version of the draft came into use, with its number.");
    this.#notes.push([(performance.now() - (this.begun ??= performance.now())) / 60000, call, version]);
    if (this.#notes.length > 1440) this.#notes.shift();
  }

  #over() {
    const notes = this.#notes;
    const marks = notes.filter(([, , version], i) => i && version !== notes[i - 1][2]).map(([x, , version], i, all) => [x, `${i + 1 < all.length ? "" : "version "}${version}`, version]);
    const points = notes.filter(([, call]) => Number.isFinite(call));
    this.learning.draw([{ points, kind: "" }], { from: notes[0][0], to: notes.at(-1)[0], unit: "minute", base: 1, marks });
    this.learning.say(number(notes.at(-1)[1], 2), `; version ${notes.at(-1)[2]} of the draft${marks.length ? `; changed at ${marks.map(([x, , version]) => `minute ${x.toFixed(1)} to version ${version}`).join(", ")}` : ""}`);
  }

  draw(run, plain) {
    if (this.learning) this.#over();
    const steps = run?.steps ?? [];
    const fast = speeds(steps);
    const slow = plain ? speeds(plain.steps) : [];
    const lines = [{ points: slow, kind: "plain", name: "plain" }, { points: fast, kind: "", name: plain ? "drafts" : "" }];
    const last = steps.at(-1);
    this.speed.draw(lines.filter(({ points }) => points.length), { unit: "s" });
    this.speed.say(number(last?.tokens_per_second), plain?.steps.length ? `; plain decoding ${number(plain.steps.at(-1).tokens_per_second)}` : "");
    this.call.draw([{ points: yields(steps), kind: "" }], { from: 1, unit: "call", base: 1 });
    this.call.say(number(last?.tokens_per_call, 2));
    const shares = last?.acceptance_by_depth ?? [];
    this.depth.draw(shares);
    const rate = last?.drafted ? last.accepted / last.drafted : NaN;
    this.depth.say(shares.length ? `${Math.round(shares[0] * 100)} %` : "\u2013",
      ` at depth 1; by depth: ${shares.map((share) => `${Math.round(share * 100)} %`).join(", ")}${Number.isFinite(rate) ? `; ${Math.round(rate * 100)} % of all drafted tokens` : ""}`);
  }
}

export class Figures {
  #run = null;
  #plain = null;
  #step = 0;
  #follow = true;
  #dirty = false;
  #drawn = 0;
  #counts = new Map();
  #whole = false;
  #waiting = get("tree-words").textContent;

  /** `calm` says whether motion is to be reduced; `chosen` is called with a run and a step that was chosen. */
  constructor(palette, calm, chosen) {
    this.palette = palette;
    this.calm = calm;
    this.chosen = chosen;
    this.charts = new Charts(get("meters"));
    this.charts.draw(null);
    this.slider = get("step");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    get("earlier").addEventListener("click", () => this.go(this.#step - 1));
    get("later").addEventListener("click", () => this.go(this.#step + 1));
    get("latest").addEventListener("click", () => this.go(Infinity));
    get("whole").addEventListener("click", () => {
      this.#whole = !this.#whole;
      get("whole").setAttribute("aria-pressed", this.#whole);
      this.shown = null;
      this.touch();
    });
    get("tree-details").addEventListener("toggle", () => this.#list());
    get("tree-box").addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.go(this.#step + move);
    });
    new ResizeObserver(() => { this.shown = null; this.touch(); }).observe(get("meters"));
  }

  get run() {
    return this.#run;
  }

  /** Show another run, at its last step or a given one. */
  show(run, step = Infinity) {
    if (run !== this.#run) {
      this.#run = run;
      this.#plain = null;
      this.#counts.clear();
      get("legend").replaceChildren();
    }
    this.go(step);
  }

  /** Bring the tree into view, where it stands below the text. */
  reveal() {
    const box = get("tree-box").getBoundingClientRect();
    if (box.top < 0 || box.bottom > innerHeight) get("tree-title").scrollIntoView({ behavior: this.calm() ? "auto" : "smooth" });
  }

  /** Take what a server that learns says of itself. */
  learnt(call, version) {
    this.charts.learnt(call, version);
    this.touch();
  }

  /** Draw a plain run's speed beside. */
  beside(plain) {
    this.#plain = plain;
    this.touch();
  }

  /** Go to a step; beyond the last one means to follow the text. */
  go(step) {
    const last = this.#run?.steps.length ?? 0;
    this.#follow = step >= last;
    this.#step = Math.min(Math.max(step, Math.min(1, last)), last);
    this.touch();
    if (last) this.chosen(this.#run, this.#follow && !this.#run.done ? 0 : this.#step);
  }

  /** Something changed: draw soon, and not too often. */
  touch() {
    if (this.#dirty) return;
    this.#dirty = true;
    get("tree-box").setAttribute("aria-busy", "true");
    const wait = Math.max(0, this.#drawn + (this.calm() ? 500 : 110) - performance.now());
    setTimeout(() => requestAnimationFrame(() => this.#draw()), this.#run?.done ? 0 : wait);
  }

  #draw() {
    this.#dirty = false;
    this.#drawn = performance.now();
    const run = this.#run;
    const last = run?.steps.length ?? 0;
    if (this.#follow) this.#step = last;
    this.#tree(run?.steps[this.#step - 1], last);
    this.#legend(run);
    this.charts.draw(run, this.#plain);
    get("tree-box").setAttribute("aria-busy", "false");
  }

  #tree(step, last) {
    this.slider.max = Math.max(1, last);
    this.slider.value = Math.max(1, this.#step);
    this.slider.setAttribute("aria-valuetext", step ? `step ${this.#step} of ${last}` : "no steps yet");
    this.slider.disabled = last < 2;
    // A button that has the focus keeps it: it is marked, not disabled.
    for (const [id, end] of [["earlier", this.#step <= 1], ["later", this.#step >= last], ["latest", this.#step >= last]]) {
      get(id).disabled = !last;
      get(id).setAttribute("aria-disabled", end);
    }
    const whose = this.#run?.wanted > 1 ? `answer ${this.#run.number + 1} \u00b7 ` : "";
    get("tree-of").textContent = step ? `${whose}step ${this.#step} of ${last}` : "";
    get("tree-details").hidden = !step?.tree;
    if (step === this.shown) return;
    this.shown = step;
    if (!step) {
      get("tree-box").replaceChildren();
      get("tree-words").textContent = this.#waiting;
      get("whole").hidden = true;
      return;
    }
    get("tree-words").textContent = sentence(step);
    let large = false;
    if (step.tree) large = draw(get("tree-box"), step, (element, origin) => this.palette.dress(element, origin), this.#whole);
    else get("tree-box").replaceChildren();
    // Once a tree was large, the button stays, so that it does not come and go under the hand.
    if (large) get("whole").hidden = false;
    this.#list();
  }

  #list() {
    if (get("tree-details").open && this.shown?.tree) get("tree-list").textContent = list(this.shown);
  }

  #legend(run) {
    for (const [origin, count] of run?.origins ?? []) {
      let line = this.#counts.get(origin);
      if (!line) {
        const item = document.createElement("li");
        const swatch = Object.assign(document.createElement("span"), { className: "swatch", textContent: origin === "target" ? "target\u2019s own" : origin });
        this.palette.dress(swatch, origin);
        line = [document.createElement("b"), document.createElement("span")];
        item.append(swatch, " ", ...line);
        this.#counts.set(origin, line);
        // The target comes first.
        get("legend")[origin === "target" ? "prepend" : "append"](item);
      }
      const share = Math.round((100 * count) / run.tokens);
      line[0].textContent = count;
      line[1].textContent = ` (${share} %)`;
    }
  }
}
