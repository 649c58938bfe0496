// The same prompt at every stage: click through base, SFT, reward model and RL, and see the answer change.
import { get, post } from "./api.js";
import { diff } from "./diff.js";
import { fill, h, number, visible } from "./dom.js";
import { head } from "./run.js";
import { scores } from "./scores.js";

const WORDS = { pretrain: "learns to write", sft: "imitates examples", comparisons: "answers are compared", reward_model: "learns what people prefer", rl: "learns from rewards", evaluate: "is measured", preference: "learns from pairs", versus: "is compared", sample: "writes", best: "keeps the best" };

/** @param {HTMLElement} main @param {string[]} words @param {URLSearchParams} query */
export async function page(main, [id], query) {
  const run = await get(`/api/runs/${id}`);
  let data = await get(`/api/runs/${id}/pipeline`, { prompt: query.get("prompt") ?? "" });
  /** @type {string|null} the stage that is shown alone */
  let stage = null;
  let prompt = query.get("prompt") ?? data.prompts[0]?.question ?? "";
  let side = true;
  /** @type {Record<string, {text: string, reward: number|null, tokens: number|null, outcome?: string, rewards?: any[]}[]>} */
  let typed = {};
  const row = h("div", { class: "steps card", role: "group", "aria-label": "Stages" });
  const answers = h("div", { class: "stack" });
  const scrub = h("div", {});
  const said = h("div", { class: "error", hidden: true, role: "alert" });
  const box = h("textarea", { rows: 2, "aria-label": "Prompt", placeholder: "Type a prompt, or choose one below" }, prompt);
  const gold = h("input", { placeholder: "only if the reward needs it", maxlength: 4000 });
  const ask = h("button", { class: "main", type: "button", onclick: () => sample() }, "Ask every stage");
  const both = h("button", { type: "button", "aria-pressed": "true", onclick: () => ((side = !side), both.setAttribute("aria-pressed", String(side)), side && (stage = null), stages(), show()) }, "Side by side");
  const find = h("input", { type: "search", placeholder: "Find a prompt", "aria-label": "Find a prompt", oninput: () => prompts() });
  const list = h("div", { class: "prompts" });
  fill(main, head(run, "/pipeline"), h("p", { class: "dim" }, "A model is trained in stages. Choose a prompt, and click through the stages to see how its answer changes."), row,
    h("div", { class: "split" }, h("aside", { class: "card stack filters" }, h("label", { class: "field" }, "Prompt", box), h("label", { class: "field" }, "Right answer", gold), h("div", { class: "row" }, ask), said, h("h3", {}, "Saved by the run"), find, list), h("div", { class: "stack" }, h("div", { class: "row between" }, h("h2", {}, "Answers"), both), answers, scrub)));

  function stages() {
    const nodes = [];
    const models = run.stages.filter((/** @type {any} */ s) => s.kind !== "evaluate" && s.kind !== "versus");
    const base = run.stages[0]?.model;
    if (base) nodes.push(button("", "start", base));
    for (const s of models) nodes.push(h("span", { class: "arrow", "aria-hidden": "true" }, "→"), button(s.name, s.name, WORDS[s.kind] ?? s.kind, s.state));
    fill(row, nodes);
  }
  function button(/** @type {string} */ name, /** @type {string} */ title, /** @type {string} */ text, /** @type {string} */ state = "done") {
    return h("button", { type: "button", disabled: state === "todo", "aria-pressed": String(stage === name), onclick: () => ((stage = name), (side = false), both.setAttribute("aria-pressed", "false"), stages(), show()) }, visible(title), h("small", {}, visible(text)));
  }
  function prompts() {
    const shown = data.prompts.filter((/** @type {any} */ p) => p.question.toLowerCase().includes(find.value.toLowerCase())).slice(0, 100);
    fill(list, shown.length ? shown.map((/** @type {any} */ p) => h("button", { type: "button", "aria-pressed": String(p.question === prompt), onclick: () => choose(p.question) }, h("span", { class: "text short" }, visible(p.question)))) : h("p", { class: "dim small" }, data.left ? "Rollouts are being indexed…" : "The run has saved none yet."));
  }
  async function choose(/** @type {string} */ text) {
    prompt = box.value = text;
    gold.value = "";
    typed = {};
    prompts();
    await reload();
  }
  async function reload() {
    data = { ...data, ...(await get(`/api/runs/${id}/pipeline`, { prompt })) };
    show();
  }
  async function sample() {
    prompt = box.value;
    said.hidden = true;
    ask.disabled = true;
    ask.textContent = "The stages answer…";
    try {
      const found = await post(`/api/runs/${id}/ask`, { prompt, gold: gold.value });
      typed = {};
      for (const a of found.answers) (typed[a.stage] ??= []).push(a);
      prompts();
      show();
    } catch (error) {
      said.hidden = false;
      said.textContent = /** @type {Error} */ (error).message;
    }
    ask.disabled = false;
    ask.textContent = "Ask every stage";
  }
  /** The answers of each stage's model, in training order. */
  function known() {
    if (Object.keys(typed).length) return Object.entries(typed).map(([name, found]) => ({ name, note: "sampled now", found }));
    return data.answers.map((/** @type {any} */ a) => ({ name: a.model, note: a.note ?? `measured in ${a.stage}`, found: a.answers, gold: a.gold }));
  }
  function show() {
    const all = known();
    if (!all.length) fill(answers, h("div", { class: "card empty" }, h("h2", {}, "No saved answer to this prompt"), h("p", {}, "Ask every stage: the models that the run has saved answer it now.")));
    else if (side) fill(answers, h("div", { class: "side" }, all.map((/** @type {any} */ a, /** @type {number} */ n) => card(a, n ? all[n - 1] : null))));
    else {
      const at = all.findIndex((/** @type {any} */ a) => a.name === stage);
      fill(answers, at < 0 ? h("div", { class: "card empty" }, stage === null ? "Choose a stage above." : stage ? `${stage} makes no model that answers, or has not answered this prompt.` : "The start has not been asked: its answers were not saved.") : card(all[at], at ? all[at - 1] : null));
    }
    slider();
  }
  function card(/** @type {any} */ a, /** @type {any} */ before) {
    const first = a.found[0] ?? { text: "" };
    const old = before?.found[0]?.text;
    const parts = old === undefined ? [h("span", {}, visible(first.text))] : diff(old, first.text).filter((p) => p.kind !== "gone").map((p) => (p.kind === "same" ? h("span", {}, visible(p.text)) : h("mark", { class: "new", title: "not in the answer before" }, visible(p.text))));
    const facts = [first.reward !== null && first.reward !== undefined && `reward ${number(first.reward)}`, first.tokens && `${first.tokens} tokens`, first.outcome].filter(Boolean);
    return h("article", { class: "card answer-card" }, h("div", { class: "row between" }, h("h3", {}, visible(a.name)), h("span", { class: "dim tiny" }, visible(a.note))), h("div", { class: "text" }, parts), first.rewards ? scores(first) : h("div", { class: "dim tiny" }, facts.join(" · ")), a.gold && h("div", { class: "dim tiny" }, "right answer: ", visible(a.gold)), a.found.length > 1 && h("details", {}, h("summary", { class: "tiny" }, `${a.found.length - 1} more`), a.found.slice(1).map((/** @type {any} */ o) => h("p", { class: "text" }, visible(o.text)))));
  }
  /** A slider over the steps of a stage that learns from rollouts. */
  function slider() {
    const options = data.stages.filter((/** @type {any} */ s) => s.steps.length > 1);
    const chosen = options.find((/** @type {any} */ s) => s.name === stage) ?? options[options.length - 1];
    if (!chosen) return fill(scrub);
    const out = h("output");
    const place = h("div", { class: "side" });
    const range = h("input", { type: "range", min: 0, max: chosen.steps.length - 1, value: chosen.steps.length - 1, "aria-label": `Step of ${chosen.name}`, oninput: () => move() });
    let due = 0;
    async function fetchStep() {
      const step = chosen.steps[Number(range.value)][0];
      let found = await get(`/api/runs/${id}/rollouts`, { stage: chosen.name, step_from: step, step_to: step, question: prompt, limit: 6, sort: "number" });
      const same = found.total > 0;
      if (!same) found = await get(`/api/runs/${id}/rollouts`, { stage: chosen.name, step_from: step, step_to: step, limit: 6, sort: "number" });
      fill(place, !same && h("p", { class: "dim small", style: { gridColumn: "1 / -1" } }, "This prompt was not drawn at this step; these were:"), found.rollouts.map((/** @type {any} */ r) => h("a", { class: "card answer-card", href: `/run/${id}/rollouts/${r.stage}/${r.step}/${r.number}`, style: { color: "inherit" } }, !same && h("div", { class: "text dim" }, visible(r.question)), h("div", { class: "text" }, visible(r.response)), h("div", { class: "dim tiny" }, `reward ${number(r.reward)} · ${r.length} tokens`))));
    }
    function move() {
      const [step, count, reward, length] = chosen.steps[Number(range.value)];
      out.textContent = `step ${step}: mean reward ${number(reward)}, ${number(length)} tokens, ${count} rollouts`;
      clearTimeout(due);
      due = window.setTimeout(fetchStep, 120);
    }
    fill(scrub, h("section", { class: "card stack" }, h("h3", {}, "Through the steps of ", visible(chosen.name)), h("div", { class: "scrub" }, h("span", { class: "dim small" }, "start"), range, h("span", { class: "dim small" }, "end")), out, place));
    move();
  }
  stages();
  prompts();
  if (prompt) await reload();
  else show();
}
