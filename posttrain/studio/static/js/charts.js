// Curves: uPlot with our colours, a smoothed mean over its extremes, zoom that all charts share, marks of alarms.
import { download, fill, h, number } from "./dom.js";

/** @typedef {{stage: string, figure: string, step: number[], time: number[], mean: (number|null)[], low: (number|null)[], high: (number|null)[]}} Series */
/** @typedef {{label: string, series: Series}} Curve */
/** @typedef {{axis: "step"|"time", smoothing: number, zoom: [number, number]|null, marks: {x: number, text: string, stage?: string}[], began: number}} View */

/** @type {any} */
const Plot = () => /** @type {any} */ (window).uPlot;
const FEW = 40; // points, which are drawn as they are
const WHOLE = Array.from({ length: 10 }, (_, n) => [1, 2, 5].map((v) => v * 10 ** n)).flat(); // between the marks of steps
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];

/** A colour of the design system. @param {number} place */
export function colour(place) {
  return token(`--c${(place % 7) + 1}`);
}

/** @param {string} name */
function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** An exponential moving mean without the lag of its start. @param {(number|null)[]} values @param {number} weight in [0, 1) */
export function smooth(values, weight) {
  if (!weight) return values;
  let total = 0;
  let count = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    total = weight * total + (1 - weight) * value;
    count = weight * count + (1 - weight);
    return total / count;
  });
}

