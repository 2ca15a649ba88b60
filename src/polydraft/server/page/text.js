// Text of a model on the page: coloured by origin, never as HTML, control characters as signs that can be seen.

export const get = (id) => document.getElementById(id);

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const HALF = "\ufffd";

function sign(character) {
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** Text whose control characters and marks of direction can be seen; line ends and tabs stay. */
export const visible = (text) => text.replace(UNSEEN, sign);

/** Ends of lines and tabs as signs, and what cannot be seen. */
const marked = (text) => visible(text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/\r/g, "\u240d"));

/** A token for a label: spaces can be seen as well. */
export const label = (text) => marked(text).replace(/ /g, "\u2423");

/** A number of things in words. */
export const counted = (number, noun) => `${number} ${noun}${Number(number) === 1 ? "" : "s"}`;

/** A token in a sentence: quoted, without the spaces around it; spaces alone are named. */
export function quoted(text) {
  const words = marked(text).trim();
  if (words) return `\u201c${words}\u201d`;
  if (!text) return "an empty token";
  return text.length === 1 ? "a space" : counted(text.length, "space");
}

/** Which look (colour and line) each drafter has, in the order in which they appear. */
export class Palette {
  #names = new Map();

  /** The number of a drafter's look; -1 for the target. */
  of(origin) {
    if (!origin || origin === "target") return -1;
    if (!this.#names.has(origin)) this.#names.set(origin, this.#names.size);
    return this.#names.get(origin);
  }

  /** Give an element the look of an origin. */
  dress(element, origin) {
    const look = this.of(origin);
    if (look < 0) return;
    element.classList.add("drafted");
    element.dataset.colour = look % 5;
    element.dataset.line = (look + Math.floor(look / 5)) % 5;
  }
}

/**
 * Paints a text as it comes. Tokens say whose words they are, deltas what the text is; deltas may come later than
 * their tokens and may lack some. Painted for good is what both agree on; tokens ahead of the deltas are shown behind
 * it until then. At the end the text is that of the deltas.
 */
export class Painter {
  #tail = document.createElement("span");
  #tokens = [];
  #delta = "";
  #fresh = [];
  #last = null;

  constructor(box, palette) {
    this.palette = palette;
    this.box = box;
    this.text = "";
    box.append(this.#tail);
  }

  /** Take what a chunk brought; nothing is drawn before `flush`. */
  add(step, tokens, delta) {
    for (const token of tokens) if (token.text) this.#tokens.push({ ...token, step });
    this.#delta += delta;
    this.text += delta;
    this.#settle();
  }

  #emit(length, token) {
    this.#fresh.push({ text: this.#delta.slice(0, length), origin: token?.origin, step: token?.step });
    this.#delta = this.#delta.slice(length);
  }

  /** How many characters of the deltas a token is, or 0. Decoded alone, a token may have a space more or less. */
  #length(text) {
    const place = this.#delta.indexOf(text);
    if (place >= 0 && !this.#delta.slice(0, place).trim()) return place + text.length;
    const bare = text.trimStart();
    return this.#delta.startsWith(bare) ? bare.length : 0;
  }

  #settle() {
    while (this.#tokens.length && this.#delta) {
      const token = this.#tokens[0];
      const length = this.#length(token.text);
      if (length) {
        this.#emit(length, token);
        this.#tokens.shift();
      } else if (token.text.startsWith(this.#delta)) {
        break; // the rest of its text is held back
      } else if (!this.#skip(token)) {
        break;
      }
    }
    if (!this.#tokens.length && this.#delta) this.#emit(this.#delta.length);
  }

  /** Tokens that are parts of one character, or have no text of their own: go on behind them. */
  #skip(token) {
    for (let i = 1; i < this.#tokens.length; i += 1) {
      const { text } = this.#tokens[i];
      const place = text.includes(HALF) ? -1 : this.#delta.indexOf(text);
      if (place >= 0 && place <= 4 * i) {
        if (place) this.#emit(place, token);
        this.#tokens.splice(0, i);
        return true;
      }
    }
    if (!this.#tokens.every(({ text }) => text.includes(HALF))) return false;
    this.#emit(this.#delta.length, token);
    this.#tokens = [];
    return true;
  }

  /** No more will come: what is left of the deltas is the text, tokens beyond them are not. */
  end() {
    if (this.#delta) this.#emit(this.#delta.length, this.#tokens[0]);
    this.#tokens = [];
    this.flush();
    this.#tail.remove();
  }

  /** Draw what came since the last call. */
  flush() {
    for (const piece of this.#fresh) this.#last = this.#append(piece, this.#last, (node) => this.#tail.before(node));
    this.#fresh = [];
    if (!this.#tokens.length && !this.#tail.firstChild) return;
    this.#tail.replaceChildren();
    let last = this.#last;
    for (const piece of this.#tokens) last = this.#append(piece, last === this.#last ? null : last, (node) => this.#tail.append(node));
  }

  /**
   * Add a piece of text behind `last`; neighbours of one origin and step become one element. Blanks before a word and
   * ends of lines carry no colour, since a coloured gap only distracts.
   */
  #append({ text, origin, step }, last, add) {
    let run = last?.origin === origin && last?.step === step ? last : null;
    for (const part of text.split(/(\s*\n\s*)/)) {
      if (!part) continue;
      let words = part;
      if (!run || part.includes("\n")) {
        const blank = part.match(/^\s*/)[0];
        if (blank) add(document.createTextNode(visible(blank)));
        words = part.slice(blank.length);
        run = null;
      }
      if (!words) continue;
      if (run) {
        run.span.lastChild.appendData(visible(words));
        continue;
      }
      const span = document.createElement("span");
      span.textContent = visible(words);
      if (step !== undefined) span.dataset.step = step;
      this.palette.dress(span, origin);
      add(span);
      run = { origin, step, span };
    }
    return run;
  }
}
