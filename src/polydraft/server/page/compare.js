// The same request without drafts, beside the drafted run, which is played back at the pace that it had.

import { Run } from "./run.js";
import { counted, get, Painter } from "./text.js";

const seconds = (value) => `${value.toFixed(value < 100 ? 2 : 1)} s`;
const rated = (run, tokens = run.tokens) =>
  `${counted(tokens, "token")}${Number.isFinite(run.rate) ? ` \u00b7 ${run.rate.toFixed(1)} per second` : ""}`;

export class Comparison {
  constructor(palette, calm) {
    this.palette = palette;
    this.calm = calm;
    this.box = get("compare");
    get("close-compare").addEventListener("click", () => this.close());
  }

  close() {
    this.run?.abortNow();
    this.box.hidden = true;
    this.back?.focus();
  }

  /** Run the request of `drafted` without drafts; resolves with the plain run. `back` gets the focus afterwards. */
  async go(drafted, key, { back, begun }) {
    this.run?.abortNow();
    this.back = back;
    const { speculative, prediction, ...rest } = drafted.request;
    const sender = new Run(drafted.path, { ...rest, speculative: { enabled: false, trace: true } });
    const plain = sender.of(drafted.number);
    this.run = plain;
    this.box.hidden = false;
    get("close-compare").textContent = "Stop and close";
    get("ratio").textContent = "Both run\u2026";
    get("compare-note").textContent = "";
    for (const id of ["text-drafted", "text-plain"]) get(id).replaceChildren();
    this.box.focus({ preventScroll: true });
    this.box.scrollIntoView({ behavior: this.calm() ? "auto" : "smooth", block: "start" });
    const left = new Painter(get("text-drafted"), this.palette);
    const right = new Painter(get("text-plain"), this.palette);
    const going = sender.go(key, (one, ...event) => { if (one === plain) right.add(...event); });
    begun(plain);
    await Promise.all([going, this.#play(drafted, plain, left, right)]);
    if (this.run !== plain) return plain;
    right.end();
    this.#end(drafted, plain);
    return plain;
  }

  /** Move both clocks and texts until both runs have ended. */
  #play(drafted, plain, left, right) {
    let next = 0;
    let tokens = 0;
    const whole = drafted.seconds;
    return new Promise((resolve) => {
      const frame = () => {
        const now = (performance.now() - plain.start) / 1000; // goes on where plain decoding is done first
        const stop = this.calm() || plain.stopped || plain.failure;
        for (; next < drafted.events.length && (stop || drafted.events[next][0] / 1000 <= now); next += 1) {
          const [, ...event] = drafted.events[next];
          left.add(...event);
          tokens += event[1].length;
        }
        const over = next >= drafted.events.length;
        if (over) left.end();
        else left.flush();
        right.flush();
        get("clock-drafted").textContent = seconds(over ? whole : Math.min(now, whole));
        get("clock-plain").textContent = seconds(plain.seconds);
        get("rate-drafted").textContent = over ? rated(drafted) : counted(tokens, "token");
        get("rate-plain").textContent = plain.done ? rated(plain) : counted(plain.tokens, "token");
        const longest = Math.max(whole, plain.seconds, 1e-3);
        get("lane-drafted").style.width = `${(100 * Math.min(over ? whole : now, whole)) / longest}%`;
        get("lane-plain").style.width = `${(100 * plain.seconds) / longest}%`;
        if (over && plain.done) resolve();
        else if (this.box.hidden) resolve();
        else requestAnimationFrame(frame);
      };
      frame();
    });
  }

  #end(drafted, plain) {
    get("close-compare").textContent = "Close";
    const ratio = drafted.rate / plain.rate;
    const same = drafted.text === plain.text;
    if (plain.failure) get("ratio").textContent = `The plain run failed: ${plain.failure.message}`;
    else if (plain.stopped) get("ratio").textContent = "Stopped.";
    else if (!Number.isFinite(ratio)) get("ratio").textContent = "Too few tokens to compare.";
    else if (ratio > 0.97 && ratio < 1.03) get("ratio").textContent = "Both are as fast.";
    else {
      const number = document.createElement("b");
      number.textContent = `${ratio.toFixed(2)}\u00d7`;
      get("ratio").replaceChildren(number, ratio > 1 ? " as fast with drafts" : " the speed of plain decoding: drafts do not pay here");
    }
    const texts = same ? "Both texts are the same." : drafted.request.temperature === 0
      ? "The texts differ, which at temperature 0 happens only where two tokens are as likely to within rounding."
      : "The texts differ: each run draws its own random numbers, from the same distribution.";
    get("compare-note").textContent = plain.failure || plain.stopped ? "" : `${texts}${drafted.wanted > 1 ? ` Each run wrote ${drafted.wanted} answers at once; this is answer ${drafted.number + 1}.` : ""} The ratio is of tokens per second from the first token on, so that reading the prompt does not count.${this.calm() ? "" : " The drafted text was played back at the pace it had."}`;
  }
}
