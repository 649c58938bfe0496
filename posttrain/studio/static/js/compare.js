// Several runs in the same charts, and the settings in which they differ.
import { follow, get } from "./api.js";
import { Chart } from "./charts.js";
import { fill, h, number, visible } from "./dom.js";
import { explain, isBound, load } from "./metrics.js";
import { chip } from "./runs.js";

const MOST = 50;
const COLUMNS = 6; // runs in the tables
const FEW = 4; // settings that are shown without a click

/** @param {HTMLElement} main @param {string[]} _ @param {URLSearchParams} query */
export async function page(main, _, query) {
  document.title = "Compare – posttrain studio";
  await load();
  const ids = (query.get("runs") ?? "").split(",").filter((id) => /^\w+$/.test(id)).slice(0, MOST);
  let runs = await Promise.all(ids.map((id) => get(`/api/runs/${id}`)));
  const others = await Promise.all(ids.slice(1, COLUMNS).map((id) => get(`/api/runs/${id}/settings`, { against: ids[0] })));
  /** @type {import("./charts.js").View} */
  const view = { axis: "step", smoothing: 0.6, zoom: null, marks: [], began: 0 };
  const reset = h("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Whole run");
  const soft = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, "aria-label": "Smoothing", oninput: () => ((view.smoothing = Number(soft.value)), redraw()) });
  /** @type {Map<string, {chart: Chart, answers: any[]}>} */
  const charts = new Map();
  function zoom(/** @type {[number, number]|null} */ to) {
    view.zoom = to;
    reset.disabled = !to;
    redraw();
  }
  function redraw() {
    for (const figure of charts.keys()) draw(figure);
  }
  const top = h("div", { class: "stack" });
  const grid = h("div", { class: "charts" });

  const shown = ids.slice(0, COLUMNS).map((_, n) => n);
  const table = (/** @type {string} */ title, /** @type {[string, string[]][]} */ rows) => h("div", { class: "card table" }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, title), shown.map((n) => h("th", { scope: "col" }, visible(runs[n].name))))), h("tbody", {}, rows.map(([name, cells]) => h("tr", {}, h("td", {}, visible(name)), cells.map((cell) => h("td", {}, visible(cell))))))));
  function header() {
    const score = (/** @type {any} */ run) => (run.score && run.score[0] !== null ? number(run.score[0], run.score[3].startsWith("accuracy")) : "–");
    fill(top, h("div", { class: "row" }, runs.map((run) => h("a", { class: "button", href: `/run/${run.id}` }, visible(run.name), chip(run.status)))),
      table("Run", [["Is it learning?", shown.map((n) => runs[n].verdict?.headline ?? "–")], ["Held-out score", shown.map((n) => score(runs[n]))]]),
      runs.length > COLUMNS && h("p", { class: "dim small" }, `The tables have the first ${COLUMNS} runs, the charts have all.`));
  }
  function differences() {
    const keys = [...new Set(others.flatMap((o) => Object.keys(o.differences ?? {})))];
    const show = (/** @type {any} */ v) => (v === undefined || v === null ? "–" : typeof v === "string" ? v : JSON.stringify(v));
    const value = (/** @type {string} */ key, /** @type {number} */ n) => (n ? others[n - 1].settings[key] : others.find((o) => key in (o.differences ?? {}))?.differences[key][1]);
    return h("details", { open: keys.length <= FEW }, h("summary", {}, keys.length === 1 ? "1 setting differs" : `${keys.length} settings differ`), table("Setting", keys.map((key) => [key, shown.map((n) => show(value(key, n)))])));
  }
  fill(main, h("div", { class: "row between" }, h("h1", {}, `${runs.length} run${runs.length === 1 ? "" : "s"} together`), h("div", { class: "row small" }, h("label", { class: "row" }, "Smoothing", soft), reset)), top, ids.length > 1 && differences(), grid);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      seen.unobserve(entry.target);
      fetchOne(/** @type {HTMLElement} */ (entry.target).dataset.figure ?? "", runs);
    }
  }, { rootMargin: "200px" });
  function layout() {
    const counts = new Map();
    for (const run of runs) for (const f of Object.keys(run.figures)) if (!isBound(f)) counts.set(f, (counts.get(f) ?? 0) + 1);
    const names = [...counts].filter(([, n]) => n > 1).map(([f]) => f).sort((a, b) => explain(a).place - explain(b).place);
    for (const figure of names.filter((f) => !charts.has(f))) {
      const chart = new Chart(explain(figure), zoom);
      chart.node.dataset.figure = figure;
      charts.set(figure, { chart, answers: [] });
      seen.observe(chart.node);
    }
    fill(grid, names.length ? names.map((f) => charts.get(f)?.chart.node) : h("div", { class: "card empty" }, "No figure was recorded by two of these runs yet."));
  }
  function draw(/** @type {string} */ figure) {
    const held = charts.get(figure);
    const found = (held?.answers ?? []).flatMap((a, n) => a.series.map((/** @type {any} */ s) => ({ label: a.series.length > 1 ? `${runs[n].name} ${s.stage}` : runs[n].name, series: s })));
    if (held && found.length) held.chart.draw(found, view);
  }
  async function fetchOne(/** @type {string} */ figure, /** @type {any[]} */ changed) {
    const held = charts.get(figure);
    if (!held) return;
    const ask = (/** @type {any} */ run, /** @type {number} */ n) => (changed.includes(run) || !held.answers[n] ? get(`/api/runs/${run.id}/series`, { figure, buckets: 500 }) : held.answers[n]);
    held.answers = await Promise.all(runs.map(ask));
    draw(figure);
  }
  header();
  layout();
  addEventListener("studio-theme", redraw);
  const end = follow("", async () => {
    const live = runs.map((run) => run.status.kind === "live");
    runs = await Promise.all(runs.map((run) => (run.status.kind === "finished" ? run : get(`/api/runs/${run.id}`))));
    const changed = runs.filter((run, n) => live[n] || run.status.kind === "live");
    if (!changed.length) return;
    header();
    layout();
    for (const [figure, { answers }] of charts) if (answers.length) fetchOne(figure, changed);
  });
  return () => {
    end();
    seen.disconnect();
    removeEventListener("studio-theme", redraw);
    for (const { chart } of charts.values()) chart.close();
  };
}
