// The table of runs: what each does, whether it learns, and how to start another.
import { follow, get, post } from "./api.js";
import { ago, duration, fill, h, number, spark, visible } from "./dom.js";

const KINDS = { live: ["running", ""], finished: ["finished", "good"], waiting: ["waiting for labels", "warn"], stopped: ["stopped by a guard", "warn"], interrupted: ["interrupted", ""], crashed: ["crashed", "bad"] };
export const MARKS = { yes: "✓", careful: "!", unclear: "~", early: "…", no: "✕" };
const FIRST = "quickstart"; // the recipe that New run proposes: GRPO in minutes on a laptop
const TONES = { yes: "good", careful: "warn", unclear: "", early: "", no: "bad" };
const ANSWERS = { yes: "learning", careful: "look closer", unclear: "not clear yet", early: "too early", no: "not learning" };

/** @param {{kind: string, said: string}} status */
export function chip(status) {
  const [text, tone] = KINDS[status.kind] ?? [status.kind, ""];
  return h("span", { class: `chip ${tone} ${status.kind === "live" ? "live" : ""}`, title: status.said || text }, text);
}

/** @param {HTMLElement} main */
export async function page(main) {
  document.title = "Runs – posttrain studio";
  const chosen = new Set();
  const search = h("input", { type: "search", placeholder: "Find by name or tag", "aria-label": "Find runs", oninput: () => draw() });
  const kind = h("select", { "aria-label": "Status", onchange: () => draw() }, h("option", { value: "" }, "All"), Object.entries(KINDS).map(([k, [text]]) => h("option", { value: k }, text)));
  const together = h("button", { type: "button", disabled: true, onclick: () => dispatchEvent(new CustomEvent("studio-go", { detail: `/compare?runs=${[...chosen].join(",")}` })) }, "Compare");
  const body = h("div", {});
  fill(main, h("div", { class: "row between" }, h("h1", {}, "Runs"), h("div", { class: "row" }, search, kind, together, h("button", { class: "main", type: "button", onclick: () => startDialog(main) }, "New run"))), body);

  async function draw() {
    const found = await get("/api/runs", { text: search.value, status: kind.value });
    if (!found.runs.length && found.left) return setTimeout(draw, 100);
    if (!found.runs.length) {
      const none = !search.value && !kind.value;
      return fill(body, h("div", { class: "card empty" }, h("h2", {}, none ? "No runs here yet" : "No run matches"), none && h("p", {}, "Start one with New run, or in a terminal with ", h("code", { class: "mono" }, "posttrain run quickstart"), "; or let ", h("code", { class: "mono" }, "posttrain studio --demo"), " make one.")));
    }
    if (found.left) setTimeout(draw, 100);
    const rows = found.runs.map((/** @type {any} */ r) => row(r, chosen, () => (together.disabled = chosen.size < 2)));
    const names = ["", "Run", "Status", "Learning?", "Held-out score", "Reward", "Stage", "Time"];
    fill(body, h("div", { class: "card table" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((n, i) => h("th", { scope: "col", class: i > 3 ? "wide" : null }, n || h("span", { class: "sr" }, "Choose"))))), h("tbody", {}, rows))), found.total > rows.length && h("p", { class: "dim small" }, found.left ? `${found.left} more are being looked at…` : `${rows.length} of ${found.total} runs; find others by name`));
  }
  await draw();
  return follow("", draw);
}

/** @param {any} r @param {Set<string>} chosen @param {() => void} changed */
function row(r, chosen, changed) {
  const pick = h("input", { type: "checkbox", "aria-label": `Choose ${r.name}`, checked: chosen.has(r.id), onchange: () => (pick.checked ? chosen.add(r.id) : chosen.delete(r.id), changed()) });
  const share = r.score?.[3]?.startsWith("accuracy");
  const score = r.score && r.score[0] !== null ? [h("b", {}, number(r.score[0], share)), r.score[1] !== null && h("span", { class: "dim tiny" }, ` ${number(r.score[1], share)} – ${number(r.score[2], share)}`)] : h("span", { class: "dim" }, "–");
  const steps = r.progress?.steps ? ` ${r.progress.step}/${r.progress.steps}` : r.progress?.step ? ` ${r.progress.step}` : "";
  return h("tr", {},
    h("td", {}, pick),
    h("td", {}, h("a", { class: "name", href: `/run/${r.id}` }, visible(r.name)), h("div", { class: "dim tiny" }, visible(r.recipe), r.folder !== r.name && [" · ", visible(r.folder)], r.tags.map((/** @type {string} */ t) => [" ", h("span", { class: "chip" }, visible(t))]))),
    h("td", {}, chip(r.status)),
    h("td", {}, r.verdict && h("span", { class: `chip ${TONES[r.verdict.answer]}`, title: r.verdict.headline }, `${MARKS[r.verdict.answer]} ${r.verdict.answer === "yes" && r.status.kind === "finished" ? "learned" : ANSWERS[r.verdict.answer]}`), r.alarms > 0 && [" ", h("span", { class: "chip bad" }, `${r.alarms} alarm${r.alarms > 1 ? "s" : ""}`)]),
    h("td", { class: "wide number" }, score),
    h("td", { class: "wide" }, spark(r.spark ?? [])),
    h("td", { class: "wide number" }, visible(r.stage), h("span", { class: "dim" }, steps)),
    h("td", { class: "wide number" }, duration(r.seconds), h("div", { class: "dim tiny" }, r.began ? ago(r.began) : "")),
  );
}

/** @param {HTMLElement} main */
async function startDialog(main) {
  const recipes = await get("/api/recipes");
  const recipe = h("select", { "aria-label": "Recipe" }, recipes.map((/** @type {any} */ r) => h("option", { value: r.name, selected: r.name === FIRST }, r.name)));
  const about = h("p", { class: "dim small" });
  const describe = () => (about.textContent = `${recipes.find((/** @type {any} */ r) => r.name === recipe.value)?.summary ?? ""} Every key: posttrain run ${recipe.value} --help`);
  recipe.addEventListener("change", describe);
  const settings = h("textarea", { rows: 4, placeholder: "seed=1\nrl.lr=1e-4", class: "mono" });
  const said = h("div", { class: "error", hidden: true, role: "alert" });
  const start = h("button", { class: "main", type: "submit" }, "Start");
  const dialog = h("dialog", { "aria-label": "New run" }, h("form", { method: "dialog", class: "stack" }, h("h2", {}, "New run"), h("label", { class: "field" }, "Recipe", recipe), about, h("label", { class: "field" }, "Settings, one key=value a line (none are needed)", settings), said, h("div", { class: "row" }, start, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  dialog.querySelector("form").addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    start.disabled = true;
    start.textContent = "Starting…";
    try {
      const made = await post("/api/runs", { recipe: recipe.value, settings: settings.value.split("\n").map((/** @type {string} */ l) => l.trim().replace(/\s*=\s*/, "=")).filter(Boolean) });
      dialog.close();
      dispatchEvent(new CustomEvent("studio-go", { detail: `/run/${made.run}` }));
    } catch (error) {
      said.hidden = false;
      said.textContent = /** @type {Error} */ (error).message;
      start.disabled = false;
      start.textContent = "Start";
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  main.append(dialog);
  describe();
  dialog.showModal();
}
