// Shows what changed the policy in a step: `posttrain replay` in the background, its progress, and its results.
import { address, get, post } from "./api.js";
import { announce, fill, h, number, visible } from "./dom.js";
import { head } from "./run.js";

/** @typedef {{stage: string, step: number, update?: number, without?: number|string, prompt?: string, answer?: string}} Question */

const POLL = 800; // milliseconds
const HEAT = 42; // percent of colour at most: text stays readable on it

/** Start a replay, and go to its page. @param {string} id @param {Question} asked */
export async function open(id, asked) {
  const there = address(`/run/${id}/replay`, asked);
  try {
    const { state } = await get(`/api/runs/${id}/replay`, asked);
    if (state !== "done") await post(`/api/runs/${id}/replay`, asked);
  } catch (error) {
    announce(/** @type {Error} */ (error).message); // the page says it too
  }
  dispatchEvent(new CustomEvent("studio-go", { detail: there }));
}

/** @param {HTMLElement} main @param {string[]} words @param {URLSearchParams} query */
export async function page(main, [id], query) {
  const run = await get(`/api/runs/${id}`);
  const trained = run.stages.filter((/** @type {any} */ s) => s.span).map((/** @type {any} */ s) => s.name);
  const given = query.get("stage") ?? trained[trained.length - 1] ?? "";
  const names = trained.includes(given) || !given ? trained : [...trained, given];
  const last = run.stages.find((/** @type {any} */ s) => s.name === given)?.span?.[2] ?? 1;
  const stage = h("select", {}, names.map((/** @type {string} */ n) => h("option", { value: n, selected: n === given }, n)));
  const input = (/** @type {string} */ name, /** @type {any} */ more) => h("input", { value: query.get(name) ?? "", ...more });
  const count = { type: "number", min: 0, step: 1 };
  const step = input("step", { ...count, min: 1, value: query.get("step") ?? last });
  const update = input("update", { ...count, min: 1, value: query.get("update") ?? 1 });
  const without = input("without", { ...count, placeholder: "none" });
  const prompt = input("prompt", { placeholder: "a prompt" });
  const answer = input("answer", { placeholder: "a text, or a number" });
  const field = (/** @type {string} */ text, /** @type {Node} */ node) => h("label", { class: "field" }, text, node);
  const body = h("div", { class: "stack", "aria-live": "polite" });
  const form = h("form", { class: "card row", onsubmit: (/** @type {Event} */ e) => (e.preventDefault(), start()) },
    field("Stage", stage), field("Step", step), h("button", { class: "main" }, "Compute"),
    h("details", { class: "whole", open: [...query.keys()].some((k) => ["without", "prompt", "answer"].includes(k)) || Number(query.get("update")) > 1 }, h("summary", {}, "More questions"), h("div", { class: "row" }, field("Update, if the step has several", update), field("Leave out rollout number", without), field("How likely is the answer", answer), field("to the prompt", prompt))));
  fill(main, head(run, "/replay"), h("p", { class: "dim" }, "Which answers changed the model in a step, and how much? The step is recomputed from the nearest checkpoint, bit for bit, and its gradient is divided into the contributions of answers and tokens. The run itself is only read."), form, body);
  let due = 0;
  const asked = () => ({ stage: stage.value, step: Number(step.value), update: Number(update.value) || 1, without: without.value === "" ? "" : Number(without.value), prompt: prompt.value, answer: answer.value });
  const wrong = (/** @type {unknown} */ error) => fill(body, h("div", { class: "error", role: "alert" }, visible(/** @type {Error} */ (error).message)));
  async function start() {
    clearTimeout(due);
    history.replaceState({}, "", address(`/run/${id}/replay`, asked()));
    try {
      await post(`/api/runs/${id}/replay`, asked());
      await look();
    } catch (error) {
      wrong(error);
    }
  }
  async function look() {
    const { state, said, found } = await get(`/api/runs/${id}/replay`, asked());
    if (state === "running") {
      fill(body, h("div", { class: "card row between", role: "status" }, h("span", { class: "row" }, h("span", { class: "chip live" }, "computing"), visible(said)), h("button", { type: "button", onclick: () => post(`/api/runs/${id}/replay/stop`, asked()) }, "Stop")));
      due = window.setTimeout(() => look().catch(wrong), POLL);
    } else if (state === "failed") fill(body, h("div", { class: "error", role: "alert" }, visible(said.replace(/^posttrain: /, ""))));
    else if (state === "done") fill(body, ...result(id, found, leave));
    else if (run.status.kind === "live") fill(body, h("p", { class: "dim" }, "The run is being written. Its steps can be computed again when it has ended or was stopped."));
    else fill(body, h("p", { class: "dim" }, "Not computed yet. Steps before the last checkpoints are computed from the start of their stage, which takes as long as the run took to get there."));
  }
  const leave = (/** @type {number} */ n) => ((without.value = String(n)), start());
  await look();
  return () => clearTimeout(due);
}

