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
  const sides = [side(found.models, 0), side(found.models, Math.min(1, found.models.length - 1))];
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
  fill(main, h("h1", {}, "Playground"), h("div", { class: "choices" }, sides.map((s) => s.node)), form);
}

/** @param {{id: string, name: string}[]} models @param {number} place */
function side(models, place) {
  const model = h("select", { "aria-label": "Model" }, models.map((m, n) => h("option", { value: m.id, selected: n === place }, m.name)));
  /** @type {{role: string, content: string}[]} */
  let turns = [];
  const log = h("div", { class: "said" });
  return {
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
