// What the model wrote: a list to sort and filter, and each rollout with its group and its tokens.
import { address, get } from "./api.js";
import { fill, h, number, shortcuts, visible } from "./dom.js";
import { open } from "./replay.js";
import { head } from "./run.js";

const SORTS = [["step", "Step"], ["reward", "Reward"], ["length", "Length"], ["advantage", "Advantage"]];
const PAGE = 96; // whole groups of the usual sizes
const HEAT = 42; // percent of colour at most: text stays readable on it
const SCALES = { logprob: ["log-prob", "The model's probability of each token. Darker tokens were less likely."], advantage: ["advantage", "Blue tokens are made more likely by the update, orange ones less."], ratio: ["ratio", "The ratio of the token's probability to that when it was sampled: 1 is no change."], kl: ["KL", "How far the model is from the reference at each token."], entropy: ["entropy", "How uncertain the model was."], value: ["value", "The reward that the critic expected from here on."], sampled: ["mask", "Tokens that the model wrote itself and is trained on."] };

/** The colour of a reward. @param {any} r */
function tone(r) {
  return r.outcome === "correct" ? "good" : r.outcome === "wrong" || r.failure ? "bad" : "";
}

/** @param {HTMLElement} main @param {string[]} words @param {URLSearchParams} query */
export async function page(main, [id], query) {
  const run = await get(`/api/runs/${id}`);
  /** @type {Record<string, any>} */
  const asked = { sort: "step", down: "true", ...Object.fromEntries(query) };
  const list = h("div", { class: "stack" });
  // on a phone, answers come before a screen of filters
  const side = h("div", { class: "filters" });
  const fold = h("details", { class: "card", open: !matchMedia("(max-width: 760px)").matches }, h("summary", {}, "Filters"), side);
  fill(main, head(run, "/rollouts"), h("div", { class: "split" }, h("aside", { "aria-label": "Filters" }, fold), list));
  let skip = 0;
  let drawn = false;
  let due = 0;
  const field = (/** @type {string} */ name, /** @type {string} */ text, /** @type {Record<string, any>} */ more = {}) => h("label", { class: "field" }, text, h("input", { value: asked[name] ?? "", ...more, oninput: (/** @type {any} */ e) => change(name, e.target.value) }));
  const pick = (/** @type {string} */ name, /** @type {string} */ text, /** @type {string[]} */ choices) => h("label", { class: "field" }, text, h("select", { onchange: (/** @type {any} */ e) => change(name, e.target.value) }, h("option", { value: "" }, "any"), choices.filter(Boolean).map((c) => h("option", { value: c, selected: asked[name] === c }, c))));
  function change(/** @type {string} */ name, /** @type {any} */ value) {
    asked[name] = value;
    skip = 0;
    clearTimeout(due);
    due = window.setTimeout(draw, 200);
  }
  function filters(/** @type {any} */ choices) {
    const sort = h("select", { onchange: (/** @type {any} */ e) => change("sort", e.target.value) }, SORTS.map(([v, t]) => h("option", { value: v, selected: asked.sort === v }, t)));
    const way = h("select", { "aria-label": "Direction", onchange: (/** @type {any} */ e) => change("down", e.target.value) }, h("option", { value: "true", selected: asked.down === "true" }, "highest first"), h("option", { value: "false", selected: asked.down === "false" }, "lowest first"));
    const numbers = { type: "number", step: "any" };
    fill(side, h("label", { class: "field" }, "Words", h("input", { type: "search", placeholder: "all of these", value: asked.text ?? "", oninput: (/** @type {any} */ e) => change("text", e.target.value) })),
      h("div", { class: "pair" }, h("label", { class: "field" }, "Sort by", sort), h("label", { class: "field" }, "Order", way)),
      choices.stage.length > 1 && pick("stage", "Stage", choices.stage), pick("outcome", "Outcome", choices.outcome), pick("finish", "Ended by", choices.finish), choices.role.some(Boolean) && pick("role", "Role", choices.role),
      h("div", { class: "pair" }, field("step_from", "Step from", numbers), field("step_to", "to", numbers)),
      h("div", { class: "pair" }, field("reward_from", "Reward from", numbers), field("reward_to", "to", numbers)),
      h("div", { class: "pair" }, field("length_from", "Length from", numbers), field("length_to", "to", numbers)),
      choices.part.length > 0 && pick("part", "Part of the reward", choices.part),
      choices.part.length > 0 && h("div", { class: "pair" }, field("part_from", "Part from", numbers), field("part_to", "to", numbers)),
      h("a", { class: "button", href: `/api/runs/${id}/rollouts.jsonl`, download: "rollouts.jsonl", onclick: (/** @type {any} */ e) => e.currentTarget.setAttribute("href", address(`/api/runs/${id}/rollouts.jsonl`, { ...asked, sort: "", down: "" })) }, "Save as JSONL"));
  }
  async function draw() {
    const found = await get(`/api/runs/${id}/rollouts`, { ...asked, skip, limit: PAGE });
    history.replaceState({}, "", address(`/run/${id}/rollouts`, asked));
    if (!drawn) filters(found.choices);
    drawn = true;
    if (found.left) setTimeout(draw, 50);
    const end = Math.min(skip + PAGE, found.total);
    const pages = h("div", { class: "row between small" }, h("span", { class: "dim" }, found.total ? `${skip + 1} to ${end} of ${number(found.total)}` : "No rollout matches", found.left ? `; ${found.left} more files are being indexed` : ""), h("div", { class: "row" }, h("button", { type: "button", disabled: !skip, onclick: () => ((skip = Math.max(0, skip - PAGE)), draw()) }, "Back"), h("button", { type: "button", disabled: end >= found.total, onclick: () => ((skip += PAGE), draw()) }, "More")));
    fill(list, pages, found.rollouts.length > 0 && h("div", { class: "card table" }, alike(found.rollouts).map(([r, times]) => row(id, r, times))));
  }
  await draw();
}