/** @param {string} id @param {any} replayed @param {(n: number) => void} leave */
function result(id, replayed, leave) {
  const f = replayed.found;
  const first = f.difference;
  const since = replayed.start ? `step ${replayed.start}` : "the start of the stage";
  const same = first ? h("div", { class: "error", role: "alert" }, `Not what the run did: ${first.figure} of step ${first.step} is ${first.replayed}, and the run wrote ${first.written}.`) : h("p", { class: "row" }, h("span", { class: "chip good" }, "the same to the bit"), `${f.compared} figures of ${f.steps} steps, computed from ${since}, are those that the run wrote.`);
  const facts = [["Gradient norm", number(f.grad_norm)], ["Clipped to", number(f.clipped, true)], ["Learning rate", number(f.learning_rate)], ["Weights moved by", number(f.update_norm)], ...(f.updates > 1 ? [["Update", `${f.update} of ${f.updates}`]] : []), ...Object.entries(f.additions).map(([k, v]) => [k, `${number(/** @type {number} */ (v), true)} of the gradient`])];
  if (f.without) facts.push([`Without ${f.kind} ${f.without.number}`, `cosine ${number(f.without.cosine)}, distance ${number(f.without.distance, true)}`]);
  const change = (/** @type {any} */ m, /** @type {string} */ to) => (m[to] === null ? "–" : `${m[to] > m.before ? "+" : ""}${number(m[to] - m.before)}`);
  const heads = [f.kind, "Share of the gradient", "Reward", "Advantage", f.measure, "Change", f.without && `Without ${f.without.number}`, "Text"];
  const row = (/** @type {any} */ item) => item.members.map((/** @type {any} */ m, /** @type {number} */ n) => h("tr", {},
    h("td", {}, n ? "" : f.kind === "rollout" ? h("a", { href: `/run/${id}/rollouts/${replayed.stage}/${replayed.step}/${item.number}` }, item.number) : item.number),
    h("td", { class: "number" }, n ? "" : [h("span", { class: "share", style: { width: `${Math.round(Math.min(1, Math.abs(item.share)) * 80)}px`, background: `var(${item.share < 0 ? "--c2" : "--c1"})` } }), number(item.share, true)]),
    h("td", { class: "number" }, number(m.reward)), h("td", { class: "number" }, number(m.advantage)), h("td", { class: "number" }, number(m.before)), h("td", { class: "number" }, change(m, "after")), f.without && h("td", { class: "number" }, change(m, "without")),
    h("td", {}, h("div", { class: "text short dim" }, visible(m.prompt)), h("div", { class: "text short" }, visible(m.text))),
    h("td", {}, n ? "" : h("button", { type: "button", title: "The update without it", onclick: () => leave(item.number) }, "Without it"))));
  return [same, replayed.notes.map((/** @type {string} */ note) => h("p", { class: "dim" }, visible(note))),
    h("dl", { class: "row facts card" }, facts.map(([k, v]) => h("div", {}, h("dt", {}, visible(k)), h("dd", {}, v)))),
    f.answer && h("section", { class: "card stack" }, h("h3", {}, `${f.measure} of the answer: ${number(f.answer.before)} → ${number(f.answer.after)} (${change(f.answer, "after")}${f.answer.without === null ? "" : `; without it ${change(f.answer, "without")}`})`), h("div", { class: "text short dim" }, visible(f.answer.prompt)), h("div", { class: "text short" }, visible(f.answer.text))),
    h("section", { class: "stack" }, h("h2", {}, `Each ${f.kind}, by its share of the gradient`), h("p", { class: "dim" }, "Shares sum to 100%. Orange ones are opposed to the sum."), h("div", { class: "card table" }, h("table", {}, h("thead", {}, h("tr", {}, heads.filter(Boolean).map((t) => h("th", { scope: "col" }, t)), h("td", {}))), h("tbody", {}, f.items.map(row)))), f.left > 0 && h("p", { class: "dim" }, `and ${f.left} more with smaller shares`)),
    h("section", { class: "stack" }, h("h2", {}, "Token by token"), f.items.filter((/** @type {any} */ i) => i.spans.length).map((/** @type {any} */ i) => h("div", { class: "card stack" }, h("h3", {}, `${f.kind} ${i.number}: ${number(i.share, true)}`), tokens(i))))];
}

/** The tokens of an item, coloured by their share. @param {any} item */
function tokens(item) {
  const most = Math.max(...item.spans.map((/** @type {any} */ s) => Math.abs(s.share)), 1e-12);
  return h("div", { class: "tokens" }, item.spans.map((/** @type {any} */ s) => h("span", { title: `${number(s.share, true)} of the gradient`, style: { backgroundColor: `color-mix(in srgb, var(${s.share < 0 ? "--c2" : "--c1"}) ${Math.round((HEAT * Math.abs(s.share)) / most)}%, transparent)` } }, visible(s.text))));
}
