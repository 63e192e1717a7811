// Charts drawn by uPlot, each with a table of its values. The tables work without uPlot.

import { make, say, set } from "./dom.js";
import * as format from "./format.js";
import { alone, slope } from "./series.js";

/** The height that style.css gives a plot. */
const heightOf = (area) => Number.parseFloat(getComputedStyle(area).minHeight);
const TABLE_ROWS = 12;
const FONT = "12px system-ui, sans-serif";
/** The shortest time axis, for a server that has just started. */
const LEAST_RANGE_S = 30;
/** A capacity is drawn if it is at most this many times what is used; else what is used would be a flat line. */
const CAPACITY_IN_SIGHT = 6;

const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const TIME_STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200,
];

/**
 * Charts: those of the first screen, then those of memory and tiers. colour: a custom property of style.css. dash: so
 * that lines differ by more than colour. by: the line is how much a counter rose, over "time" or another counter; over_s:
 * in this time.
 * level: a constant line. most: the end of the axis can be no higher. ticks: like format, for the axis. isMore: not shown
 * where there is little room.
 */
export const GAINS = [
  {
    title: "Prompt tokens per second",
    format: format.rate,
    lines: [
      { name: "reused_tokens", by: "time", label: "Reused", colour: "--blue", filled: true },
      { name: "asked_tokens", by: "time", label: "Asked", colour: "--grey", dash: [6, 3] },
    ],
  },
  {
    title: "Share of tokens reused",
    format: format.share,
    ticks: (value) => `${Number((100 * value).toFixed(1))}%`,
    most: 1,
    isMore: true,
    lines: [
      { name: "reused_tokens", by: "asked_tokens", over_s: 60, label: "Reused", colour: "--blue", filled: true },
      { name: "found_tokens", by: "asked_tokens", over_s: 60, label: "Found", colour: "--orange", dash: [6, 3] },
    ],
  },
  {
    title: "TTFT saved per request",
    format: format.duration,
    steps: TIME_STEPS,
    lines: [{ name: "saved_prefill_seconds", by: "saved_requests", label: "Saved", colour: "--teal", filled: true }],
  },
];

const usesAt = (bounds_s) => [
  {
    title: "Loaded and stored",
    format: format.byteRate,
    lines: [
      { name: "retrieved_bytes", by: "time", label: "Loaded", colour: "--blue" },
      { name: "stored_bytes", by: "time", label: "Stored", colour: "--orange", dash: [6, 3] },
    ],
  },
  {
    title: "Request latency",
    format: (value) => format.latency(value, bounds_s),
    ticks: format.duration,
    logarithmic: true,
    lines: [
      { name: "lookup_p50_s", label: "Lookup p50", colour: "--blue" },
      { name: "lookup_p99_s", label: "Lookup p99", colour: "--blue", dash: [4, 3] },
      { name: "retrieve_p50_s", label: "Retrieve p50", colour: "--orange" },
      { name: "retrieve_p99_s", label: "Retrieve p99", colour: "--orange", dash: [4, 3] },
    ],
  },
];

/** The lines of the first counters of chunks that memory lost or did not take, beside evictions, which are always shown. */
const LOOKS = [["--blue"], ["--red", [6, 3]], ["--purple", [2, 3]], ["--grey", [8, 3, 2, 3]], ["--orange", [4, 2]], ["--teal", [1, 3]]];

function lostOf(losses) {
  const evicted = { counter: "evicted_chunks", what: "evicted to make room" };
  const lost = [evicted, ...losses.filter((loss) => loss.where === "Memory" && loss.counter !== evicted.counter)];
  return {
    title: "Chunks evicted or not stored",
    format: format.rate,
    lines: LOOKS.slice(0, lost.length).map(([colour, dash], i) => ({ name: lost[i].counter, by: "time", label: lost[i].what, colour, dash })),
  };
}

const bytesOf = (title, name, capacity) => ({
  title,
  format: format.bytes,
  steps: BYTE_STEPS,
  lines: [
    { name, label: "Used", colour: "--blue", filled: true },
    ...(capacity ? [{ level: capacity, label: "Capacity", colour: "--red", dash: [2, 3] }] : []),
  ],
});

