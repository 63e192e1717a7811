// Time series: the server's history (/v1/history), continued from one status to the next.

/** Upper bounds of the latency buckets (kvdepot.metrics.BOUNDS_S), in seconds; one more bucket holds the rest. */
export const BOUNDS_S = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/** The longest range of the charts. */
const LONGEST_S = 6 * 3600;
/** A gap longer than this means missing data; the server keeps older points ten seconds apart. */
const GAP_S = 25;

/**
 * The time within which `part` of the requests in these buckets was answered: linear within a bucket, the last bound for
 * times beyond it; null without requests.
 */
export function percentile(buckets, part) {
  const total = buckets.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  const wanted = part * total;
  let seen = 0;
  for (let i = 0; i < BOUNDS_S.length; i++) {
    if (buckets[i] && seen + buckets[i] >= wanted) {
      const low = i ? BOUNDS_S[i - 1] : 0;
      return low + ((BOUNDS_S[i] - low) * (wanted - seen)) / buckets[i];
    }
    seen += buckets[i];
  }
  return BOUNDS_S.at(-1);
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
  const newest = now.hit_rates[0];
  const reuse = now.reuse?.[0];
  const values = {
    reuse_rate: reuse?.asked_tokens ? reuse.rate : null,
    boot: bootNumber(now.boot),
    hit_rate: newest?.chunks ? newest.hit_rate : null,
    ceiling: newest?.chunks ? newest.ceiling : null,
    saved_tokens: now.saved.tokens,
    saved_prefill_s: now.saved.prefill_s,
    stored_bytes_s: a_second((status) => status.stored_bytes),
    retrieved_bytes_s: a_second((status) => status.retrieved_bytes),
    used_bytes: now.used_bytes,
    evicted_chunks_s: a_second((status) => status.evicted_chunks),
  };
  for (const name of LOST) values[`${name}_s`] = a_second(counter(name));
  const asked = counter("lookup_chunks")(now) - counter("lookup_chunks")(before);
  if (!newest && asked > 0) values.hit_rate = (counter("hit_chunks")(now) - counter("hit_chunks")(before)) / asked;
  for (const request of ["Lookup", "Retrieve"]) {
    const old = bucketsOf(before, request);
    const buckets = bucketsOf(now, request).map((value, i) => value - (old[i] ?? 0));
    values[`${request.toLowerCase()}_p50_s`] = percentile(buckets, 0.5);
    values[`${request.toLowerCase()}_p99_s`] = percentile(buckets, 0.99);
  }
  for (const tier of now.tiers) values[`tier_bytes.${tier.name}`] = tier.bytes;
  return values;
}

/**
 * Turn a counter since the server's start into one since the window's beginning. boots: the run of each value; in
 * another run the counter restarted at 0, whether it is lower or higher now.
 */
export function risen(line, boots) {
  let total = 0;
  let before = null;
  let boot = null;
  return line.map((value, i) => {
    if (value === null) return null;
    const anew = boot !== null && boots[i] !== null && boots[i] !== boot;
    if (before !== null) total += anew ? value : Math.max(value - before, 0);
    before = value;
    boot = boots[i] ?? boot;
    return total;
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

  /** The last `range_s` seconds of some series: the times, then each series; null also where a gap begins. */
  window(names, range_s) {
    const times = [];
    const lines = names.map(() => []);
    for (let i = this.#first(range_s); i < this.times.length; i++) {
      if (this.times[i] - times.at(-1) > GAP_S) {
        times.push(times.at(-1) + 1);
        for (const line of lines) line.push(null);
      }
      times.push(this.times[i]);
      names.forEach((name, at) => lines[at].push(this.series[name]?.[i] ?? null));
    }
    return [times, ...lines];
  }

  /** The sum of a series of rates over the last `range_s` seconds. */
  total(name, range_s) {
    const [times, line] = this.window([name], range_s);
    return line.reduce((sum, value, i) => (i && value !== null ? sum + value * (times[i] - times[i - 1]) : sum), 0);
  }

  #first(range_s) {
    const from = this.end_s - range_s;
    const first = this.times.findIndex((time) => time >= from);
    return first < 0 ? this.times.length : first;
  }
}
