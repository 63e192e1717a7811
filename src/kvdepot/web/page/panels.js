// The first sections of the page: state, savings, memory and tiers. Each is filled from one status.

import { $, bar, fillFacts, list, make, say, sayProse, set } from "./dom.js";
import { bytes, byteRate, count, duration, exact, latency, none, place, rough, share } from "./format.js";
import { below, histogram, percentile } from "./series.js";

const HEADLINE_S = 3600;
/** Chunks that were evicted sooner than this after their last use were evicted too soon: memory is short. */
const YOUNG_S = 300;

/** The name of a time in which something happened: hour, 10 min, 23 min. */
export const windowName = (window_s) => {
  const near = Object.entries({ minute: 60, hour: 3600 }).find(([, size_s]) => Math.abs(window_s - size_s) < 0.1 * size_s);
  return near ? near[0] : rough(60 * Math.max(1, Math.round(window_s / 60)));
};

export function showVerdict({ level, headline, concerns }, since) {
  set($("verdict"), "data-level", level);
  say($("state"), headline);
  say($("since"), since);
  list(
    $("reasons"),
    concerns,
    (concern) => concern.what,
    () => make("li", {}, make("span"), " ", make("span", { class: "soft" })),
    (item, concern) => {
      say(item.firstElementChild, concern.what);
      sayProse(item.lastElementChild, concern.advice);
    },
  );
}

export function showHost(status) {
  const port = status.http.split(":").at(-1);
  const name = status.host ? `${status.host}${port ? `:${port}` : ""}` : location.host;
  say($("host"), name);
  set($("host"), "title", `process ${status.pid}, boot ${status.boot}`);
  return name;
}

export function showFacts(status) {
  $("connect").hidden = status.engine_count > 0;
  say($("connect").lastElementChild, status.engine_flag);
  fillFacts($("facts"), [
    ["Engine processes", count(status.engine_count), "Schedulers and workers"],
    ["Requests in progress", count(status.sessions), exact(status.sessions)],
    ["Tokens in memory", count(status.cached_tokens), exact(status.cached_tokens)],
  ]);
}

/** Tokens of the last minute, ten minutes, hour and six hours, as far as the history goes back, and of all time. */
export function windowsOf(status, history) {
  const found = [];
  for (const range_s of [60, 600, 3600, 21_600]) {
    const window = history.tokens(range_s);
    if (window.asked && window.window_s > 1.1 * (found.at(-1)?.window_s ?? 0)) found.push(window);
  }
  return [...found, { window_s: status.uptime_s, isAll: true, ...status.tokens }];
}

/** The share of the tokens asked for; null if nothing was asked, or the share is not known. */
export const shareOf = (window, tokens) => (window.asked && tokens != null ? Math.min(tokens / window.asked, 1) : null);

export function showGain(status, history) {
  const windows = windowsOf(status, history);
  const recent = status.uptime_s > HEADLINE_S ? windows.findLast((window) => window.window_s < 1.1 * HEADLINE_S) : null;
  const headline = recent ?? windows.at(-1);
  const rate = shareOf(headline, headline.reused);
  say($("hit-window"), headline.isAll ? "since the start" : `last ${windowName(headline.window_s)}`);
  say($("hit-rate"), share(rate));
  bar($("hit-bar"), rate, share(rate));
  const parts = [`of ${count(headline.asked)} prompt tokens`];
  if (headline.found) parts.push(`${share(shareOf(headline, headline.found))} found here`);
  say($("hit-parts"), headline.asked ? parts.join("; ") : "No engine has looked anything up yet.");

  const saved = histogram(status, "saved_seconds");
  const mean = saved && saved.sum / saved.counts.reduce((sum, value) => sum + value, 0);
  const hasSpeed = status.saved.prefill_s > 0;
  fillFacts($("gain-facts"), [
    ["Total saved", `${count(status.saved.tokens)} tokens`, exact(status.saved.tokens)],
    ["Total prefill saved", hasSpeed ? duration(status.saved.prefill_s) : none, hasSpeed ? "At each engine's own measured speed" : "No engine has reported its prefill speed yet"],
    ["TTFT saved per request", saved ? duration(mean) : none, "Mean of requests that reused tokens"],
  ]);
}

