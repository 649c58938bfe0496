// Describes each figure in plain words.

/** @type {{groups: Record<string, [string, string]>, figures: Record<string, string[]>}|null} */
let table = null;

export async function load() {
  table ??= await (await fetch("/static/metrics.json")).json();
  return /** @type {NonNullable<typeof table>} */ (table);
}

/** Bounds of intervals are drawn with their figure. @param {string} figure */
export function isBound(figure) {
  return /_(low|high)$/.test(figure);
}

/**
 * @param {string} figure
 * @returns {{title: string, text: string, group: string, percent: boolean, place: number}}
 */
export function explain(figure) {
  const known = table?.figures ?? {};
  const star = `${figure.split("/")[0]}/*`;
  const key = figure in known ? figure : star in known ? star : "";
  if (!key) return { title: figure, text: "Recorded by the task, the algorithm or a reward of this run.", group: "other", percent: false, place: 999 };
  const [title, group, text, form] = known[key];
  const rest = figure.split("/").slice(1).join("/").replaceAll("_", " ");
  return { title: title.replace("*", rest), text, group, percent: form === "percent", place: Object.keys(known).indexOf(key) };
}