/** The charts of memory and tiers: one of bytes for each, then what happens there. */
export function usesOf(status) {
  return [
    bytesOf("Bytes in memory", "memory_used_bytes", status.capacity_bytes),
    ...status.tiers.map((tier) => bytesOf(`Bytes in ${format.place(tier.name)}`, `tier_bytes.${tier.name}`, tier.capacity_bytes)),
    ...usesAt(status.bounds_s),
    lostOf(status.losses),
  ];
}

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

const isPower = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;

const faint = (value, part) => value.replace(/^rgb\((.*)\)$/, `rgba($1, ${part})`);

export class Chart {
  #uPlot;
  #spec;
  #plot = null;
  #data = [[]];
  #most = 0; // the highest value that is shown

  constructor(uPlot, spec) {
    this.#uPlot = uPlot;
    this.#spec = spec;
    this.area = make("div", { class: "plot", role: "img", "aria-label": spec.title });
    this.none = make("p", { class: "soft", hidden: true }, "No values yet");
    this.area.append(this.none);
    this.legend = make("ul", { class: "legend" });
    this.table = make("table", {}, make("caption", { class: "unseen" }, spec.title), make("thead"), make("tbody"));
    this.details = make(
      "details",
      {},
      make("summary", {}, "Table", make("span", { class: "unseen" }, `: ${spec.title}`)),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${spec.title}, as a table` }, this.table),
    );
    this.details.open = !uPlot;
    this.area.hidden = !uPlot;
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.element = make(
      "figure",
      { class: spec.isMore ? "card chart more" : "card chart" },
      make("figcaption", {}, make("h3", { class: "ellipsis", title: spec.title }, spec.title), this.legend),
      this.area,
      this.details,
    );
    this.recolour();
    if (uPlot) new ResizeObserver(() => this.#resize()).observe(this.area);
  }

  /** Show the last range_s seconds. */
  update(history, range_s) {
    const { lines } = this.#spec;
    const names = lines.flatMap((line) => [line.name, line.by].filter((name) => name && name !== "time"));
    const [times, boots, ...values] = history.window(["boot", ...names], range_s);
    const series = Object.fromEntries(names.map((name, i) => [name, values[i]]));
    this.#data = [
      times,
      ...lines.map((line) => {
        if (line.level) return times.map(() => line.level);
        if (!line.by) return series[line.name];
        return slope(series[line.name], line.by === "time" ? times : series[line.by], boots, times, line.over_s);
      }),
    ];
    this.none.hidden = !lines.every((line, i) => line.level || this.#data[i + 1].every((value) => value == null));
    if (this.#uPlot && times.length && this.area.clientWidth) {
      this.#plot ??= this.#draw();
      this.#plot.setData(this.#data, false);
      this.#plot.batch(() => {
        this.#plot.setScale("x", this.#times(range_s));
        this.#plot.setScale("y", this.#span());
      });
    }
    this.#fillLegend(this.#plot?.cursor.idx ?? null);
    this.#fillTable();
  }

  /** Redraw in the current colours. */
  recolour() {
    const { lines } = this.#spec;
    this.#plot?.destroy();
    this.#plot = null;
    if (this.area.clientWidth && this.#data[0].length && this.#data.length === lines.length + 1) this.#plot = this.#draw();
    this.legend.replaceChildren(
      ...lines.map((line) => {
        const key = make("span", { class: line.dash?.length ? "key dashed" : "key" });
        key.style.color = `var(${line.colour})`;
        return make("li", {}, key, make("span", { class: "ellipsis", title: line.label }, line.label), make("b"));
      }),
    );
    this.#fillLegend(null);
  }

  /** The time axis: the same in all charts, so that one can be compared with another. */
  #times(range_s) {
    const [times] = this.#data;
    const last = times.at(-1);
    return { min: Math.min(Math.max(times[0], last - range_s), last - LEAST_RANGE_S), max: last };
  }

  #span() {
    let [least, most, level] = [Infinity, 0, 0];
    this.#spec.lines.forEach((line, i) => {
      if (line.level) level = line.level;
      else {
        for (const value of this.#data[i + 1]) {
          if (value > most) most = value;
          if (value > 0 && value < least) least = value;
        }
      }
    });
    this.#most = most;
    if (this.#spec.logarithmic) {
      if (!most) return { min: 0.0001, max: 1 };
      return { min: 10 ** Math.floor(Math.log10(least)), max: 10 ** Math.ceil(Math.log10(most * 1.01)) };
    }
    if (level && level <= most * CAPACITY_IN_SIGHT) return { min: 0, max: Math.max(level, most) * 1.08 };
    return { min: 0, max: Math.min(most ? most * 1.12 : 1, this.#spec.most ?? Infinity) };
  }

  #draw() {
    const [ink, grid] = [colour("--soft"), colour("--grid")];
    const { logarithmic, steps, ticks: text = this.#spec.format } = this.#spec;
    const axis = { stroke: ink, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const options = {
      width: this.area.clientWidth,
      height: heightOf(this.area),
      padding: [8, 32, 0, 0], // more than half the width of a time label, which is centred on its time
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
          size: 64,
          space: 30,
          // A logarithmic axis has ten lines for each power of ten, which would smear.
          ...(logarithmic ? { grid: { ...axis.grid, filter: (_, values) => values.map((value) => (isPower(value) ? value : null)) } } : {}),
          ...(steps ? { incrs: steps } : {}),
          // Where there is nothing, or nothing but zeros, an axis beyond that would be invented.
          values: (_, values) =>
            values.map((value) => (value === null || !this.none.hidden || (value && !this.#most) ? "" : text(value))),
        },
      ],
      series: [
        {},
        ...this.#spec.lines.map((line) => {
          const stroke = colour(line.colour);
          return {
            stroke,
            dash: line.dash?.length ? line.dash : undefined,
            width: 1.75,
            points: { show: !line.level, size: 4, fill: stroke, filter: (plot, at) => alone(plot.data[at]) }, // no line shows them
            fill: line.filled ? faint(stroke, 0.12) : undefined,
          };
        }),
      ],
      hooks: { setCursor: [(plot) => this.#fillLegend(plot.cursor.idx)] },
    };
    return new this.#uPlot(options, this.#data, this.area);
  }

  #resize() {
    if (this.#plot && this.area.clientWidth) this.#plot.setSize({ width: this.area.clientWidth, height: heightOf(this.area) });
  }

  /** Values at a point under the cursor, or the latest. */
  #fillLegend(index) {
    const at = index ?? this.#data[0].length - 1;
    const values = this.#spec.lines.map((line, i) => this.#spec.format(this.#data[i + 1]?.[at] ?? line.level ?? null));
    values.forEach((value, i) => say(this.legend.children[i].lastElementChild, value));
    if (index === null) {
      const summary = this.#spec.lines.map((line, i) => `${line.label} ${values[i]}`).join(", ");
      set(this.area, "aria-label", `${this.#spec.title}, now: ${summary}`);
    }
  }

  #fillTable() {
    if (!this.details.open) return;
    const [times, ...lines] = this.#data;
    const step = Math.max(Math.floor(times.length / TABLE_ROWS), 1);
    const picked = [];
    for (let i = times.length - 1; i >= 0 && picked.length < TABLE_ROWS; i -= step) picked.push(i);
    fillGrid(this.table.tHead, "th", [["Time", ...this.#spec.lines.map((line) => line.label)]]);
    fillGrid(
      this.table.tBodies[0],
      "td",
      picked.map((i) => [format.clock(times[i]), ...lines.map((line) => this.#spec.format(line[i]))]),
    );
  }
}

/** Charts within a part of the page, for specifications that may change. */
export class Charts {
  #uPlot;
  #part;
  #charts = new Map(); // by specification, as text

  constructor(uPlot, part) {
    this.#uPlot = uPlot;
    this.#part = part;
  }

  /** Show the last range_s seconds; `specs` of the same content keep their charts. */
  update(specs, history, range_s) {
    const wanted = new Map();
    for (const spec of specs) {
      let name = JSON.stringify(spec);
      while (wanted.has(name)) name += " "; // tiers of one name
      wanted.set(name, this.#charts.get(name) ?? new Chart(this.#uPlot, spec));
    }
    for (const [name, chart] of this.#charts) if (!wanted.has(name)) chart.element.remove();
    const isNew = [...wanted.values()].some((chart) => !chart.element.isConnected);
    this.#charts = wanted;
    if (isNew) this.#part.append(...[...wanted.values()].map((chart) => chart.element));
    for (const chart of wanted.values()) chart.update(history, range_s);
  }

  recolour() {
    for (const chart of this.#charts.values()) chart.recolour();
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
