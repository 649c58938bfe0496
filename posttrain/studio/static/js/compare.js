// Several runs in the same charts.
import { get } from "./api.js";
import { Chart } from "./charts.js";
import { fill, h, visible } from "./dom.js";
import { explain, isBound, load } from "./metrics.js";
import { chip } from "./runs.js";

const MOST = 50;

/** @param {HTMLElement} main @param {string[]} _ @param {URLSearchParams} query */
export async function page(main, _, query) {
  document.title = "Compare – posttrain studio";
  await load();
  const ids = (query.get("runs") ?? "").split(",").filter((id) => /^\w+$/.test(id)).slice(0, MOST);
  const runs = await Promise.all(ids.map((id) => get(`/api/runs/${id}`)));
  /** @type {import("./charts.js").View} */
  const view = { axis: "step", smoothing: 0.6, zoom: null, marks: [], began: 0 };
  const counts = new Map();
  for (const run of runs) for (const f of Object.keys(run.figures)) if (!isBound(f)) counts.set(f, (counts.get(f) ?? 0) + 1);
  const names = [...counts].filter(([, n]) => n > 1).map(([f]) => f).sort((a, b) => explain(a).place - explain(b).place);
  const reset = h("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Whole run");
  const soft = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, "aria-label": "Smoothing", oninput: () => ((view.smoothing = Number(soft.value)), redraw()) });
  /** @type {Map<string, {chart: Chart, found: any[]}>} */
  const charts = new Map();
  function zoom(/** @type {[number, number]|null} */ to) {
    view.zoom = to;
    reset.disabled = !to;
    redraw();
  }
  function redraw() {
    for (const { chart, found } of charts.values()) if (found.length) chart.draw(found, view);
  }
  const grid = h("div", { class: "charts" });
  fill(main, h("div", { class: "row between" }, h("h1", {}, `${runs.length} run${runs.length === 1 ? "" : "s"} together`), h("div", { class: "row small" }, h("label", { class: "row" }, "Smoothing", soft), reset)),
    h("div", { class: "row" }, runs.map((run) => h("a", { class: "button", href: `/run/${run.id}` }, visible(run.name), chip(run.status)))), grid);
  for (const figure of names) {
    const chart = new Chart(explain(figure), zoom);
    charts.set(figure, { chart, found: [] });
    grid.append(chart.node);
  }
  if (!names.length) fill(grid, h("div", { class: "card empty" }, "No figure was recorded by two of these runs."));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      seen.unobserve(entry.target);
      fetchOne(names[[...charts.values()].findIndex((c) => c.chart.node === entry.target)]);
    }
  }, { rootMargin: "200px" });
  for (const { chart } of charts.values()) seen.observe(chart.node);
  async function fetchOne(/** @type {string} */ figure) {
    const answers = await Promise.all(runs.map((run) => get(`/api/runs/${run.id}/series`, { figure, buckets: 500 })));
    const held = charts.get(figure);
    if (!held) return;
    held.found = answers.flatMap((a, n) => a.series.map((/** @type {any} */ s) => ({ label: a.series.length > 1 ? `${runs[n].name} ${s.stage}` : runs[n].name, series: s })));
    held.chart.draw(held.found, view);
  }
  addEventListener("studio-theme", redraw);
  return () => {
    seen.disconnect();
    removeEventListener("studio-theme", redraw);
    for (const { chart } of charts.values()) chart.close();
  };
}
