// The same prompt at every stage: click through base, SFT, reward model and RL, and see the answer change.
import { get, post } from "./api.js";
import { diff } from "./diff.js";
import { fill, h, number, visible } from "./dom.js";
import { alike } from "./rollouts.js";
import { head } from "./run.js";
import { scores } from "./scores.js";

const WORDS = { pretrain: "learns to write", sft: "imitates examples", comparisons: "answers are compared", reward_model: "learns what people prefer", rl: "learns from rewards", evaluate: "is measured", preference: "learns from pairs", versus: "is compared", sample: "writes", best: "keeps the best" };

const SHOWN = 6; // rollouts of a step

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
  const wait = h("p", { class: "dim small", hidden: true, role: "status" }, "The first time, the models are loaded, which takes longer.");
  const box = h("textarea", { rows: 2, "aria-label": "Prompt", placeholder: "Type a prompt, or choose one below" }, prompt);
  const gold = h("input", { placeholder: "only if the reward needs it", maxlength: 4000 });
  const ask = h("button", { class: "main", type: "button", onclick: () => sample() }, "Ask every stage");
  const both = h("button", { type: "button", "aria-pressed": "true", onclick: () => ((side = !side), both.setAttribute("aria-pressed", String(side)), side && (stage = null), stages(), show()) }, "Side by side");
  const find = h("input", { type: "search", placeholder: "Find a prompt", "aria-label": "Find a prompt", oninput: () => prompts() });
  const list = h("div", { class: "prompts" });
  fill(main, head(run, "/pipeline"), h("p", { class: "dim" }, "A model is trained in stages. Choose a prompt, and click through the stages to see how its answer changes."), row,
    h("div", { class: "split" }, h("aside", { class: "card stack filters" }, h("label", { class: "field" }, "Prompt", box), h("label", { class: "field" }, "Right answer", gold), h("div", { class: "row" }, ask), wait, said, h("h3", {}, "Saved by the run"), find, list), h("div", { class: "stack" }, h("div", { class: "row between" }, h("h2", {}, "Answers"), both), answers, scrub)));

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
    wait.hidden = false;
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
    wait.hidden = true;
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
    const of = run.stages.find((/** @type {any} */ s) => s.name === stage);
    if (!all.length && (side || !["comparisons", "reward_model"].includes(of?.kind))) fill(answers, h("div", { class: "card empty" }, h("h2", {}, "No saved answer to this prompt"), h("p", {}, "Ask every stage: the models that the run has saved answer it now.")));
    else if (side) fill(answers, h("div", { class: "side" }, all.map((/** @type {any} */ a, /** @type {number} */ n) => card(a, n ? all[n - 1] : null))));
    else {
      const at = all.findIndex((/** @type {any} */ a) => a.name === stage);
      fill(answers, at < 0 ? silent(of, all) : card(all[at], at ? all[at - 1] : null));
    }
    slider();
  }
  /** What a stage does that has no answer of its own. @param {any} s @param {any[]} all */
  function silent(s, all) {
    const r = s?.result ?? {};
    if (s?.kind === "comparisons") return note("This stage makes pairs of answers to the same prompt and says which is better. The reward model learns from them.", r.written === undefined ? null : `${number(r.written)} pairs were written${r.equal ? `, ${number(r.equal)} more were equal` : ""}.`, h("a", { class: "button", href: "/label" }, "Compare answers yourself"));
    if (s?.kind === "reward_model") {
      const score = (/** @type {any} */ a) => a.found[0]?.rewards?.find((/** @type {any} */ o) => o.kind !== "stage" && o.name === s.name)?.value;
      const rated = all.filter((a) => Number.isFinite(score(a))).sort((a, b) => score(b) - score(a));
      return note("A reward model writes nothing: it gives an answer a score. Only differences between scores of answers to one prompt matter.", r.accuracy && `It rates the better answer higher in ${number(r.accuracy[0], true)} of ${number(r.pairs)} pairs that it did not train on (95% interval ${number(r.accuracy[1], true)} to ${number(r.accuracy[2], true)}; 50% is guessing).`,
        rated.length ? h("table", {}, h("thead", {}, h("tr", {}, ["Score", "Stage", "Answer"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, rated.map((a) => h("tr", {}, h("td", { class: "number strong" }, number(score(a))), h("td", {}, visible(a.name)), h("td", { class: "text" }, visible(a.found[0].text)))))) : h("b", {}, "Press “Ask every stage” to see its scores of the answers."));
    }
    return h("div", { class: "card empty" }, stage === null ? "Choose a stage above." : stage ? `${stage} makes no model that answers, or has not answered this prompt.` : "This is the model before any training. Its answers are not saved by the run.");
  }
  const note = (/** @type {any[]} */ ...lines) => h("article", { class: "card stack" }, h("h3", {}, visible(stage)), lines.map((line) => (typeof line === "string" ? h("p", {}, line) : line)));
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
      const of_step = { stage: chosen.name, step_from: step, step_to: step, sort: "number" };
      let { rollouts } = await get(`/api/runs/${id}/rollouts`, { ...of_step, question: prompt, limit: 64 });
      const same = rollouts.length > 0;
      if (!same) rollouts = (await get(`/api/runs/${id}/rollouts`, { ...of_step, limit: 200 })).rollouts;
      const questions = new Set();
      // of other prompts, the first answer to each
      const some = (same ? alike(rollouts) : rollouts.filter((/** @type {any} */ r) => !questions.has(r.question) && questions.add(r.question)).map((/** @type {any} */ r) => [r, 1])).slice(0, SHOWN);
      fill(place, !same && h("p", { class: "dim small", style: { gridColumn: "1 / -1" } }, "Training did not use your prompt at this step. Answers to others of the step:"), some.map((/** @type {[any, number]} */ [r, times]) => h("a", { class: "card answer-card", href: `/run/${id}/rollouts/${r.stage}/${r.step}/${r.number}`, style: { color: "inherit" } }, !same && h("div", { class: "text dim" }, visible(r.question)), h("div", { class: "text" }, visible(r.response)), h("div", { class: "dim tiny" }, `reward ${number(r.reward)} · ${r.length} tokens${times > 1 ? ` · ${times} alike` : ""}`))));
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
