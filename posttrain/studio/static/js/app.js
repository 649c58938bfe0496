// Finds the page of an address; code that all pages share.
import { fill, h } from "./dom.js";
import * as runs from "./runs.js";
import * as run from "./run.js";
import * as compare from "./compare.js";
import * as rollouts from "./rollouts.js";
import * as pipeline from "./pipeline.js";
import * as label from "./label.js";
import * as replay from "./replay.js";
import * as review from "./review.js";
import * as play from "./play.js";

/** A page draws itself into `main` and returns a function that ends it. @typedef {(main: HTMLElement, words: string[], query: URLSearchParams) => Promise<(() => void)|void>} Page */

/** @type {[RegExp, string, Page][]} */
const PAGES = [
  [/^\/$/, "runs", runs.page],
  [/^\/compare$/, "runs", compare.page],
  [/^\/run\/(\w+)$/, "runs", run.page],
  [/^\/run\/(\w+)\/settings$/, "runs", run.settings],
  [/^\/run\/(\w+)\/rollouts$/, "runs", rollouts.page],
  [/^\/run\/(\w+)\/rollouts\/([\w.-]+)\/(\d+)\/(\d+)$/, "runs", rollouts.one],
  [/^\/run\/(\w+)\/pipeline$/, "runs", pipeline.page],
  [/^\/run\/(\w+)\/replay$/, "runs", replay.page],
  [/^\/run\/(\w+)\/review$/, "runs", review.page],
  [/^\/run\/(\w+)\/hacking$/, "runs", review.hacking],
  [/^\/label$/, "label", label.page],
  [/^\/label\/(\w+)$/, "label", label.desk],
  [/^\/play$/, "play", play.page],
];

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
/** @type {(() => void)|void} */
let leave;
let turn = 0;

async function show() {
  const mine = ++turn;
  leave?.();
  leave = undefined;
  const found = PAGES.find(([pattern]) => pattern.test(location.pathname));
  const fresh = h("div", { class: "stack" }, h("p", { class: "dim loading" }, "Loading…"));
  if (!found) {
    fill(main, h("div", { class: "card empty" }, h("h2", {}, "There is no such page"), h("a", { href: "/" }, "All runs")));
    return;
  }
  for (const link of document.querySelectorAll(".bar nav a")) {
    if (link.getAttribute("data-page") === found[1]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  fill(main, fresh);
  try {
    const words = (found[0].exec(location.pathname) ?? []).slice(1);
    const end = await found[2](fresh, words, new URLSearchParams(location.search));
    fresh.querySelector(".tabs a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    if (mine === turn) leave = end;
    else end?.();
  } catch (error) {
    fill(fresh, h("div", { class: "error", role: "alert" }, /** @type {Error} */ (error).message));
  }
}

/** Go to another page of the studio. @param {string} address */
export function go(address) {
  history.pushState({}, "", address);
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
  show();
}

document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a") : null;
  const href = link?.getAttribute("href") ?? "";
  if (!link || !href.startsWith("/") || href.startsWith("/api") || link.hasAttribute("download") || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(href);
});
addEventListener("popstate", show);
addEventListener("studio-go", (event) => go(/** @type {CustomEvent} */ (event).detail));
document.getElementById("theme")?.addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  dispatchEvent(new Event("studio-theme"));
});
addEventListener("load", show, { once: true });