export class Chart {
  /**
   * @param {{title: string, text: string, percent?: boolean}} words
   * @param {(zoom: [number, number]|null) => void} zoomed
   * @param {(label: string, step: number) => void} [picked] a point was clicked
   */
  constructor(words, zoomed, picked) {
    this.words = words;
    this.zoomed = zoomed;
    this.picked = picked;
    /** @type {Curve[]} */
    this.curves = [];
    /** @type {any} */
    this.plot = null;
    this.key = "";
    this.now = h("span", { class: "now" });
    this.place = h("div", { class: "plot", role: "img", "aria-label": words.title, title: picked ? "Click a point to see what changed the model in that step" : null, onmousedown: (/** @type {MouseEvent} */ e) => (this.pressed = e.clientX), onclick: (/** @type {MouseEvent} */ e) => Math.abs(e.clientX - this.pressed) < 4 && this.pick() });
    this.pressed = 0; // where the mouse was: a drag zooms, and is no click
    this.legend = h("div", { class: "legend" });
    const more = h("button", { class: "icon", type: "button", title: "Explain", "aria-label": `Explain ${words.title}`, onclick: () => this.node.classList.toggle("open") }, "?");
    const save = h("button", { class: "icon", type: "button", title: "Save as PNG", "aria-label": `Save ${words.title} as PNG`, onclick: () => this.save() }, "⤓");
    this.node = h("figure", { class: "card chart" }, h("header", {}, h("h3", {}, words.title), more, save, this.now), h("p", {}, words.text), this.place, this.legend);
    this.seen = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: 190 }));
    this.seen.observe(this.place);
  }

  close() {
    this.seen.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {Curve[]} curves @param {View} view */
  draw(curves, view) {
    this.curves = curves.filter((curve) => curve.series.step.length);
    this.view = view;
    const tables = this.curves.map(({ series }) => {
      const x = view.axis === "time" ? series.time.map((t) => (t - view.began) / 60) : series.step;
      return [x, series.step.length < FEW ? series.mean : smooth(series.mean, view.smoothing), series.low, series.high];
    });
    const data = tables.length ? (tables.length === 1 ? tables[0] : Plot().join(tables)) : [[], [], [], []];
    const key = JSON.stringify([this.curves.map((c) => c.label), view.axis, document.documentElement.dataset.theme]);
    if (this.plot && key === this.key) {
      this.plot.setData(data, false);
      this.scale(data[0]);
    } else {
      this.key = key;
      this.plot?.destroy();
      this.plot = new (Plot())(this.options(), data, this.place);
      this.scale(data[0]);
    }
    this.describe();
  }

  /** Show the zoomed range, or everything. @param {number[]} x */
  scale(x) {
    const [low, high] = this.view?.zoom ?? [x[0] ?? 0, x[x.length - 1] ?? 1];
    this.plot.setScale("x", { min: low, max: high > low ? high : low + 1 });
  }

  options() {
    const series = [{}];
    const bands = [];
    this.curves.forEach((curve, place) => {
      const stroke = colour(place);
      const alone = curve.series.step.length < FEW;
      const at = series.length;
      series.push(
        { label: curve.label, stroke, width: 2, dash: DASHES[Math.floor(place / 7) % 4], spanGaps: true, points: { show: alone, size: 5, fill: stroke } },
        { stroke: "transparent", points: { show: false }, spanGaps: true },
        { stroke: "transparent", points: { show: false }, spanGaps: true },
      );
      bands.push({ series: [at + 2, at + 1], fill: `${stroke}26` });
    });
    const grid = { stroke: token("--line"), width: 1 };
    const axis = { stroke: token("--faint"), grid, ticks: { show: false }, font: "11px system-ui", gap: 4 };
    return {
      width: this.place.clientWidth || 380,
      height: 190,
      series,
      bands,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      scales: { x: { time: false }, y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 24, space: 60, label: this.view?.axis === "time" ? "minutes" : "step", labelSize: 14, labelGap: 0, labelFont: axis.font, ...(this.view?.axis === "time" ? {} : { incrs: WHOLE }) },
        { ...axis, size: 52, space: 34, values: (/** @type {any} */ _, /** @type {number[]} */ found) => found.map((v) => (this.words.percent ? `${short(100 * v)}%` : short(v))) },
      ],
      cursor: { sync: { key: "studio" }, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        setCursor: [() => this.point()],
        setSelect: [(/** @type {any} */ u) => this.chosen(u)],
        draw: [(/** @type {any} */ u) => this.marks(u)],
      },
    };
  }

  /** @param {number|null} low @param {number|null} high */
  range(low, high) {
    if (low === null || high === null || !Number.isFinite(low + high)) return [0, 1];
    const inside = low >= 0 && high <= 1 && high > 0.2;
    if (inside && this.words.percent) return [0, 1.02];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  /** @param {any} u */
  chosen(u) {
    if (u.select.width < 4) return;
    const ends = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomed([ends[0], ends[1]]);
  }

  /** The curve nearest to the pointer, and its step there. */
  pick() {
    const { idx, top } = this.plot?.cursor ?? {};
    if (!this.picked || idx === null || idx === undefined) return;
    const away = (/** @type {number} */ n) => {
      const y = this.plot.data[1 + 3 * n]?.[idx];
      return y === null || y === undefined ? Infinity : Math.abs(this.plot.valToPos(y, "y") - top);
    };
    const [near] = this.curves.map((_, n) => n).sort((a, b) => away(a) - away(b));
    if (near === undefined || away(near) === Infinity) return;
    const { label, series } = this.curves[near];
    const x = this.plot.data[0][idx];
    const xs = this.view?.axis === "time" ? series.time.map((t) => (t - (this.view?.began ?? 0)) / 60) : series.step;
    this.picked(label, Math.round(series.step[xs.indexOf(x)]));
  }

  point() {
    const at = this.plot?.cursor?.idx;
    if (at === null || at === undefined) return this.describe();
    const x = this.plot.data[0][at];
    const said = this.curves.map((_, n) => this.plot.data[1 + 3 * n]?.[at]).filter((v) => v !== null && v !== undefined).map((v) => number(v, this.words.percent));
    const where = this.view?.axis === "time" ? `${x.toFixed(1)} min` : `step ${Math.round(x)}`;
    this.now.textContent = `${where}: ${said.join(" / ") || "–"}`;
  }

  /** The last values, as text for screen readers. */
  describe() {
    const ends = this.curves.map(({ label, series }) => {
      const known = series.mean.filter((v) => v !== null && Number.isFinite(v));
      return { label, first: known[0], last: known[known.length - 1] };
    });
    this.now.textContent = ends.length === 1 ? number(ends[0].last, this.words.percent) : "";
    const said = ends.map((e) => `${e.label} from ${number(e.first, this.words.percent)} to ${number(e.last, this.words.percent)}`);
    this.place.setAttribute("aria-label", `${this.words.title}: ${said.join("; ") || "nothing was measured yet"}`);
    const several = this.curves.length > 1;
    fill(this.legend, several && this.curves.slice(0, 12).map((c, n) => h("span", {}, h("i", { style: { background: colour(n) } }), c.label, " ", h("b", { class: "number" }, number(ends[n].last, this.words.percent)))), several && this.curves.length > 12 && `and ${this.curves.length - 12} more`);
  }

  /** Alarms, as lines with a triangle. @param {any} u */
  marks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = token("--c2");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { x, stage } of this.view?.marks ?? []) {
      // the same step of another stage is at another time
      if (stage && this.view?.axis === "step" && !this.curves.some((c) => c.label === stage)) continue;
      const at = u.valToPos(x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  save() {
    const held = this.plot?.ctx?.canvas;
    if (!held) return;
    const copy = h("canvas", { width: held.width, height: held.height + 40 });
    const ctx = copy.getContext("2d");
    ctx.fillStyle = token("--card");
    ctx.fillRect(0, 0, copy.width, copy.height);
    ctx.fillStyle = token("--ink");
    ctx.font = `600 ${14 * devicePixelRatio}px system-ui`;
    ctx.fillText(this.words.title, 12, 24 * Math.min(devicePixelRatio, 1.4));
    ctx.drawImage(held, 0, 40);
    copy.toBlob((/** @type {Blob} */ blob) => download(blob, `${this.words.title.replace(/\W+/g, "-").toLowerCase()}.png`));
  }
}

/** @param {number} value */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size && size < 1e-3) return value.toExponential(0);
  return String(+value.toPrecision(3));
}