/** Neighbours that say the same to the same problem, for the same reward, as one row. @param {any[]} rollouts @returns {[any, number][]} */
export function alike(rollouts) {
  const of = (/** @type {any} */ r) => JSON.stringify([r.stage, r.step, r.problem, r.role, r.response, r.conversation, r.length, r.reward, r.outcome, r.failure, r.cut && r.number]);
  /** @type {[any, number][]} */
  const found = [];
  for (const r of rollouts) {
    const last = found[found.length - 1];
    if (last && of(last[0]) === of(r)) last[1] += 1;
    else found.push([r, 1]);
  }
  return found;
}

/** @param {string} id @param {any} r @param {number} times */
function row(id, r, times) {
  return h("a", { class: "rollout-row", href: `/run/${id}/rollouts/${r.stage}/${r.step}/${r.number}` },
    h("div", {}, h("div", { class: "paid" }, r.reward === null ? "–" : number(r.reward)), h("div", { class: "dim tiny" }, `step ${r.step}`)),
    h("div", {}, h("div", { class: "text short dim" }, visible(r.question)), h("div", { class: "text short" }, visible(r.response)), h("div", { class: "row tiny dim" }, (r.outcome || r.failure) && h("span", { class: `chip ${tone(r)}` }, visible(r.failure ?? r.outcome)), [`${r.length} tokens`, r.advantage !== null && `advantage ${number(r.advantage)}`, r.turns > 1 && `${r.turns} turns`, r.finish === "length" && "cut off", times > 1 && `${times} alike`].filter(Boolean).map((t) => h("span", {}, t)))));
}

