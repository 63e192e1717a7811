// Time series: the server's history (/v1/history), continued from one status to the next.

/** Upper bounds of the latency buckets (kvdepot.metrics.BOUNDS_S), in seconds; one more bucket holds the rest. */
export const BOUNDS_S = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

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
export function percentile(counts, part, bounds = BOUNDS_S) {
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

/** Counters of chunks that were not kept, with a series each; kvdepot.web.history has the same list. */
const LOST = ["dropped_chunks", "failed_chunks", "expired_chunks"];

/** A number that identifies a run of the server, the same as in kvdepot.web.history: 48 bits of its boot id. */
export const bootNumber = (boot) => Number.parseInt(boot.slice(0, 12) || "0", 16);

const counter = (name) => (status) => status.counters[name] ?? 0;

function bucketsOf(status, request) {
  return status.latencies.find((latency) => latency.request === request)?.buckets ?? [];
}

/** The values of all series between two statuses of one boot, the same as in kvdepot.web.history.measure. */
export function point(before, now) {
  const elapsed_s = now.uptime_s - before.uptime_s; // wall_s is that of the last tick, in whole seconds
  const a_second = (value) => Math.max(value(now) - value(before), 0) / elapsed_s;
  const asked = now.tokens.asked - before.tokens.asked;
  const part = (name) => (asked > 0 && now.tokens[name] != null ? Math.min((now.tokens[name] - before.tokens[name]) / asked, 1) : null);
  const values = {
    reuse_rate: part("reused"),
    boot: bootNumber(now.boot),
    asked_tokens: now.tokens.asked,
    hit_rate: part("found"),
    ceiling: part("bound"),
    saved_tokens: now.saved.tokens,
    saved_prefill_s: now.saved.prefill_s,
    saved_requests: (now.histograms ?? [])
      .filter((each) => each.name === "saved_seconds")
      .reduce((sum, each) => sum + each.counts.reduce((all, count) => all + count, 0), 0),
    stored_bytes_s: a_second((status) => status.stored_bytes),
    retrieved_bytes_s: a_second((status) => status.retrieved_bytes),
    used_bytes: now.used_bytes,
    evicted_chunks_s: a_second((status) => status.evicted_chunks),
  };
  for (const name of LOST) values[`${name}_s`] = a_second(counter(name));
  for (const request of ["Lookup", "Retrieve"]) {
    const old = bucketsOf(before, request);
    const buckets = bucketsOf(now, request).map((value, i) => value - (old[i] ?? 0));
    values[`${request.toLowerCase()}_p50_s`] = percentile(buckets, 0.5);
    values[`${request.toLowerCase()}_p99_s`] = percentile(buckets, 0.99);
  }
  for (const tier of now.tiers) values[`tier_bytes.${tier.name}`] = tier.bytes;
  return values;
}

/** Series that only rise within a boot; a bin has their latest value, not the mean. As in kvdepot.web.history. */
const EXACT = new Set(["asked_tokens", "saved_tokens", "saved_prefill_s", "saved_requests", "boot"]);

/** How much a counter rose from each point to the next, over `by`: times, or another counter; null across boots. */
export function slope(line, by, boots) {
  return line.map((value, i) => {
    const before = line[i - 1];
    if (value == null || before == null || by[i] == null || by[i - 1] == null || boots[i] !== boots[i - 1]) return null;
    return by[i] > by[i - 1] ? Math.max(value - before, 0) / (by[i] - by[i - 1]) : null;
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

  add(wall_s, values) {
    if (wall_s <= this.end_s) return;
    for (const name of Object.keys(values)) {
      this.series[name] ??= new Array(this.times.length).fill(null);
    }
    this.times.push(wall_s);
    for (const [name, line] of Object.entries(this.series)) line.push(values[name] ?? null);
    const old = this.#first(LONGEST_S);
    this.times.splice(0, old);
    for (const line of Object.values(this.series)) line.splice(0, old);
  }

  /**
   * The last `range_s` seconds of some series: the times, then each series; null also where a gap begins. With more than
   * MOST_POINTS seconds, points are the means of some seconds (the latest value, of counters).
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
        line[last] = EXACT.has(name) || counts[at] === 1 ? value : line[last] + (value - line[last]) / counts[at];
      });
    }
    return [times, ...lines];
  }

  #first(range_s) {
    const from = this.end_s - range_s;
    const first = this.times.findIndex((time) => time >= from);
    return first < 0 ? this.times.length : first;
  }
}
