// The token tree of a step: as a drawing, as a sentence, and as a list.

import { counted, label, quoted } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 27;
const BOX = 21;
const GAP = 26;
const LETTER = 7.25;
const MOST = 14;

/** An SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const short = (text) => {
  const letters = [...label(text)];
  return letters.length > MOST ? `${letters.slice(0, MOST - 1).join("")}\u2026` : letters.join("") || "\u2205";
};

/** Wide letters (Chinese, emoji) take the room of two. */
const room = (text) => [...text].reduce((sum, letter) => sum + (letter.codePointAt(0) > 0x2fff ? 2 : 1), 0);

/**
 * Where the nodes stand: depth from left to right, a row for each leaf; a parent stands beside its accepted child, so
 * that the accepted path is as straight as it can be, or else in the middle of its children.
 */
export function layout(tree) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.tokens.map((text, i) => ({
    i, text, id: tree.ids?.[i], parent: tree.parents[i], depth: 0, children: [],
    kind: i === 0 ? "root" : accepted.has(i) ? "accepted" : "rejected",
  }));
  const drawn = nodes.filter((node) => node.i === 0 || tree.valid?.[node.i] !== false);
  const end = Math.max(0, ...tree.accepted);
  if (tree.next !== undefined && tree.next !== null) {
    const next = { i: -1, text: tree.next, parent: end, depth: 0, children: [], kind: "next" };
    drawn.push(next);
    nodes[end].children.push(next);
  }
  for (const node of drawn) {
    const parent = nodes[node.parent];
    if (node.i > 0 && parent) parent.children.push(node);
    if (parent) node.depth = parent.depth + 1;
  }
  const widths = [];
  for (const node of drawn) {
    node.label = short(node.text);
    node.width = Math.max(BOX, room(node.label) * LETTER + 13);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 1));
  let rows = 0;
  const place = (node) => {
    node.children.forEach(place);
    const kept = node.children.find(({ kind }) => kind === "accepted") ?? node.children.find(({ kind }) => kind === "next");
    const { children } = node;
    node.x = starts[node.depth];
    if (!children.length) node.y = 1 + ROW * rows++;
    else node.y = kept ? kept.y : (children[0].y + children.at(-1).y) / 2;
  };
  place(nodes[0]);
  return { nodes: drawn, all: nodes, width: starts.at(-1) + widths.at(-1) + 1, height: Math.max(1, rows) * ROW - ROW + BOX + 2 };
}

const names = (kind) => ({ root: "the text so far", accepted: "kept", rejected: "not kept", next: "the target's own" })[kind];

/**
 * Draw the tree of a step into a box; `dress` gives an element the look of a drafter. With `whole` a large tree shrinks
 * until it fits, else it stays readable and scrolls. Says whether it is larger than the box.
 */
export function draw(box, step, dress, whole) {
  const { nodes, all, width, height } = layout(step.tree);
  const edges = svg("g");
  const marks = svg("g");
  for (const node of nodes) {
    const parent = node.i ? all[node.parent] : null;
    if (parent) {
      const x = parent.x + parent.width;
      const [y, to] = [parent.y + BOX / 2, node.y + BOX / 2];
      const bend = (node.x - x) / 2;
      const edge = svg("path", { class: `edge ${node.kind}`, d: `M${x} ${y}C${x + bend} ${y} ${node.x - bend} ${to} ${node.x} ${to}` });
      if (node.kind === "accepted") dress(edge, step.source);
      edges[node.kind === "rejected" ? "prepend" : "append"](edge);
    }
    const group = svg("g", { class: `node ${node.kind}` });
    if (node.kind === "accepted") dress(group, step.source);
    const title = svg("title");
    title.textContent = `\u201c${label(node.text)}\u201d${node.id === undefined ? "" : `, token ${node.id}`}: ${names(node.kind)}`;
    const text = svg("text", { x: node.x + node.width / 2, y: node.y + BOX / 2 + 4, "text-anchor": "middle" });
    for (const part of node.label.split(/([\u2423\u21b5\u21e5]+)/)) {
      const piece = svg("tspan", /^[\u2423\u21b5\u21e5]/.test(part) ? { class: "space" } : {});
      piece.textContent = part;
      if (part) text.append(piece);
    }
    group.append(title, svg("rect", { x: node.x, y: node.y, width: node.width, height: BOX, rx: 5 }), text);
    marks.append(group);
  }
  const fit = Math.min(1, (box.clientWidth - 2) / width, box.clientHeight / height);
  const scale = whole ? fit : Math.max(0.8, fit);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale, role: "img", "aria-label": sentence(step),
  }, edges, marks);
  box.replaceChildren(picture);
  // The root keeps its height from step to step, so that the accepted path does not jump.
  const root = (nodes[0].y + BOX / 2) * scale;
  const free = box.clientHeight - height * scale;
  picture.style.marginTop = `${Math.max(0, Math.min(free, box.clientHeight / 2 - root))}px`;
  box.scrollTop = free < 0 ? root - box.clientHeight / 2 : 0;
  const end = Math.max(...nodes.filter(({ kind }) => kind !== "rejected").map((node) => node.x + node.width));
  box.scrollLeft = end * scale - box.clientWidth + 2;
  return fit < 0.8;
}

/** What a step did, in words. */
export function sentence(step) {
  const { tree, source } = step;
  if (!tree) return `The target wrote ${step.tokens.map(({ text }) => quoted(text)).join(" ")} without drafts.`;
  const drafted = tree.tokens.filter((_, i) => i > 0 && tree.valid?.[i] !== false).length;
  const kept = tree.accepted.filter((i) => i > 0).map((i) => quoted(tree.tokens[i]));
  // A maximum of tokens, a stop string or the text's end may come before the end of what was kept.
  const cut = step.tokens.length <= kept.length;
  const next = tree.next === undefined || tree.next === null ? "" : ` The target\u2019s own next token: ${quoted(tree.next)}.`;
  const own = cut ? ` The text ended after ${step.tokens.length} of these.` : next;
  if (!drafted) return `No drafts in this step.${own}`;
  const who = source ? `${source} guessed` : "";
  const guesses = counted(drafted, "token");
  const head = who ? `${who} ${guesses}` : `${guesses} ${drafted === 1 ? "was" : "were"} guessed`;
  return `${head}; ${kept.length ? `kept: ${kept.join(" ")}` : "none was kept"}.${own}`;
}

/** The tree as indented lines, kept ones marked. */
export function list(step) {
  const lines = [];
  const write = (node) => {
    const mark = { root: " ", accepted: "\u2713", rejected: "\u00b7", next: "\u2192" }[node.kind];
    lines.push(`${"  ".repeat(node.depth)}${mark} ${label(node.text)}${node.kind === "next" ? "  (target)" : ""}`);
    node.children.forEach(write);
  };
  write(layout(step.tree).all[0]);
  return lines.join("\n");
}