/** @param {HTMLElement} main @param {string[]} words */
export async function one(main, [id, stage, step, place]) {
  const [run, found] = await Promise.all([get(`/api/runs/${id}`), get(`/api/runs/${id}/rollouts/${stage}/${step}/${place}`)]);
  const r = found.rollout;
  const to = (/** @type {number} */ n) => `/run/${id}/rollouts/${stage}/${step}/${n}`;
  const at = Number(place);
  const steps = found.steps;
  const near = (/** @type {number} */ way) => steps[steps.indexOf(Number(step)) + way];
  const parts = Object.entries(r.parts);
  let shown = 0; // rollouts of the group that have a card
  fill(main, head(run, "/rollouts"),
    h("div", { class: "row between" }, h("h2", {}, visible(stage), ` step ${step}, rollout ${place}`),
      h("div", { class: "row" }, h("button", { type: "button", title: "Compute the step again, and once more without this rollout", onclick: () => open(id, { stage, step: Number(step), without: at, answer: place }) }, "What did it change?"), h("button", { type: "button", disabled: at === 0, onclick: () => move(-1) }, h("kbd", {}, "p"), "Previous"), h("button", { type: "button", disabled: at + 1 >= found.count, onclick: () => move(1) }, h("kbd", {}, "n"), "Next"), near(-1) !== undefined && h("a", { class: "button", href: `/run/${id}/rollouts/${stage}/${near(-1)}/0` }, "Earlier step"), near(1) !== undefined && h("a", { class: "button", href: `/run/${id}/rollouts/${stage}/${near(1)}/0` }, "Later step"))),
    h("dl", { class: "row facts card" }, [["Reward", number(r.reward)], ["Advantage", number(r.advantage)], ["Tokens", r.length], ["Outcome", r.failure ?? (r.outcome || "–")], ["Ended by", r.finish], ...parts.map(([k, v]) => [k, number(/** @type {number} */ (v))])].map(([k, v]) => h("div", {}, h("dt", {}, visible(k)), h("dd", {}, visible(v))))),
    h("section", { class: "card stack" }, h("h3", {}, "Problem ", h("a", { class: "small", href: address(`/run/${id}/rollouts`, { problem: r.problem, sort: "step", down: "false" }) }, "the same over training")), h("div", { class: "text" }, visible(r.question)), r.answer && h("p", { class: "dim small" }, "Right answer: ", visible(r.answer))),
    r.conversation.length ? transcript(r.conversation) : !found.tokens && h("section", { class: "card stack" }, h("h3", {}, "Answer"), h("div", { class: "text" }, visible(r.response)), r.cut && h("p", { class: "dim" }, `cut here; it has ${number(r.characters)} characters`)),
    found.tokens ? heat(found.tokens) : h("p", { class: "dim small" }, "Figures by token were not kept for this step; the last steps and every 50th have them. ", h("a", { href: `/run/${id}/rollouts/${stage}/${steps[steps.length - 1]}/0` }, `Open step ${steps[steps.length - 1]}`)),
    found.group.length > 1 && h("section", { class: "stack" }, h("h2", {}, `The group: ${found.group.length} answers to the same problem`), h("p", { class: "dim" }, found.group.every((/** @type {any} */ o) => o.advantage === 0) ? "All have the same reward, so their advantages are 0: the model learns nothing from this group." : "Answers with a positive advantage are made more likely, those with a negative one less."), h("div", { class: "side" }, alike(found.group).map(([o, times]) => {
        const some = found.group.slice(shown, (shown += times));
        return card(o, some.some((/** @type {any} */ s) => s.number === at), to(o.number), times);
      }))));
  function move(/** @type {number} */ way) {
    if (at + way >= 0 && at + way < found.count) dispatchEvent(new CustomEvent("studio-go", { detail: to(at + way) }));
  }
  return shortcuts({ n: () => move(1), p: () => move(-1) });
}

/** @param {any} o @param {boolean} mine @param {string} href @param {number} times */
function card(o, mine, href, times) {
  return h("a", { class: `card answer-card ${mine ? "mine" : ""}`, href, style: { color: "inherit" } }, h("div", { class: "row between" }, h("b", { class: "number" }, o.reward === null ? "failed" : `reward ${number(o.reward)}`), o.advantage !== null && h("span", { class: `chip ${o.advantage > 0 ? "good" : o.advantage < 0 ? "bad" : ""}` }, `advantage ${o.advantage > 0 ? "+" : ""}${number(o.advantage)}`)), h("div", { class: "text" }, visible(o.response)), h("div", { class: "dim tiny" }, `${o.length} tokens · ${o.outcome || o.finish}${times > 1 ? ` · ${times} alike` : ""}`));
}