export function showStores(status) {
  const idle = histogram(status, "eviction_idle_seconds");
  const young = idle && below(idle, YOUNG_S);
  const memory = {
    name: "Memory",
    title: "Memory",
    state: "",
    bytes: status.used_bytes,
    capacity: status.capacity_bytes,
    text: lifetimeText(status, young),
    facts: [
      ["Chunks", count(status.chunks), exact(status.chunks)],
      ["Pins", count(status.holds), "Of requests, leases and copies in progress. Each keeps a chunk, and those before it in its prompt"],
      ["Leased", status.leased_bytes ? bytes(status.leased_bytes) : none],
      ["Evicted", count(status.evicted_chunks), "Since the start"],
      [`Evicted within ${duration(YOUNG_S)} of use`, share(young), `Share of evicted chunks that had been used in the ${duration(YOUNG_S)} before`],
    ],
  };
  const tiers = status.tiers.map((tier) => ({
    name: place(tier.name),
    title: tier.name,
    state: tier.state,
    bytes: tier.bytes,
    capacity: tier.capacity_bytes,
    error: tier.error ? `Last error, ${duration(Math.round(tier.error_s))} ago: ${tier.error}` : "",
    facts: [
      ["Objects", count(tier.objects), exact(tier.objects)],
      ["Load p50, p99", both(tier, "load_seconds"), "Time of a call that loads up to 16 shards, since the start"],
      ["Save p50, p99", both(tier, "save_seconds"), "Time of a call that saves up to 16 shards, since the start"],
      ["Load speed", speed(tier, "load_bytes_per_second"), "Median of such a call"],
      ["In flight", `${count(tier.loads ?? 0)} in, ${count(tier.saves)} out`, "Calls that load and save"],
      ["Queued", tier.queued_bytes ? bytes(tier.queued_bytes) : none, `Writes: ${tier.write.replaceAll("_", " ")}`],
    ],
  }));
  list($("stores"), [memory, ...tiers], (store) => store.title, makeStore, fillStore);
}

function lifetimeText(status, young) {
  if (young > 0.5) return `Most evicted chunks had been used within ${duration(YOUNG_S)}: more memory or a tier would keep them.`;
  if (status.holds_s) return `Holds about ${rough(status.holds_s)} of traffic: half of the evicted chunks were unused for longer.`;
  return status.evicted_chunks ? "" : "No chunk has been evicted yet.";
}

function both(tier, name) {
  const found = histogram(tier, name);
  const at = (part) => latency(percentile(found.counts, part, found.bounds), found.bounds);
  return found ? `${at(0.5)}, ${at(0.99)}` : none;
}

function speed(tier, name) {
  const found = histogram(tier, name);
  return found ? byteRate(percentile(found.counts, 0.5, found.bounds)) : none;
}

function makeStore(store) {
  const meter = make(
    "div",
    { class: "bar", role: "meter", "aria-label": `${store.title} in use`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 },
    make("span", { class: "fill" }),
  );
  return make(
    "article",
    { class: "card tile" },
    make("h3", {}, make("span", { class: "ellipsis", title: store.title }, store.name), make("span", { class: "tag ellipsis" })),
    make("div", { class: "sizes" }, make("p", { class: "big" }), make("p", { class: "soft of" })),
    meter,
    make("p", { class: "soft text" }),
    make("p", { class: "error" }),
    make("dl", { class: "small beside" }),
  );
}

function fillStore(card, store) {
  const tag = card.querySelector(".tag");
  tag.hidden = !store.state;
  say(tag, store.state);
  set(tag, "data-level", store.state === "up" ? "good" : "look");
  say(card.querySelector(".big"), bytes(store.bytes));
  const part = store.capacity ? store.bytes / store.capacity : 0;
  const text = store.capacity ? `${share(part)} of ${bytes(store.capacity)}` : "capacity unknown";
  const meter = card.querySelector(".bar");
  meter.hidden = !store.capacity;
  if (store.capacity) bar(meter, part, text);
  say(card.querySelector(".of"), text);
  for (const name of ["text", "error"]) {
    const line = card.querySelector(`.${name}`);
    line.hidden = !store[name];
    say(line, store[name] ?? "");
  }
  fillFacts(card.querySelector("dl"), store.facts);
}
