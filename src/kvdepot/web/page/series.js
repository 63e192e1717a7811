// Time series: the server's history (/v1/history), continued by the point of each status.

/** The longest range of the charts. */
const LONGEST_S = 6 * 3600;
/** A gap longer than this means missing data; the server keeps older points ten seconds apart. */
const GAP_S = 25;
/** Points of a line; more are noise. */
const MOST_POINTS = 150;

/**
 * The value that `part` of what is in these buckets does not exceed: linear within a bucket, the last bound for values
 * beyond it; null if they are empty. Counts may have one bucket more than there are bounds.
 */
export function percentile(counts, part, bounds) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  const wanted = part * total;
  let seen = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (counts[i] && seen + counts[i] >= wanted) {
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (wanted - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return bounds.at(-1);
}

/** The share of a histogram's values that are below `limit`; null if it is empty. */
export function below(histogram, limit) {
  const total = histogram.counts.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < histogram.bounds.length; i++) {
    const [low, high] = [i ? histogram.bounds[i - 1] : 0, histogram.bounds[i]];
    if (high >= limit) return (seen + (histogram.counts[i] * (limit - low)) / (high - low)) / total;
    seen += histogram.counts[i];
  }
  return seen / total;
}

/** A histogram of the status or of a tier by its name; null without values. */
export function histogram(owner, name) {
  const found = owner.histograms?.find((each) => each.name === name);
  return found?.counts.some((count) => count) ? found : null;
}

/** Series of percentiles, of which a line shows means; of all others, which are counters and sizes, the latest value. */
const isPercentile = (name) => /_p\d+_s$/.test(name);

/**
 * How much a counter rose from each point to the next, over `by`: times, or another counter; null across boots. over_s:
 * since the first point within that time, instead of the last one.
 */
export function slope(line, by, boots, times, over_s = 0) {
  let from = 0;
  return line.map((value, i) => {
    if (!over_s) from = i - 1;
    else while (from < i - 1 && (times[from] < times[i] - over_s || boots[from] !== boots[i])) from += 1;
    if (value == null || line[from] == null || boots[from] !== boots[i]) return null;
    return by[i] > by[from] ? Math.max(value - line[from], 0) / (by[i] - by[from]) : null;
  });
}

/** Indices of values without neighbours, through which no line is drawn. */
export function alone(line) {
  const found = [];
  line.forEach((value, i) => {
    if (value != null && line[i - 1] == null && line[i + 1] == null) found.push(i);
  });
  return found;
}

/** All series, on one time axis (seconds since 1970); null = no value. */
export class History {
  times = [];
  series = {};

  /** Take the server's history; keeps our own points from before it, e.g. of an earlier server. */
  join(kept, now_s) {
    const first = kept.times_s[0] ?? now_s;
    const since = this.times.findIndex((time) => time >= first);
    const ours = since < 0 ? this.times.length : since;
    const theirs = kept.times_s.length;
    const names = new Set([...Object.keys(this.series), ...Object.keys(kept.series)]);
    const nothing = (points) => new Array(points).fill(null);
    this.series = Object.fromEntries(
      [...names].map((name) => [
        name,
        [...(this.series[name]?.slice(0, ours) ?? nothing(ours)), ...(kept.series[name] ?? nothing(theirs))],
      ]),
    );
    this.times = [...this.times.slice(0, ours), ...kept.times_s];
  }

  /** The time of the newest point; 0 without any. */
  get end_s() {
    return this.times.at(-1) ?? 0;
  }

  /** Add the next point. */
  add({ time_s, ...values }) {
    for (const name of Object.keys(values)) {
      this.series[name] ??= new Array(this.times.length).fill(null);
    }
    this.times.push(time_s);
    for (const [name, line] of Object.entries(this.series)) line.push(values[name] ?? null);
    const old = this.#first(LONGEST_S);
    this.times.splice(0, old);
    for (const line of Object.values(this.series)) line.splice(0, old);
  }

  /**
   * The last `range_s` seconds of some series: the times, then each series; null also where a gap begins. With more than
   * MOST_POINTS seconds, a point stands for some seconds.
   */
  window(names, range_s) {
    const step_s = Math.max(1, Math.round(range_s / MOST_POINTS));
    const times = [];
    const lines = names.map(() => []);
    let counts = [];
    for (let i = this.#first(range_s); i < this.times.length; i++) {
      const time = this.times[i];
      if (time - this.times[i - 1] > GAP_S && times.length) {
        times.push(times.at(-1) + 1);
        for (const line of lines) line.push(null);
      }
      const goes_on = times.length && Math.floor(time / step_s) === Math.floor(times.at(-1) / step_s) && step_s > 1;
      if (goes_on) times[times.length - 1] = time;
      else {
        times.push(time);
        for (const line of lines) line.push(null);
        counts = names.map(() => 0);
      }
      names.forEach((name, at) => {
        const value = this.series[name]?.[i] ?? null;
        if (value === null) return;
        const line = lines[at];
        const last = line.length - 1;
        counts[at] += 1;
        line[last] = counts[at] === 1 || !isPercentile(name) ? value : line[last] + (value - line[last]) / counts[at];
      });
    }
    return [times, ...lines];
  }

  /** How much the counts of tokens rose in the last `range_s` seconds of this boot, as far as there are points. */
  tokens(range_s) {
    const last = this.times.length - 1;
    let first = this.#first(range_s);
    const boots = this.series.boot ?? [];
    while (first < last && boots[first] !== boots[last]) first += 1;
    const rose = (name) => {
      const line = this.series[`${name}_tokens`];
      return line?.[last] == null || line[first] == null ? null : line[last] - line[first];
    };
    return { window_s: last < 0 ? 0 : this.times[last] - this.times[first], asked: rose("asked"), found: rose("found"), reused: rose("reused") };
  }

  #first(range_s) {
    const from = this.end_s - range_s;
    const first = this.times.findIndex((time) => time >= from);
    return first < 0 ? this.times.length : first;
  }
}
