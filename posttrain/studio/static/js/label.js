// Labelling: blind, with shuffled sides and keyboard shortcuts. The server saves a vote before the next item is shown.
import { get, post } from "./api.js";
import { announce, fill, h, number, typing, visible } from "./dom.js";

/** @param {HTMLElement} main */
export async function page(main) {
  document.title = "Label – posttrain studio";
  const [sets, runs, models] = await Promise.all([get("/api/label"), get("/api/runs"), get("/api/models")]);
  fill(main, h("h1", {}, "Label"), h("p", { class: "dim" }, "People choose the better of two answers. A reward model learns from these choices, and a language model from the reward model."),
    sets.length ? h("div", { class: "charts" }, sets.map(set)) : h("div", { class: "card empty" }, h("h2", {}, "Nothing to label yet"), h("p", {}, "Make comparisons below, or put a JSONL file of prompts and responses into the folder ", h("code", { class: "mono" }, "labels"), ".")), maker(runs.runs, models.models));
}

/** @param {any} s */
function set(s) {
  const r = s.report;
  if (!r) return h("div", { class: "card" }, h("h3", {}, visible(s.name)), h("p", { class: "error" }, s.error));
  const share = r.items ? r.labelled / r.items : 0;
  const kappas = Object.entries(r.cohen).filter(([, v]) => v !== null);
  return h("article", { class: "card stack" }, h("div", { class: "row between" }, h("h2", {}, visible(s.name)), h("a", { class: "button", href: `/label/${s.id}` }, "Label")),
    h("div", { class: "progress", role: "progressbar", "aria-label": "labelled", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 }, h("div", { style: { width: `${100 * share}%` } })),
    h("div", { class: "small dim" }, `${r.labelled} of ${r.items} labelled; ${r.usable} say which is better`),
    h("dl", { class: "row facts" }, [["Annotators", Object.entries(r.annotators).map(([n, c]) => `${n} ${c}`).join(", ") || "–"], ["Pace", r.pace ? `${number(r.pace)} s a vote` : "–"], ["Agreement (Cohen)", kappas.map(([n, v]) => `${n} ${number(/** @type {number} */ (v))}`).join(", ") || "–"], ["Krippendorff", number(r.krippendorff)], ["First side chosen", r.first_side ? `${number(r.first_side.value, true)} (${number(r.first_side.low, true)} – ${number(r.first_side.high, true)})` : "–"]].map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", { class: "small" }, visible(v))))),
    r.labelled > 0 && h("p", { class: "small dim" }, "Agreement is 1 if people always choose alike and 0 if only as often as by chance. The first side should be chosen in about 50%."),
    h("div", { class: "row" }, h("a", { class: "button", href: `/api/label/${s.id}/labels.jsonl`, download: "labels.jsonl" }, "Save as JSONL"), s.run && h("a", { class: "button", href: `/run/${s.run}` }, "The run that waits")));
}

/** Makes a file of pairs: out of rollouts, or sampled now. @param {any[]} runs @param {{id: string, name: string}[]} models */
function maker(runs, models) {
  const written = runs.filter((r) => r.stage);
  if (!written.length && !models.length) return null;
  const kind = h("select", { onchange: () => choose() }, written.length > 0 && h("option", { value: "rollouts" }, "rollouts of a run"), models.length > 0 && h("option", { value: "sampled" }, "answers sampled now"));
  const run = h("select", { onchange: () => stagesOf() }, written.map((r) => h("option", { value: r.id }, r.name)));
  const stage = h("select", { required: true });
  const model = h("select", {}, models.map((m) => h("option", { value: m.id }, m.name)));
  const temperature = h("input", { type: "number", value: 1, min: 0.1, max: 10, step: 0.1 });
  const prompts = h("textarea", { rows: 3, placeholder: "One a line; none: the prompts of the run" });
  const name = h("input", { placeholder: "for example: first-round", pattern: "[A-Za-z0-9_\\-]+", required: true });
  const count = h("input", { type: "number", value: 100, min: 1, max: 2000 });
  const said = h("div", { class: "error", hidden: true, role: "alert" });
  const few = h("p", {});
  const make = h("button", { class: "main", type: "submit" }, "Make pairs");
  const field = (/** @type {string} */ title, /** @type {Node} */ node) => h("label", { class: "field" }, title, node);
  const [from_run, sampled] = [h("div", { class: "row" }, field("Run", run), field("Stage", stage)), h("div", { class: "stack" }, h("div", { class: "row" }, field("Model", model), field("Temperature", temperature)), field("Prompts", prompts))];
  /** Those that have rollouts. */
  async function stagesOf() {
    const names = run.value ? (await get(`/api/runs/${run.value}/rollouts`, { limit: 1 })).choices.stage : [];
    fill(stage, names.map((/** @type {string} */ n, /** @type {number} */ place) => h("option", { value: n, selected: place === names.length - 1 }, visible(n))), !names.length && h("option", { value: "" }, "this run has no rollouts"));
  }
  function choose() {
    const now = kind.value === "sampled";
    [from_run.hidden, sampled.hidden, stage.disabled] = [now, !now, now];
  }
  const form = h("form", { class: "card stack" }, h("h2", {}, "Make comparisons"), h("div", { class: "row" }, field("Pairs of", kind), field("Name", name), field("How many", count)), from_run, sampled, h("div", { class: "row" }, make), few, said);
  form.addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    said.hidden = make.disabled = true;
    const shared = { name: name.value, count: Number(count.value) };
    try {
      const sent = kind.value === "sampled" ? { ...shared, model: model.value, temperature: Number(temperature.value), prompts: prompts.value.split("\n").map((/** @type {string} */ p) => p.trim()).filter(Boolean) } : { ...shared, run: run.value, stage: stage.value };
      announce("the pairs are made");
      const made = await post("/api/label", sent);
      if (made.rows < shared.count && kind.value === "rollouts") {
        fill(few, `The rollouts have only ${number(made.rows)} pairs of different answers to the same prompt. `, h("a", { href: `/label/${made.id}` }, made.rows === 1 ? "Label it" : "Label them"), " or make more of answers sampled now.");
        announce(few.textContent ?? "");
        make.disabled = false;
      } else dispatchEvent(new CustomEvent("studio-go", { detail: `/label/${made.id}` }));
    } catch (error) {
      said.hidden = make.disabled = false;
      said.textContent = /** @type {Error} */ (error).message;
    }
  });
  choose();
  stagesOf().catch(() => {});
  return form;
}