/** @param {[string, string][]} turns */
function transcript(turns) {
  return h("section", { class: "card stack" }, h("h3", {}, "Conversation"), turns.map(([kind, text]) => {
    const said = h("div", { class: "text" }, visible(text));
    return kind === "sampled" ? h("div", { class: "turn sampled" }, h("div", { class: "dim tiny" }, "model"), said) : h("details", { class: "turn", open: text.length < 400 }, h("summary", {}, "given: prompt, tool or other role"), said);
  }));
}

/** A map of the tokens, coloured by one of their figures. @param {any} tokens */
function heat(tokens) {
  const names = Object.keys(tokens.figures).filter((n) => n in SCALES || Number.isFinite(tokens.figures[n][0]));
  const rank = (/** @type {string} */ n) => (n in SCALES ? Object.keys(SCALES).indexOf(n) : 99);
  names.sort((a, b) => rank(a) - rank(b));
  const shown = h("span", { class: "number small" });
  const about = h("p", { class: "dim small" });
  const ends = h("span", { class: "row tiny dim" });
  const nodes = tokens.text.map((/** @type {string} */ text, /** @type {number} */ n) => h("span", { "data-n": n, class: tokens.figures.sampled?.[n] ? null : "given" }, visible(text)));
  const map = h("div", { class: "tokens", tabindex: 0, "aria-label": "Tokens", onmousemove: (/** @type {any} */ e) => point(e.target.closest("span[data-n]")) }, nodes);
  let name = names[0];
  function point(/** @type {HTMLElement|null} */ node) {
    if (!node) return;
    for (const on of map.querySelectorAll(".on")) on.classList.remove("on");
    node.classList.add("on");
    const n = Number(node.dataset.n);
    shown.textContent = `token ${n}: ${names.map((f) => `${SCALES[f]?.[0] ?? f} ${typeof tokens.figures[f][n] === "boolean" ? (tokens.figures[f][n] ? "yes" : "no") : number(tokens.figures[f][n])}`).join(" · ")}`;
  }
  function paint() {
    const mine = tokens.figures.sampled ?? [];
    const values = tokens.figures[name].map((/** @type {any} */ v) => (typeof v === "boolean" ? Number(v) : v));
    const inside = values.filter((/** @type {any} */ v, /** @type {number} */ n) => mine[n] && v !== null);
    const centre = name === "ratio" ? 1 : 0;
    const most = Math.max(...inside.map((/** @type {number} */ v) => Math.abs(v - centre)), 1e-9);
    nodes.forEach((/** @type {HTMLElement} */ node, /** @type {number} */ n) => {
      const share = mine[n] && values[n] !== null ? (values[n] - centre) / most : 0;
      node.style.backgroundColor = share ? `color-mix(in srgb, var(${share < 0 ? "--c2" : "--c1"}) ${Math.round(HEAT * Math.abs(share))}%, transparent)` : "";
    });
    about.textContent = SCALES[name]?.[1] ?? "";
    const [below, above] = [inside.some((/** @type {number} */ v) => v < centre), inside.some((/** @type {number} */ v) => v > centre)];
    const colours = [below && `color-mix(in srgb, var(--c2) ${HEAT}%, transparent)`, "transparent", above && `color-mix(in srgb, var(--c1) ${HEAT}%, transparent)`].filter(Boolean);
    fill(ends, number(below ? centre - most : centre), h("span", { class: "scale", style: { background: `linear-gradient(90deg, ${colours.join(", ")})` } }), number(above ? centre + most : centre));
  }
  const choose = h("div", { class: "row", role: "group", "aria-label": "Colour by" }, names.map((n) => h("button", { type: "button", "aria-pressed": String(n === name), onclick: (/** @type {any} */ e) => {
    name = n;
    for (const b of choose.children) b.setAttribute("aria-pressed", String(b === e.currentTarget));
    paint();
  } }, SCALES[n]?.[0] ?? n)));
  paint();
  return h("section", { class: "card stack" }, h("div", { class: "row between" }, h("h3", {}, "Token by token"), ends), choose, about, map, shown);
}
