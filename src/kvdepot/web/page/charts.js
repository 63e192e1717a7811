// Charts drawn by uPlot, each with a table of its values. The tables work without uPlot.

import { make, say, set } from "./dom.js";
import * as format from "./format.js";
import { alone, risen } from "./series.js";

const HEIGHT = 180;
const TABLE_ROWS = 12;
const FONT = "12px system-ui, sans-serif";

const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const TIME_STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200,
  14_400, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000,
];

/**
 * The charts. colour: a custom property of style.css. dash: so that lines differ by more than colour. rises: counted
 * from 0 at the window's beginning. top: the end of the axis, if fixed; idle: its end without data. ticks: like format,
 * for the axis. more: lines that depend on the status.
 */
export const CHARTS = [
  {
    title: "Tokens reused, and chunks found in the depot, over a minute",
    format: format.share,
    ticks: (value) => `${Math.round(100 * value)}%`,
    top: 1,
    lines: [
      { name: "reuse_rate", label: "Reused", colour: "--blue", filled: true },
      { name: "hit_rate", label: "Found", colour: "--orange", dash: [6, 3] },
      { name: "ceiling", label: "Upper bound", colour: "--grey", dash: [2, 3] },
    ],
  },
  {
    title: "Tokens not recomputed, in this period",
    idle: 1000,
    format: format.count,
    lines: [{ name: "saved_tokens", label: "Tokens", colour: "--blue", filled: true, rises: true }],
  },
  {
    title: "Prefill time saved, in this period",
    idle: 60,
    format: format.duration,
    steps: TIME_STEPS,
    lines: [{ name: "saved_prefill_s", label: "Time", colour: "--teal", filled: true, rises: true }],
  },
  {
    title: "Bytes used",
    idle: 2 ** 30,
    format: format.bytes,
    steps: BYTE_STEPS,
    lines: [{ name: "used_bytes", label: "Memory", colour: "--blue" }],
    more: (status) =>
      status.tiers.map((tier, i) => ({
        name: `tier_bytes.${tier.name}`,
        label: tier.name,
        colour: ["--orange", "--teal", "--purple", "--grey"][i % 4],
        dash: [[6, 3], [2, 3], [8, 3, 2, 3], [12, 3]][i % 4],
      })),
  },
  {
    title: "Stored and retrieved",
    idle: 1e9,
    format: format.byteRate,
    lines: [
      { name: "retrieved_bytes_s", label: "Retrieved", colour: "--blue" },
      { name: "stored_bytes_s", label: "Stored", colour: "--orange", dash: [6, 3] },
    ],
  },
  {
    title: "Request latency",
    format: format.latency,
    ticks: format.duration,
    logarithmic: true,
    lines: [
      { name: "lookup_p50_s", label: "Lookup p50", colour: "--blue" },
      { name: "lookup_p99_s", label: "Lookup p99", colour: "--blue", dash: [4, 3] },
      { name: "retrieve_p50_s", label: "Retrieve p50", colour: "--orange" },
      { name: "retrieve_p99_s", label: "Retrieve p99", colour: "--orange", dash: [4, 3] },
    ],
  },
  {
    title: "Chunks evicted or not stored, by reason",
    idle: 10,
    format: format.rate,
    lines: [
      { name: "evicted_chunks_s", label: "Evicted", colour: "--blue" },
      { name: "dropped_chunks_s", label: "Memory full", colour: "--red", dash: [6, 3] },
      { name: "failed_chunks_s", label: "Store failed", colour: "--purple", dash: [2, 3] },
      { name: "expired_chunks_s", label: "Expired", colour: "--grey", dash: [8, 3, 2, 3] },
    ],
  },
];

/** uPlot with its style sheet, or null if it does not load. */
export async function load() {
  try {
    const { default: uPlot } = await import("./vendor/uPlot.esm.js");
    document.head.append(make("link", { rel: "stylesheet", href: "vendor/uPlot.min.css" }));
    return uPlot;
  } catch {
    return null;
  }
}

