// One run: is it learning, what is it doing, and its curves.
import { follow, get, post } from "./api.js";
import { Chart } from "./charts.js";
import { ago, announce, duration, fill, h, number, visible } from "./dom.js";
import { explain, isBound, load } from "./metrics.js";
import { open as replay } from "./replay.js";
import { MARKS, chip } from "./runs.js";

const TABS = [["", "Overview"], ["/pipeline", "Pipeline"], ["/rollouts", "Rollouts"], ["/replay", "Replay"], ["/review", "Review"], ["/hacking", "Reward hacking"], ["/settings", "Settings"]];

/** The header of every page of a run. @param {any} run @param {string} here */
export function head(run, here) {
  document.title = `${run.name} – posttrain studio`;
  const said = h("span", { class: "error small", hidden: true, role: "alert" });
  const act = (/** @type {string} */ verb, /** @type {string} */ text) => h("button", {
    type: "button",
    onclick: async (/** @type {any} */ event) => {
      event.target.disabled = true;
      try {
        await post(`/api/runs/${run.id}/${verb}`);
        announce(`${text}: asked`);
      } catch (error) {
        said.hidden = false;
        said.textContent = /** @type {Error} */ (error).message;
      }
    },
  }, text);
  const live = run.status.kind === "live";
  return h("div", { class: "stack" },
    h("div", { class: "row between" },
      h("div", {}, h("div", { class: "row" }, h("h1", {}, visible(run.name)), chip(run.status)), h("div", { class: "dim small" }, visible(run.recipe), run.began ? ` · began ${ago(run.began)} · ${duration(run.seconds)}` : "", run.status.said && [" · ", visible(run.status.said)])),
      h("div", { class: "row" }, said, live ? act("stop", "Stop") : run.status.kind !== "finished" && act("resume", "Resume"), tagger(run), h("a", { class: "button", href: `/api/runs/${run.id}/report.html`, download: `${run.name}.html` }, "Export"))),
    h("nav", { class: "tabs", "aria-label": "Pages of the run" }, TABS.map(([path, name]) => h("a", { href: `/run/${run.id}${path}`, "aria-current": path === here ? "page" : null }, name))));
}

/** @param {any} run */
function tagger(run) {
  return h("button", { type: "button", onclick: async () => {
    const said = prompt("Tags, separated by commas", run.tags.join(", "));
    if (said === null) return;
    const tags = said.split(",").map((t) => t.trim()).filter(Boolean);
    await post(`/api/runs/${run.id}/tags`, { tags, seen: run.tags });
    run.tags = tags;
  } }, "Tag");
}

