// The page is built from nodes, never from markup: text from a model is always a text node.

/** @typedef {Node|string|number|null|undefined|false} Child */

/**
 * Make an element. `on...` are listeners, `class` and `data` have their usual meaning, a style is set through the object model; the rest are attributes.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child|Child[])} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  set(node, props);
  node.append(...flat(children));
  return node;
}

/** The same for drawings. @param {string} tag @param {Record<string, any>} props @param {...(Child|Child[])} children @returns {any} */
export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, props);
  node.append(...flat(children));
  return node;
}

/** @param {any} node @param {Record<string, any>} props */
function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value") node.value = value;
    else if (name === "href") node.setAttribute("href", safe(String(value)));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Allow only addresses of this server: any other link would come from a run. @param {string} href */
function safe(href) {
  return /^(\/(?!\/)|#|blob:)/.test(href) ? href : "#";
}

/** @param {any[]} children @returns {(Node|string)[]} */
function flat(children) {
  return children.flat(9).filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c)));
}

/** Replace the children of a node. @param {Element} node @param {...(Child|Child[])} children */
export function fill(node, ...children) {
  node.replaceChildren(...flat(children));
}

// controls, bidirectional overrides, zero-width characters, other separators: invisible or misleading
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/**
 * Text of a model or a file: hidden characters are shown as escapes.
 * @param {unknown} text
 * @returns {(Node|string)[]}
 */
export function visible(text) {
  const said = String(text ?? "");
  const parts = [];
  let last = 0;
  for (const found of said.matchAll(HIDDEN)) {
    parts.push(said.slice(last, found.index));
    const code = found[0].codePointAt(0) ?? 0;
    parts.push(h("span", { class: "hidden-mark", title: "a character that is not shown as it is" }, `\\u${code.toString(16).padStart(4, "0")}`));
    last = found.index + found[0].length;
  }
  parts.push(said.slice(last));
  return parts.filter((p) => p !== "");
}

/** @param {number|null|undefined} value @param {boolean} [percent] */
export function number(value, percent = false) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (percent) return `${(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(size < 1 ? 3 : size < 100 ? 2 : 0);
}

/** @param {number} seconds */
export function duration(seconds) {
  const all = Math.max(0, Math.round(seconds));
  const [d, hr, m, s] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60, all % 60];
  if (d) return `${d}d ${hr}h`;
  if (hr) return `${hr}h ${m}m`;
  return m ? `${m}m ${s}s` : `${s}s`;
}

/** @param {number} time in seconds @returns {string} */
export function ago(time) {
  const gone = Date.now() / 1000 - time;
  return gone < 60 ? "just now" : `${duration(gone).split(" ")[0]} ago`;
}

/** Announce a text to screen readers. @param {string} text */
export function announce(text) {
  const place = document.getElementById("said");
  if (place) place.textContent = text;
}

/** Is a person typing or choosing, so that keys are not commands? @param {KeyboardEvent} event */
export function typing(event) {
  return event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.target instanceof HTMLTextAreaElement;
}

/** Let keys be commands. @param {Record<string, () => void>} commands @returns {() => void} what ends it */
export function shortcuts(commands) {
  const pressed = (/** @type {KeyboardEvent} */ event) => {
    if (!typing(event) && !event.ctrlKey && !event.metaKey) commands[event.key]?.();
  };
  document.addEventListener("keydown", pressed);
  return () => document.removeEventListener("keydown", pressed);
}

/** Offer a file. @param {Blob} blob @param {string} name */
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** @param {number[]} values @param {number} [width] @param {number} [height] */
export function spark(values, width = 120, height = 28) {
  const known = values.map((v, i) => /** @type {[number, number]} */ ([i, v])).filter(([, v]) => v !== null && Number.isFinite(v));
  if (known.length < 2) return h("span", { class: "dim" }, "–");
  const ys = known.map(([, v]) => v);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const x = (/** @type {number} */ i) => 2 + (i / (values.length - 1)) * (width - 4);
  const y = (/** @type {number} */ v) => height - 3 - ((v - low) / (high - low || 1)) * (height - 6);
  const path = known.map(([i, v], n) => `${n ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `from ${number(ys[0])} to ${number(ys[ys.length - 1])}` }, svg("path", { d: path }));
}