/** The current value of a custom property of the style sheet, for canvases. */
function colour(name) {
  const probe = make("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const faint = (value, part) => value.replace(/^rgb\((.*)\)$/, `rgba($1, ${part})`);

export class Chart {
  #uPlot;
  #spec;
  #lines = [];
  #plot = null;
  #data = [[]];

  constructor(uPlot, spec) {
    this.#uPlot = uPlot;
    this.#spec = spec;
    this.area = make("div", { class: "plot", role: "img", "aria-label": spec.title });
    this.legend = make("ul", { class: "legend" });
    this.table = make("table", {}, make("caption", { class: "unseen" }, spec.title), make("thead"), make("tbody"));
    this.details = make(
      "details",
      {},
      make("summary", {}, "As a table", make("span", { class: "unseen" }, `: ${spec.title}`)),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${spec.title}, as a table` }, this.table),
    );
    this.details.open = !uPlot;
    this.area.hidden = !uPlot;
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.element = make("figure", { class: "card chart" }, make("figcaption", {}, make("h3", {}, spec.title), this.legend), this.area, this.details);
    if (uPlot) new ResizeObserver(() => this.#resize()).observe(this.area);
  }

  /** Show the last range_s seconds. */
  update(history, status, range_s) {
    const lines = [...this.#spec.lines, ...(this.#spec.more?.(status) ?? [])];
    if (lines.map((line) => line.name).join() !== this.#lines.map((line) => line.name).join()) {
      this.#lines = lines;
      this.recolour();
    }
    const [times, boots, ...values] = history.window(["boot", ...lines.map((line) => line.name)], range_s);
    this.#data = [times, ...values.map((line, i) => (lines[i].rises ? risen(line, boots) : line))];
    if (this.#uPlot && this.#data[0].length) {
      this.#plot ??= this.#draw();
      this.#plot.setData(this.#data, false);
      const last = this.#data[0].at(-1);
      this.#plot.batch(() => {
        this.#plot.setScale("x", { min: last - range_s, max: last });
        this.#plot.setScale("y", this.#span());
      });
    }
    this.#fillLegend(this.#plot?.cursor.idx ?? null);
    this.#fillTable();
  }

  /** Redraw in the current colours. */
  recolour() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#uPlot && this.#data[0].length && this.#data.length === this.#lines.length + 1) this.#plot = this.#draw();
    this.legend.replaceChildren(
      ...this.#lines.map((line) => {
        const key = make("span", { class: line.dash?.length ? "key dashed" : "key" });
        key.style.color = `var(${line.colour})`;
        return make("li", {}, key, make("span", { class: "ellipsis", title: line.label }, line.label), make("b"));
      }),
    );
    this.#fillLegend(null);
  }

  #span() {
    if (this.#spec.top) return { min: 0, max: this.#spec.top };
    let [least, most] = [Infinity, 0];
    for (const line of this.#data.slice(1)) {
      for (const value of line) {
        if (value > most) most = value;
        if (value > 0 && value < least) least = value;
      }
    }
    if (!this.#spec.logarithmic) return { min: 0, max: most ? most * 1.1 : this.#spec.idle };
    if (!most) return { min: 0.0001, max: 1 };
    return { min: 10 ** Math.floor(Math.log10(least)), max: 10 ** Math.ceil(Math.log10(most * 1.01)) };
  }

  #draw() {
    const [ink, grid] = [colour("--soft"), colour("--grid")];
    const { logarithmic, steps, ticks: text = this.#spec.format } = this.#spec;
    const axis = { stroke: ink, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const options = {
      width: this.area.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 24, 0, 0], // half the width of a time label
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "kvdepot" }, points: { size: 6 } },
      scales: { x: { time: true, auto: false }, y: { auto: false, distr: logarithmic ? 3 : 1 } },
      axes: [
        {
          ...axis,
          size: 28,
          space: 70,
          values: (_, times) => times.map((time) => (time % 60 ? format.clock(time) : format.clockMinute(time))),
        },
        {
          ...axis,
          size: 72,
          space: 34,
          ...(steps ? { incrs: steps } : {}),
          values: (_, values) => values.map((value) => (value === null ? "" : text(value))),
        },
      ],
      series: [
        {},
        ...this.#lines.map((line) => {
          const stroke = colour(line.colour);
          return {
            stroke,
            dash: line.dash?.length ? line.dash : undefined,
            width: 1.75,
            points: { show: true, size: 4, fill: stroke, filter: (plot, at) => alone(plot.data[at]) }, // no line shows them
            fill: line.filled ? faint(stroke, 0.1) : undefined,
          };
        }),
      ],
      hooks: { setCursor: [(plot) => this.#fillLegend(plot.cursor.idx)] },
    };
    return new this.#uPlot(options, this.#data, this.area);
  }

  #resize() {
    if (this.#plot && this.area.clientWidth) this.#plot.setSize({ width: this.area.clientWidth, height: HEIGHT });
  }

  /** Values at a point under the cursor, or the latest. */
  #fillLegend(index) {
    const at = index ?? this.#data[0].length - 1;
    const values = this.#lines.map((line, i) => this.#spec.format(this.#data[i + 1]?.[at] ?? null));
    values.forEach((value, i) => say(this.legend.children[i].lastElementChild, value));
    if (index === null) {
      const summary = this.#lines.map((line, i) => `${line.label} ${values[i]}`).join(", ");
      set(this.area, "aria-label", `${this.#spec.title}, now: ${summary}`);
    }
  }

  #fillTable() {
    if (!this.details.open) return;
    const [times, ...lines] = this.#data;
    const step = Math.max(Math.floor(times.length / TABLE_ROWS), 1);
    const picked = [];
    for (let i = times.length - 1; i >= 0 && picked.length < TABLE_ROWS; i -= step) picked.push(i);
    fillGrid(this.table.tHead, "th", [["Time", ...this.#lines.map((line) => line.label)]]);
    fillGrid(
      this.table.tBodies[0],
      "td",
      picked.map((i) => [format.clock(times[i]), ...lines.map((line) => this.#spec.format(line[i]))]),
    );
  }
}

function fillGrid(part, tag, texts) {
  while (part.rows.length > texts.length) part.lastElementChild.remove();
  texts.forEach((cells, y) => {
    const row = part.rows[y] ?? part.appendChild(make("tr"));
    while (row.cells.length > cells.length) row.lastElementChild.remove();
    cells.forEach((text, x) => {
      const isHead = tag === "th" || x === 0;
      const cell =
        row.cells[x] ??
        row.appendChild(make(isHead ? "th" : "td", { class: x ? "num" : "", ...(isHead ? { scope: tag === "th" ? "col" : "row" } : {}) }));
      say(cell, text);
    });
  });
}