/** The answer to "is my run learning?". @param {any} run */
function verdict(run) {
  const v = run.verdict;
  const score = run.score;
  const facts = [];
  if (score && score[0] !== null) facts.push([explain(score[3]).title, number(score[0], score[3].startsWith("accuracy"))]);
  if (run.progress?.steps) facts.push([`Step of ${run.stage}`, `${number(run.progress.step)} of ${number(run.progress.steps)}`]);
  if (run.summary?.before && run.summary?.after) facts.push(["Before and after training", [run.summary.before, run.summary.after].map((b) => number(Array.isArray(b) ? b[0] : b, run.summary.percent)).join(" → ")]);
  facts.push(["Alarms", run.alarms.length ? String(run.alarms.length) : "none"]);
  return h("section", { class: `card verdict ${v.answer}`, "aria-label": "Is the run learning?" },
    h("div", { class: "mark", "aria-hidden": "true" }, MARKS[v.answer]),
    h("div", {}, h("div", { class: "question" }, run.status.kind === "finished" ? "Did it learn?" : "Is it learning?"), h("div", { class: "answer" }, visible(v.headline))),
    h("ul", {}, v.because.map((/** @type {string} */ line) => h("li", {}, visible(line)))),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

/** Stages by how long they took, with alarms where they were raised. @param {any} run @param {string} chosen @param {(name: string) => void} choose */
function line(run, chosen, choose) {
  const whole = run.stages.reduce((/** @type {number} */ sum, /** @type {any} */ s) => sum + s.seconds, 1);
  return h("div", { class: "line", role: "group", "aria-label": "Stages" }, run.stages.map((/** @type {any} */ s) => {
    const steps = s.span ? `${number(s.span[2])}${s.steps ? `/${number(s.steps)}` : ""} steps` : s.state === "todo" ? "not yet" : s.state;
    const about = [s.algorithm || s.kind, s.seconds ? duration(s.seconds) : "", steps].filter(Boolean).join(" · ");
    const last = s.span?.[2] || 1;
    const alarms = run.alarms.filter((/** @type {any} */ a) => a.stage === s.name);
    return h("div", { class: "place", style: { flexGrow: String(Math.max(100 * (s.seconds / whole), 4)) } },
      h("button", { type: "button", class: `stage ${s.state}`, "aria-pressed": String(chosen === s.name), title: `${s.name}: ${about}. Click for its curves alone`, onclick: () => choose(chosen === s.name ? "" : s.name) }, visible(s.name), h("span", {}, about)),
      alarms.map((/** @type {any} */ a) => h("a", { class: "alarm", href: `/run/${run.id}/hacking`, title: a.text, "aria-label": `alarm: ${a.text}`, style: { left: `${100 * Math.min(1, (a.step ?? last) / last)}%` } }, "▲")));
  }));
}

/** What the stages have measured: win rates, accuracies, and how well a reward model ranks pairs. @param {any} run */
function results(run) {
  const rows = run.stages.flatMap((/** @type {any} */ s) => {
    const r = s.result;
    const row = (/** @type {string} */ what, /** @type {any} */ value, /** @type {string} */ on, /** @type {string} */ more = "", percent = true) => (Array.isArray(value) ? [[s.name, what, number(value[0], percent), `${number(value[1], percent)} to ${number(value[2], percent)}`, on, more]] : []);
    const equal = r.win_rate_at_equal_length;
    const kl = Number.isFinite(r.kl) ? `KL ${number(r.kl)} nats an answer` : "";
    if (r.win_rate) return row(`${s.model} wins against ${s.against}`, r.win_rate, `${number(r.problems)} prompts`, [r.ties ? `${number(r.ties)} ties` : "", equal ? `${number(equal[0], true)} at equal length` : "", kl].filter(Boolean).join(", "));
    if (s.kind === "reward_model") return row("better answers rated higher", r.accuracy, `${number(r.pairs)} held-out pairs`, "50% is guessing");
    if (s.kind === "evaluate") return [...row(`right answers of ${s.model}`, r.accuracy, `${number(r.problems)} problems`), ...(run.summary?.percent === false ? row(`mean reward of ${s.model}`, r.reward, `${number(r.problems)} problems`, "", false) : [])];
    return [];
  });
  if (!rows.length) return null;
  const heads = ["Stage", "Measured", "Result", "95% interval", "On", ""];
  return h("section", { class: "card table", "aria-label": "Results" }, h("table", { class: "results" }, h("thead", {}, h("tr", {}, heads.map((t, n) => (t ? h("th", { scope: "col", class: n ? null : "wide" }, t) : h("td", { class: "wide" }))))), h("tbody", {}, rows.map((/** @type {string[]} */ cells) => h("tr", {}, cells.map((c, n) => h("td", { class: n === 2 ? "number strong" : n === 3 ? "number dim" : n === 0 || n === 5 ? "dim wide" : null }, visible(c))))))));
}

/** @param {HTMLElement} main @param {string[]} words */
export async function page(main, [id]) {
  const [, first] = await Promise.all([load(), get(`/api/runs/${id}`)]);
  /** @type {any} */
  let run = first;
  /** @type {Map<string, Chart>} */
  const charts = new Map();
  /** @type {import("./charts.js").View} */
  const view = { axis: "step", smoothing: 0.6, zoom: null, marks: [], began: run.began };
  let stage = "";
  let wanted = "";
  const top = h("div", { class: "stack" });
  const grid = h("div", { class: "charts" });
  const shown = new Set();
  /** @type {Record<string, boolean>} groups of curves that a person has opened or closed, on any run */
  const choices = JSON.parse(localStorage.getItem("groups") ?? "{}");
  const unfolded = new Set(); // the first two groups are open unless a person closed them
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const name = /** @type {HTMLElement} */ (entry.target).dataset.figure ?? "";
      if (entry.isIntersecting) shown.add(name);
      else shown.delete(name);
    }
    fetchSoon();
  }, { rootMargin: "300px" });
  const zoom = (/** @type {[number, number]|null} */ to) => {
    view.zoom = to;
    reset.disabled = !to;
    fetchSoon();
  };
  const reset = h("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Whole run");
  const axis = h("select", { "aria-label": "Axis", onchange: () => ((view.axis = axis.value), zoom(null)) }, h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
  const soft = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, "aria-label": "Smoothing", oninput: () => ((view.smoothing = Number(soft.value)), redraw()) });
  const find = h("input", { type: "search", placeholder: "Find a figure", "aria-label": "Find a figure", oninput: () => ((wanted = find.value.toLowerCase()), layout()) });
  fill(main, top, h("div", { class: "row between" }, h("h2", {}, "Curves"), h("div", { class: "row small" }, axis, h("label", { class: "row" }, "Smoothing", soft), find, reset)), grid);

  function header() {
    fill(top, head(run, ""), verdict(run), h("div", { class: "card" }, line(run, stage, (name) => ((stage = name), zoom(null), header(), layout()))), results(run), run.indexing && h("p", { class: "dim small" }, "The index of this run is being built; curves fill as it grows."));
    view.marks = run.alarms.filter((/** @type {any} */ a) => a.step !== undefined).map((/** @type {any} */ a) => ({ x: view.axis === "time" ? (a.time - view.began) / 60 : a.step, text: a.text, stage: a.stage }));
  }
  async function layout() {
    const known = (await load()).groups;
    const names = Object.keys(run.figures).filter((f) => !isBound(f) && (!stage || run.figures[f].includes(stage)) && (!wanted || f.includes(wanted) || explain(f).title.toLowerCase().includes(wanted)));
    names.sort((a, b) => explain(a).place - explain(b).place || a.localeCompare(b));
    const nodes = [];
    for (const [group, [title, text]] of Object.entries(known)) {
      const inside = names.filter((f) => explain(f).group === group);
      if (!inside.length) continue;
      const first = !nodes.length || unfolded.size < 2 || unfolded.has(group);
      if (first) unfolded.add(group);
      const open = wanted || (choices[group] ?? (stage || first));
      const fold = h("button", { type: "button", class: "fold", "aria-expanded": String(Boolean(open)), onclick: () => {
        choices[group] = !open;
        localStorage.setItem("groups", JSON.stringify(choices));
        layout();
      } }, title);
      nodes.push(h("div", { class: "group-title" }, h("h2", {}, fold), h("span", { class: "dim" }, open ? text : `${text} ${inside.length} curves.`)));
      if (!open) continue;
      for (const figure of inside) {
        if (!charts.has(figure)) {
          const chart = new Chart(explain(figure), zoom, (name, step) => replay(id, { stage: name, step }));
          chart.node.dataset.figure = figure;
          charts.set(figure, chart);
          near.observe(chart.node);
        }
        nodes.push(charts.get(figure)?.node);
      }
    }
    fill(grid, nodes.length ? nodes : h("div", { class: "card empty" }, "Nothing has been measured yet."));
    fetchSoon();
  }
  /** @type {Map<string, any[]>} */
  const held = new Map();
  let due = 0;
  function fetchSoon() {
    clearTimeout(due);
    due = window.setTimeout(fetchSeries, 60);
  }
  async function fetchSeries() {
    const names = [...shown].filter((f) => f in run.figures);
    if (!names.length) return;
    const asked = names.flatMap((f) => [f, ...["_low", "_high"].map((e) => f + e).filter((b) => b in run.figures)]);
    const by = view.zoom && view.axis === "step" ? { first: Math.floor(view.zoom[0]), last: Math.ceil(view.zoom[1]) } : {};
    const found = await get(`/api/runs/${id}/series`, { figure: asked, stage, buckets: 500, ...by });
    for (const figure of names) held.set(figure, curves(found.series, figure));
    redraw();
  }
  function redraw() {
    for (const [figure, chart] of charts) {
      const found = held.get(figure);
      if (found && chart.node.isConnected) chart.draw(found, view);
    }
  }
  header();
  await layout();
  const again = () => ((view.smoothing = Number(soft.value)), redraw());
  addEventListener("studio-theme", again);
  const end = follow(id, async () => {
    const before = Object.keys(run.figures).length;
    run = await get(`/api/runs/${id}`);
    header();
    if (Object.keys(run.figures).length !== before) layout();
    else fetchSoon();
  });
  return () => {
    end();
    clearTimeout(due);
    near.disconnect();
    removeEventListener("studio-theme", again);
    for (const chart of charts.values()) chart.close();
  };
}

