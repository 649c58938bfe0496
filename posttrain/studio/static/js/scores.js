// The rewards of an answer that was sampled now, and the KL of its model from the first one.
import { h, number, visible } from "./dom.js";

/** @typedef {{name: string, kind: string, value: number|null, parts: Record<string, number>, failure: string|null}} Reward */
/** @typedef {{tokens?: any, kl?: number|null, base?: string|null, rewards?: Reward[]}} Scored */

const KL = "The log-probability of this answer under this model minus that under the first one, summed over its tokens. The mean over many answers is the KL divergence; this is the estimate from a single one, and may be negative.";

/** @param {Scored} answer @returns {[string, string, string][]} name, value, explanation */
export function scoreRows(answer) {
  /** @type {[string, string, string][]} */
  const rows = [];
  const stages = (answer.rewards ?? []).filter((r) => r.kind === "stage");
  // a reward model that is a stage's whole reward is not shown twice
  const others = (answer.rewards ?? []).filter((r) => r.kind !== "stage" && !stages.some((s) => s.value !== null && s.value === r.value));
  for (const r of [...stages, ...others]) {
    const title = r.kind === "stage" ? `Reward in ${r.name}` : `Reward model ${r.name}`;
    const more = r.kind === "stage" ? "The reward of this stage for the answer." : "The score of this reward model for the answer.";
    rows.push([title, r.value === null || r.value === undefined ? (r.failure ?? "–") : number(r.value), more]);
    if (r.kind === "stage" && r.parts.task !== undefined && r.parts.task !== r.value) rows.push(["Task's own score", number(r.parts.task), "The task's own score, which the reward approximates."]);
    if (r.parts.disagreement !== undefined) rows.push(["Disagreement", number(r.parts.disagreement), "The standard deviation between the members of the ensemble."]);
  }
  if (answer.kl !== null && answer.kl !== undefined) rows.push([`KL from ${answer.base} (one sample)`, `${number(answer.kl)} nats`, KL]);
  const tokens = Array.isArray(answer.tokens) ? answer.tokens.length : answer.tokens;
  if (tokens) rows.push(["Length", `${tokens} tokens`, ""]);
  return rows;
}

/** @param {Scored} answer */
export function scores(answer) {
  const rows = scoreRows(answer);
  return rows.length ? h("dl", { class: "scores" }, rows.map(([name, value, more]) => h("div", { title: more }, h("dt", {}, visible(name)), h("dd", {}, visible(value))))) : null;
}
