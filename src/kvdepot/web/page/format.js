// Formats numbers. Sizes are in binary units, like memory; rates in decimal units, like buses.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

function scaled(value, base, units) {
  let unit = 0;
  while (value >= base - 0.5 && unit < units.length - 1) { // use the next unit for values that would be rounded to it
    value /= base;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${Number(value.toFixed(digits))} ${units[unit]}`;
}

export const none = NONE;

export const count = (value) => (value == null ? NONE : value < 10_000 ? whole.format(value) : compact.format(value));

export const exact = (value) => (value == null ? "" : whole.format(value));

export const bytes = (value) => (value == null ? NONE : scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]));

export const byteRate = (value) =>
  value == null ? NONE : scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);

export const rate = (value) =>
  value == null ? NONE : value && value < 10 ? `${Number(value.toFixed(1))}/s` : `${count(value)}/s`;

export function share(value) {
  if (value == null) return NONE;
  const percent = 100 * value;
  if (percent === 0) return "0%";
  // Never round to "100%" or "0%".
  if (percent > 99.9 && percent < 100) return ">99.9%";
  if (percent > 0 && percent < 0.1) return "<0.1%";
  return `${percent.toFixed(1)}%`;
}

/** A duration in one unit: 12 s, 3 h. */
export const rough = (value) => duration(value).split(" ").slice(0, 2).join(" ");

/** A duration: 0.4 ms, 12 s, 3 h 12 min. */
export function duration(value) {
  if (value == null) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Number((value * 1000).toFixed(2))} ms`;
  if (value < 0.9995) return `${Number((value * 1000).toPrecision(3))} ms`;
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  const seconds = Math.round(value);
  for (const [size, unit, small, smallUnit] of [
    [86_400, "d", 3600, "h"],
    [3600, "h", 60, "min"],
    [60, "min", 1, "s"],
  ]) {
    if (seconds < size) continue;
    const rest = Math.floor((seconds % size) / small);
    return `${whole.format(Math.floor(seconds / size))} ${unit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
  }
  return `${seconds} s`;
}

/** A latency, as precise as its bucket: the first one begins at 0, the last one has no end. */
export function latency(value, bounds) {
  if (value > 0 && value < bounds[0]) return `<${duration(bounds[0])}`;
  return value >= bounds.at(-1) ? `≥${duration(bounds.at(-1))}` : duration(value);
}

export const ago = (value) => (value < 2 ? "just now" : `${duration(Math.round(value))} ago`);

/** A tier's name, which may be a long URL: its scheme and end. */
export function place(name) {
  if (name.length <= 28) return name;
  const [scheme, rest] = name.includes("://") ? name.split("://") : ["", name];
  const end = rest.split("/").filter(Boolean).at(-1) ?? rest;
  return `${scheme ? `${scheme}:` : ""}…/${end.length > 24 ? `${end.slice(0, 23)}…` : end}`;
}

/** The first characters of a long id. */
export const short = (id) => id.slice(0, 8);

/** A size that is a limit, of which 0 means none. */
export const limit = (value) => (value ? bytes(value) : NONE);

const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export const clock = (wall_s) => time.format(wall_s * 1000);

export const clockMinute = (wall_s) => minute.format(wall_s * 1000);

/** A time of day, with the date if it is not today's. */
export function moment(wall_s, now_s) {
  const date = day.format(wall_s * 1000);
  return date === day.format(now_s * 1000) ? clock(wall_s) : `${date}, ${clock(wall_s)}`;
}
