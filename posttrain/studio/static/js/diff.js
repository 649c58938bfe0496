// What changed between two texts, word by word.

/**
 * @param {string} before
 * @param {string} after
 * @returns {{text: string, kind: "same"|"new"|"gone"}[]}
 */
export function diff(before, after) {
  const [a, b] = [before, after].map((t) => (t.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? []).slice(0, 1500));
  const rows = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) rows[i][j] = a[i] === b[j] ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
  /** @type {{text: string, kind: "same"|"new"|"gone"}[]} */
  const parts = [];
  const add = (/** @type {string} */ text, /** @type {"same"|"new"|"gone"} */ kind) => {
    const last = parts[parts.length - 1];
    if (last && last.kind === kind) last.text += text;
    else parts.push({ text, kind });
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) add(a[i++], "same"), j++;
    else if (j < b.length && (i === a.length || rows[i][j + 1] >= rows[i + 1][j])) add(b[j++], "new");
    else add(a[i++], "gone");
  }
  return parts;
}
