// The figures beside the text: the tree of a step with its slider, the legend, the charts. They show one run at a time.

import { Charts } from "./charts.js";
import { draw, list, sentence } from "./tree.js";

const get = (id) => document.getElementById(id);

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