/** @param {HTMLElement} main @param {string[]} words */
export async function desk(main, [id]) {
  document.title = "Label – posttrain studio";
  let who = localStorage.getItem("annotator") ?? "";
  /** @type {any} */
  let now = null;
  let since = 0;
  let busy = false;
  /** @type {number[]} */
  let ranking = [];
  const order = h("select", { "aria-label": "Next pair", onchange: () => next().catch(fail) }, h("option", { value: "random" }, "in random order"), h("option", { value: "disagreement" }, "where the file says that reward models disagree"));
  for (const r of await get("/api/label/scorers")) order.append(h("option", { value: r.id }, ...visible(`where reward models of ${r.name} disagree`)));
  let later = 0;
  const body = h("div", { class: "stack" });
  fill(main, body);

  async function next() {
    clearTimeout(later);
    const wanted = order.value === "random" ? { order: "random" } : { order: "disagreement", run: order.value === "disagreement" ? "" : order.value };
    now = await get(`/api/label/${id}/next`, { annotator: who, ...wanted });
    if (!now.item && now.sampled?.running) later = window.setTimeout(() => next().catch(fail), 2000);
    ranking = [];
    since = performance.now();
    draw();
    announce(now.item ? `item ${now.done + 1} of ${now.items}` : "all are labelled");
  }
  function draw() {
    const share = now.items ? now.done / now.items : 0;
    const many = now.item && now.item.responses.length > 2;
    const names = many ? now.item.responses.map((/** @type {any} */ _, /** @type {number} */ n) => String(n + 1)) : ["←", "→"];
    fill(body, h("div", { class: "row between" }, h("h1", {}, visible(now.name)), h("div", { class: "row small" }, `labelled by ${who}: `, h("b", { class: "number", "data-done": now.done }, `${now.done} of ${now.items}`), order, h("button", { type: "button", onclick: () => named(true) }, "Another name"))),
      h("div", { class: "progress" }, h("div", { style: { width: `${100 * share}%` } })), notes(),
      now.guidelines && h("details", { class: "card", open: true }, h("summary", {}, "Guidelines"), h("div", { class: "text" }, visible(now.guidelines))),
      now.item ? [
        h("section", { class: "card stack" }, h("h3", {}, "Prompt"), h("div", { class: "text", "data-prompt": true }, visible(now.item.prompt))),
        h("div", { class: "choices" }, now.item.responses.map((/** @type {string} */ text, /** @type {number} */ n) => h("button", { type: "button", class: `choice ${ranking.includes(n) ? "chosen" : ""}`, onclick: () => press(n) }, h("span", { class: "row between" }, h("kbd", {}, names[n]), many && ranking.includes(n) && h("b", {}, `place ${ranking.indexOf(n) + 1}`)), h("span", { class: "text" }, visible(text))))),
        h("div", { class: "row" }, many && h("button", { class: "main", type: "button", disabled: !ranking.length, onclick: () => vote(ranking) }, h("kbd", {}, "Enter"), "Done"), [["t", "Tie", "tie"], ["b", "Both bad", "bad"], ["s", "Skip", "skip"]].map(([key, text, word]) => h("button", { type: "button", onclick: () => vote(word) }, h("kbd", {}, key), text)), h("button", { type: "button", onclick: undo }, h("kbd", {}, "u"), "Undo"), h("input", { id: "comment", class: "grow", placeholder: "Comment (c)", "aria-label": "Comment", maxlength: 4000 })),
        many && h("p", { class: "dim small" }, "Press the numbers from the best to the worst, then Enter. You may stop after the best."),
      ] : now.sampled?.running ? h("div", { class: "card empty" }, h("h2", {}, "More answers are being sampled"), h("p", {}, "The next pair comes in a moment.")) : h("div", { class: "card empty" }, h("h2", {}, "All are labelled"), h("p", {}, "Thank you. ", h("a", { href: "/label" }, "See how far people agree."))));
  }
  /** Progress of the background work while people label. */
  function notes() {
    const parts = [];
    if (now.sampled && (now.sampled.running || now.sampled.error)) parts.push(`${now.sampled.done} of ${now.sampled.total} pairs are sampled${now.sampled.error ? `; it ended: ${now.sampled.error}` : ""}`);
    if (now.scored && now.scored.done < now.scored.total) parts.push(`reward models have scored ${now.scored.done} of ${now.scored.total} pairs`);
    return parts.length ? h("p", { class: "small dim" }, visible(parts.join("; "))) : null;
  }
  function press(/** @type {number} */ n) {
    if (now.item.responses.length === 2) return vote([n]);
    ranking = ranking.includes(n) ? ranking.filter((p) => p !== n) : [...ranking, n];
    draw();
  }
  async function vote(/** @type {number[]|string} */ choice) {
    if (busy || !now?.item) return;
    busy = true;
    const comment = /** @type {HTMLInputElement|null} */ (document.getElementById("comment"))?.value ?? "";
    const sent = { annotator: who, item: now.item.id, choice, comment, seconds: Math.min(3600, (performance.now() - since) / 1000), nonce: crypto.randomUUID() };
    try {
      await kept(`/api/label/${id}/vote`, sent);
      await next();
    } catch (error) {
      fail(error);
    }
    busy = false;
  }
  /** Send until it is saved: the server may be restarting. @param {string} path @param {any} sent */
  async function kept(path, sent) {
    for (let tries = 0; ; tries++) {
      try {
        return await post(path, sent);
      } catch (error) {
        if (!(error instanceof TypeError) || tries > 60) throw error;
        announce("the server does not answer; the vote is sent again");
        await new Promise((done) => setTimeout(done, 500));
      }
    }
  }
  async function undo() {
    if (busy) return;
    busy = true;
    try {
      await kept(`/api/label/${id}/undo`, { annotator: who });
      await next();
    } catch (error) {
      fail(error);
    }
    busy = false;
  }
  function fail(/** @type {any} */ error) {
    body.prepend(h("div", { class: "error", role: "alert" }, error.message, " Reload the page to go on."));
  }
  function named(again = false) {
    const box = h("input", { value: again ? "" : who, placeholder: "Your name", maxlength: 60, "aria-label": "Your name", required: true });
    const form = h("form", { class: "card stack" }, h("h2", {}, "Who labels?"), h("p", { class: "dim" }, "Several people may label the same answers: each sees all of them, without the others' votes."), h("div", { class: "row" }, box, h("button", { class: "main", type: "submit" }, "Begin")));
    form.addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      who = box.value.trim();
      if (!who) return;
      localStorage.setItem("annotator", who);
      next().catch(fail);
    });
    fill(body, form);
    box.focus();
  }
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (typing(event) && event.key === "Escape") return /** @type {HTMLElement} */ (event.target).blur();
    if (typing(event) || !now?.item || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const two = now.item.responses.length === 2;
    const digit = Number(event.key) - 1;
    if (two && event.key === "ArrowLeft") vote([0]);
    else if (two && event.key === "ArrowRight") vote([1]);
    else if (digit >= 0 && digit < now.item.responses.length) press(digit);
    else if (event.key === "Enter" && !two && ranking.length) vote(ranking);
    else if (event.key === "t" || event.key === "ArrowDown") vote("tie");
    else if (event.key === "b") vote("bad");
    else if (event.key === "s") vote("skip");
    else if (event.key === "u" || event.key === "Backspace") undo();
    else if (event.key === "c") document.getElementById("comment")?.focus();
    else return;
    event.preventDefault();
  };
  document.addEventListener("keydown", keys);
  if (who) await next();
  else named();
  return () => (clearTimeout(later), document.removeEventListener("keydown", keys));
}
