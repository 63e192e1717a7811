// Figures over time: what the server kept (/v1/history), continued from one status to the next.

/** Upper ends of the buckets of latencies (kvdepot.metrics.BOUNDS_S), in seconds; one more is for what took longer. */
export const BOUNDS_S = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/** The longest time that charts show. */
const LONGEST_S = 6 * 3600;
/** Two points farther apart than this have nothing known between them: the server keeps older ones ten seconds apart. */
const GAP_S = 25;

/**
 * The time that `part` of the requests in these buckets took at most: linear within a bucket; the last bound where that
 * is not enough. null without any.
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

/** Counters of chunks that were not kept, a series each; kvdepot.web.history has the same. */
const LOST = ["dropped_chunks", "failed_chunks", "expired_chunks"];

/** A run of the server as a number, as kvdepot.web.history has it: 48 bits of its id. */
export const bootNumber = (boot) => Number.parseInt(boot.slice(0, 12) || "0", 16);

const counter = (name) => (status) => status.counters[name] ?? 0;

function bucketsOf(status, request) {
  return status.latencies.find((latency) => latency.request === request)?.buckets ?? [];
}

/** The values of all series between two statuses of one boot, as kvdepot.web.history.measure has them. */
export function point(before, now) {
  const elapsed_s = now.uptime_s - before.uptime_s; // wall_s is of the last tick, in whole seconds
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
 * A count since the server's start as one since the window's beginning. boots: whose count each value is: with another
 * run of the server it began anew at 0, whether it is less by now or more.
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

/** Indices of values with none beside them, which no line goes through. */
export function alone(line) {
  const found = [];
  line.forEach((value, i) => {
    if (value != null && line[i - 1] == null && line[i + 1] == null) found.push(i);
  });
  return found;
}

/** All series, on one axis of time (seconds since 1970); null where there is nothing. */
export class History {
  times = [];
  series = {};

  /** Take what the server kept until now; what we have of the time before that, of a server before it, stays. */
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

  /** When the newest point was; 0 without any. */
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

  /** The last `range_s` seconds of some series: times first, one line each; null also where a gap begins. */
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

  /** What a series of so much a second comes to in the last `range_s` seconds. */
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
