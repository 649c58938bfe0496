// Review (does a person agree with the reward?), and the signs of reward hacking.
import { get, post } from "./api.js";
import { Chart } from "./charts.js";
import { fill, h, number, shortcuts, svg, visible } from "./dom.js";
import { explain, load } from "./metrics.js";
import { head } from "./run.js";

/** @param {HTMLElement} main @param {string[]} words */
export async function page(main, [id]) {
  const run = await get(`/api/runs/${id}`);
  const order = h("select", { "aria-label": "Which rollouts", onchange: () => next() }, [["highest", "highest reward first"], ["newest", "newest first"], ["random", "at random"]].map(([v, t]) => h("option", { value: v }, t)));
  const body = h("div", { class: "stack" });
  const table = h("div", { class: "stack" });
  fill(main, head(run, "/review"), h("div", { class: "row between" }, h("p", { class: "dim" }, "Read an answer, and say whether you agree with its reward. This finds loopholes early. An answer is shown once, however often the model gave it."), order), body, table);
  /** @type {any} */
  let now = null;
  /** @type {any[]} what was judged on this page, to go back to */
  const before = [];
  /** @param {any} [again] a rollout to judge once more */
  async function next(again) {
    const [found, report] = await Promise.all([again ? { rollout: again } : get(`/api/runs/${id}/review`, { order: order.value }), get(`/api/runs/${id}/review/report`)]);
    now = found.rollout;
    const note = h("input", { class: "grow", id: "note", placeholder: "Note", "aria-label": "Note" });
    fill(body, now ? h("section", { class: "card stack" }, h("dl", { class: "row facts" }, [["Reward", number(now.reward)], ["Step", now.step], ["Outcome", now.outcome || "–"], ...Object.entries(now.parts).map(([k, v]) => [k, number(/** @type {number} */ (v))])].map(([k, v]) => h("div", {}, h("dt", {}, visible(k)), h("dd", {}, visible(v))))), h("div", { class: "text dim" }, visible(now.question)), h("div", { class: "text" }, visible(now.response)), now.answer && h("p", { class: "dim small" }, "Right answer: ", visible(now.answer)),
      h("div", { class: "row" }, h("button", { type: "button", onclick: () => judge(true, false) }, h("kbd", {}, "y"), "The reward is right"), h("button", { type: "button", onclick: () => judge(false, false) }, h("kbd", {}, "n"), "It is wrong"), h("button", { type: "button", onclick: () => judge(false, true) }, h("kbd", {}, "f"), "Wrong: make it a test case"), h("button", { type: "button", disabled: !before.length, onclick: () => back() }, h("kbd", {}, "u"), "Change the last"), note, h("a", { href: `/run/${id}/rollouts/${now.stage}/${now.step}/${now.number}` }, "Open"))) : h("div", { class: "card empty" }, "No rollout is left to review."));
    fill(table, h("h2", {}, "Where people agree"), h("p", { class: "dim small" }, report.reviewed ? `${report.reviewed} reviewed, ${report.flagged} made test cases. Of the answers that each part of the reward pays for, the share that a person agrees with:` : "Nothing is reviewed yet. Then this shows, for each part of the reward, how often people agree with it."), report.reviewed > 0 && h("div", { class: "card table" }, h("table", {}, h("thead", {}, h("tr", {}, ["Part", "Agreed", "95% interval", "Reviewed"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, Object.entries(report.precision).map(([k, v]) => h("tr", {}, h("td", {}, visible(k)), h("td", { class: "number" }, number(v.value, true)), h("td", { class: "number dim" }, `${number(v.low, true)} – ${number(v.high, true)}`), h("td", { class: "number" }, v.count)))))), report.flagged > 0 && h("p", {}, h("a", { class: "button", href: `/api/runs/${id}/flagged.jsonl`, download: "flagged.jsonl" }, "Save flagged rollouts as test cases")));
  }
  async function judge(/** @type {boolean} */ agrees, /** @type {boolean} */ flagged) {
    if (!now) return;
    const { stage, step, number: place } = now;
    before.push(now);
    now = null;
    const note = /** @type {HTMLInputElement|null} */ (document.getElementById("note"))?.value ?? "";
    await post(`/api/runs/${id}/review`, { stage, step, number: place, agrees, flagged, note, reviewer: localStorage.getItem("annotator") ?? "" });
    await next();
  }
  /** Show the last one again: the next judgement replaces its own. */
  function back() {
    if (before.length) next(before.pop());
  }
  const close = shortcuts({ y: () => judge(true, false), n: () => judge(false, false), f: () => judge(false, true), u: back });
  await next();
  return close;
}

/** @param {HTMLElement} main @param {string[]} words */
export async function hacking(main, [id]) {
  const [, run, data] = await Promise.all([load(), get(`/api/runs/${id}`), get(`/api/runs/${id}/hacking`)]);
  /** @type {import("./charts.js").View} */
  const view = { axis: "step", smoothing: 0.6, zoom: null, marks: data.alarms.filter((/** @type {any} */ a) => a.stage === data.stage && a.step !== undefined).map((/** @type {any} */ a) => ({ x: a.step, text: a.text })), began: run.began };
  /** @type {[Chart, import("./charts.js").Curve[]][]} */
  const charts = [];
  const make = (/** @type {any} */ words, /** @type {import("./charts.js").Curve[]} */ found) => {
    const chart = new Chart(words, () => {});
    charts.push([chart, found]);
    return chart.node;
  };
  const { reward, kl } = data.series;
  const gold = data.gold && data.series[data.gold];
  const nodes = [];
  if (reward) nodes.push(make({ title: gold ? "Reward and gold score" : "Reward", text: gold ? "If the reward rises and the gold score falls, the policy has found a loophole." : "This run measures no gold score, so a loophole can only be seen from how the text changes." }, [{ label: "reward", series: reward }, ...(gold ? [{ label: data.gold, series: gold }] : [])]));
  if (reward && kl) nodes.push(frontier(reward, gold || null, kl, data.gold));
  for (const [name, series] of Object.entries(data.series)) if (!["reward", "kl", data.gold].includes(name)) nodes.push(make(explain(name), [{ label: data.stage, series }]));
  fill(main, head(run, "/hacking"), h("section", { class: "stack" }, h("h2", {}, data.alarms.length ? `${data.alarms.length} alarm${data.alarms.length > 1 ? "s" : ""}` : "No alarm was raised"), data.alarms.map((/** @type {any} */ a) => h("div", { class: "card row between" }, h("div", { class: "grow alarm-text" }, h("span", { class: "chip bad" }, visible(a.rule ?? "alarm")), " ", visible(a.text)), a.rollouts !== null && a.rollouts !== undefined && h("a", { class: "button", href: `/run/${id}/rollouts?stage=${encodeURIComponent(a.stage)}&step_from=${a.rollouts}&step_to=${a.rollouts}&sort=reward&down=true` }, "The rollouts behind it")))),
    nodes.length ? h("div", { class: "charts" }, nodes) : h("div", { class: "card empty" }, "No stage of this run learns from rewards yet."));
  const draw = () => charts.forEach(([chart, found]) => chart.draw(found, view));
  draw();
  addEventListener("studio-theme", draw);
  return () => {
    removeEventListener("studio-theme", draw);
    charts.forEach(([chart]) => chart.close());
  };
}

/** Reward and gold against KL: the gain for the distance that the model moved. @param {any} reward @param {any} gold @param {any} kl @param {string} name */
function frontier(reward, gold, kl, name) {
  const [w, hgt, pad] = [420, 190, 44];
  const at = (/** @type {any} */ series, /** @type {number} */ step) => {
    let best = 0;
    series.step.forEach((/** @type {number} */ s, /** @type {number} */ n) => { if (Math.abs(s - step) < Math.abs(series.step[best] - step)) best = n; });
    return series.mean[best];
  };
  const rows = kl.step.map((/** @type {number} */ s, /** @type {number} */ n) => [kl.mean[n], at(reward, s), gold ? at(gold, s) : null]).filter((/** @type {any[]} */ r) => r[0] !== null && r[1] !== null);
  const span = (/** @type {number} */ column) => {
    const found = rows.map((/** @type {number[]} */ r) => r[column]).filter((/** @type {number|null} */ v) => v !== null);
    return found.length ? [Math.min(...found), Math.max(...found)] : [0, 0];
  };
  const farthest = span(0)[1];
  const text = (/** @type {any} */ x, /** @type {any} */ y, /** @type {string} */ said, anchor = "start", tone = "--faint") => svg("text", { x, y, "font-size": 11, fill: `var(${tone})`, "text-anchor": anchor }, said);
  // reward and gold may be of different sizes: each has its own axis, in its colour
  const side = (/** @type {number} */ column, /** @type {string} */ tone, /** @type {number} */ x, /** @type {string} */ anchor) => {
    const [low, high] = span(column);
    const found = rows.filter((/** @type {any[]} */ r) => r[column] !== null);
    const dots = found.map((/** @type {number[]} */ r, /** @type {number} */ n) => svg("circle", { cx: pad + (Math.max(r[0], 0) / (farthest || 1)) * (w - 2 * pad), cy: hgt - 24 - ((r[column] - low) / (high - low || 1)) * (hgt - 36), r: 2.6, fill: `var(${tone})`, opacity: 0.25 + (0.75 * n) / found.length }));
    return [...dots, text(x, hgt - 20, number(low), anchor, tone), ...(high > low ? [text(x, 16, number(high), anchor, tone)] : [])];
  };
  const drawing = svg("svg", { viewBox: `0 0 ${w} ${hgt}`, width: "100%", height: hgt, role: "img", "aria-label": `reward${gold ? " and gold" : ""} against KL, up to ${number(farthest)} nats` }, svg("line", { x1: pad, x2: w - pad, y1: hgt - 22, y2: hgt - 22, stroke: "var(--line)" }), rows.length ? [...side(1, "--c1", pad - 6, "end"), ...(gold ? side(2, "--c2", w - pad + 6, "start") : [])] : [], text(pad, hgt - 6, "0"), text(w - pad, hgt - 6, `${number(farthest)} nats`, "end"));
  return h("figure", { class: "card chart" }, h("header", {}, h("h3", {}, "Reward for distance")), h("p", {}, "Each point is a step; later ones are darker. To the right the model is farther from its start. If the reward still rises while the gold score falls, the best model was at an earlier step."), drawing, h("div", { class: "legend" }, h("span", {}, h("i", { style: { background: "var(--c1)" } }), "reward"), gold && h("span", {}, h("i", { style: { background: "var(--c2)" } }), name)));
}