/** The stages of one figure; its interval, if recorded, is the band. @param {any[]} series @param {string} figure */
export function curves(series, figure) {
  const mine = series.filter((s) => s.figure === figure);
  return mine.map((s) => {
    const [low, high] = ["_low", "_high"].map((end) => series.find((o) => o.figure === figure + end && o.stage === s.stage));
    const fits = low && high && low.step.length === s.step.length && high.step.length === s.step.length;
    return { label: mine.length > 1 ? s.stage : s.stage, series: fits ? { ...s, low: low.mean, high: high.mean } : s };
  });
}

/** The resolved settings, and what differs from the recipe or from another run. @param {HTMLElement} main @param {string[]} words */
export async function settings(main, [id]) {
  const [run, all] = await Promise.all([get(`/api/runs/${id}`), get("/api/runs")]);
  const against = h("select", { "aria-label": "Compare with", onchange: () => draw() }, h("option", { value: "" }, `the recipe ${run.recipe}`), all.runs.filter((/** @type {any} */ r) => r.id !== id).map((/** @type {any} */ r) => h("option", { value: r.id }, r.name)));
  const find = h("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", oninput: () => table() });
  const body = h("div", { class: "stack" });
  fill(main, head(run, "/settings"), h("div", { class: "row" }, h("span", {}, "Compared with"), against, find), body);
  /** @type {any} */
  let found = null;
  const show = (/** @type {any} */ v) => (v === undefined || v === null ? "–" : typeof v === "string" ? v : JSON.stringify(v));
  function table() {
    const changed = found.differences ?? {};
    const keys = Object.keys(found.settings).filter((k) => k.includes(find.value));
    const rows = (/** @type {string[]} */ list, /** @type {boolean} */ both) => list.map((k) => h("tr", { class: k in changed ? "changed" : null }, h("td", {}, visible(k)), h("td", {}, visible(show(found.settings[k]))), both && h("td", {}, visible(show(changed[k]?.[1])))));
    fill(body, found.differences === null ? h("p", { class: "dim" }, "This run has a recipe that is not shipped, so there is nothing to compare with.") : !Object.keys(changed).length ? h("p", { class: "dim" }, "No setting differs.") : h("section", { class: "stack" }, h("h2", {}, Object.keys(changed).length === 1 ? "1 differs" : `${Object.keys(changed).length} differ`), h("div", { class: "card table" }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, ["Setting", "This run", "Other"].map((n) => h("th", { scope: "col" }, n)))), h("tbody", {}, rows(Object.keys(changed), true))))),
      h("section", { class: "stack" }, h("h2", {}, "All settings"), h("div", { class: "card table" }, h("table", { class: "diff" }, h("tbody", {}, rows(keys, false))))));
  }
  async function draw() {
    fill(body, h("p", { class: "dim" }, "Resolving the recipe…"));
    found = await get(`/api/runs/${id}/settings`, { against: against.value });
    table();
  }
  await draw();
}
