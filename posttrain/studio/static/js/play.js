// Talk with models, two side by side. They answer through a model server; the studio itself loads none.
import { get, post } from "./api.js";
import { announce, fill, h, number, visible } from "./dom.js";
import { scores } from "./scores.js";

/** @param {HTMLElement} main */
export async function page(main) {
  document.title = "Playground – posttrain studio";
  const found = await get("/api/models");
  if (!found.models.length) {
    return fill(main, h("h1", {}, "Playground"), h("div", { class: "card empty" }, h("h2", {}, "No model to talk with yet"), h("p", {}, "You can talk to the stages of a run after one has saved a model. For other models start ", h("code", { class: "mono" }, "posttrain serve MODEL"), " and open the studio with ", h("code", { class: "mono" }, "--serve http://127.0.0.1:8000/v1"), ".")));
  }
  const temperature = h("input", { type: "number", value: 0.7, min: 0, max: 5, step: 0.1 });
  const seed = h("input", { type: "number", value: 0, min: 0 });
  const length = h("input", { type: "number", value: 256, min: 1, max: 32768 });
  const box = h("textarea", { rows: 3, placeholder: "Say something", "aria-label": "Message" });
  const last = found.models.findLastIndex((/** @type {any} */ m) => m.id.startsWith(`${found.models[0].id.split("/")[0]}/`)); // of the same run
  const sides = [side(found.models, 0), side(found.models, last > 0 ? last : Math.min(1, found.models.length - 1))];
  const two = h("input", { type: "checkbox", checked: found.models.length > 1, onchange: () => (sides[1].node.hidden = !two.checked) });
  sides[1].node.hidden = !two.checked;
  const send = h("button", { class: "main", type: "submit" }, "Send");
  const form = h("form", { class: "card stack" }, box, h("div", { class: "row" }, h("label", { class: "field" }, "Temperature", temperature), h("label", { class: "field" }, "Seed", seed), h("label", { class: "field" }, "Tokens at most", length), h("label", { class: "row" }, two, "two models"), h("span", { class: "grow" }), h("button", { type: "button", onclick: () => sides.forEach((s) => s.clear()) }, "New conversation"), send));
  form.addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    const text = box.value.trim();
    if (!text) return;
    send.disabled = true;
    box.value = "";
    const options = { temperature: Number(temperature.value), seed: Number(seed.value), max_tokens: Number(length.value) };
    announce("the models answer");
    await Promise.all(sides.filter((s) => !s.node.hidden).map((s) => s.say(text, options)));
    announce("answered");
    send.disabled = false;
  });
  box.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
    if (e.key === "Enter" && !e.shiftKey) {
      e.preventDefault();
      form.requestSubmit();
    }
  });
  const known = h("div", { class: "row small" });
  /** Prompts of the run whose model is chosen: a small model knows little else. */
  async function examples() {
    const run = sides[0].model.value.includes("/") ? sides[0].model.value.split("/")[0] : "";
    const prompts = run ? (await get(`/api/runs/${run}/pipeline`).catch(() => ({ prompts: [] }))).prompts.slice(0, 4) : [];
    fill(known, prompts.length > 0 && [h("span", { class: "dim" }, "Prompts of this run:"), prompts.map((/** @type {any} */ p) => h("button", { type: "button", onclick: () => ((box.value = p.question), box.focus()) }, h("span", { class: "text short" }, visible(p.question))))]);
  }
  sides[0].model.addEventListener("change", examples);
  examples();
  form.prepend(known);
  fill(main, h("h1", {}, "Playground"), h("p", { class: "dim" }, "Talk with the model of any stage, or with two at once to compare them. The darker a token, the less likely it was."), h("div", { class: "choices" }, sides.map((s) => s.node)), form);
}

/** @param {{id: string, name: string}[]} models @param {number} place */
function side(models, place) {
  const model = h("select", { "aria-label": "Model" }, models.map((m, n) => h("option", { value: m.id, selected: n === place }, m.name)));
  /** @type {{role: string, content: string}[]} */
  let turns = [];
  const log = h("div", { class: "said" });
  return {
    model,
    node: h("section", { class: "card stack" }, model, log),
    clear() {
      turns = [];
      fill(log);
    },
    /** @param {string} text @param {Record<string, number>} options */
    async say(text, options) {
      turns.push({ role: "user", content: text });
      log.append(h("div", { class: "bubble user text" }, visible(text)));
      const place = h("div", { class: "bubble text" }, "…");
      log.append(place);
      try {
        const answer = await post("/api/chat", { model: model.value, messages: turns, ...options });
        turns.push({ role: "assistant", content: answer.text });
        const tokens = answer.tokens.map((/** @type {any} */ t) => h("span", { title: number(Math.exp(t.logprob), true), style: { backgroundColor: `color-mix(in srgb, var(--c2) ${Math.round(42 * (1 - Math.exp(t.logprob)))}%, transparent)` } }, visible(t.token)));
        fill(place, tokens.length ? tokens : visible(answer.text));
        log.append(...[scores(answer)].filter((node) => node !== null));
      } catch (error) {
        place.classList.add("error");
        fill(place, /** @type {Error} */ (error).message);
      }
    },
  };
}
