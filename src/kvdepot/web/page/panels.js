// The sections of the page, each filled from one status.

import { $, bar, list, make, rows, say, set } from "./dom.js";
import { ago, bytes, count, duration, exact, latency as latencyTime, moment, none, rough, share } from "./format.js";
import { enginePart, engineState } from "./health.js";
import { percentile } from "./series.js";

const HEADLINE_S = 3600;

const windowName = (window_s) =>
  ({ 60: "minute", 600: "10 min", 3600: "hour", 86400: "day" })[window_s] ?? duration(window_s);

export function showVerdict({ level, headline, reasons }, since) {
  set($("verdict"), "data-level", level);
  say($("state"), headline);
  say($("since"), since);
  list(
    $("reasons"),
    reasons,
    (reason) => reason,
    () => make("li"),
    (item, reason) => say(item, reason),
  );
  document.title = level === "good" ? "kvdepot" : `${headline} · kvdepot`;
}

export function showAll(status) {
  showFacts(status);
  showGain(status);
  showStores(status);
  showUsers(status);
  showEvents(status);
  showDetails(status);
}

function showFacts(status) {
  const facts = [
    ["Engine processes", count(status.engine_count)],
    ["Requests in progress", count(status.sessions)],
    ["Chunks", count(status.chunks)],
    ["Tokens per chunk", count(status.chunk_size_tokens)],
  ];
  fillFacts($("facts"), facts);
}

/** Fill a list of names and values. */
function fillFacts(part, facts) {
  list(
    part,
    facts,
    ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
    (item, [, value]) => say(item.lastElementChild, value),
  );
}

function showGain(status) {
  // Leave out windows that are redundant, because a shorter one covers the server's whole life.
  const windows = (status.reuse ?? []).filter((_, i, all) => (all[i - 1]?.window_s ?? 0) < status.uptime_s);
  const asked = status.asked_tokens ?? 0;
  const overall = { window_s: 0, asked_tokens: asked, rate: asked ? Math.min(status.saved.tokens / asked, 1) : 0 };
  const used = windows.filter((window) => window.asked_tokens);
  const headline = used.find((window) => window.window_s === HEADLINE_S) ?? used.at(-1) ?? overall;
  const isAll = headline === overall || headline.window_s >= status.uptime_s;
  say($("hit-window"), isAll ? "since the start" : `last ${windowName(headline.window_s)}`);
  say($("hit-rate"), headline.asked_tokens ? share(headline.rate) : none);
  bar($("hit-bar"), headline.rate, share(headline.rate));
  const foundIn = (window) => status.hit_rates.find((found) => found.window_s === window.window_s && found.chunks);
  say($("hit-ceiling"), foundText(headline, foundIn(headline), status.hit_rates.length));

  const table = $("hit-windows");
  table.hidden = !windows.length;
  const ofFound = (name) => (window) => (foundIn(window) ? share(foundIn(window)[name]) : none);
  const lines = {
    reuse: (window) => (window.asked_tokens ? share(window.rate) : none),
    tokens: (window) => count(window.asked_tokens),
    hit: ofFound("hit_rate"),
    ceiling: ofFound("ceiling"),
  };
  fillCells(table.tHead.rows[0], windows, "th", (window) => windowName(window.window_s));
  for (const row of table.tBodies[0].rows) fillCells(row, windows, "td", lines[row.dataset.row]);

  say($("saved-tokens"), count(status.saved.tokens));
  set($("saved-tokens"), "title", exact(status.saved.tokens));
  say($("saved-prefill"), duration(status.saved.prefill_s));
  fillFacts($("gain-hits"), [
    ["Lookups", count(status.counters.lookups ?? 0)],
    ["Chunks found", count(status.counters.hit_chunks ?? 0)],
    ["of which in tiers", count(status.counters.tier_hit_chunks ?? 0)],
  ]);
  fillFacts($("gain-bytes"), [
    ["Retrieved", bytes(status.retrieved_bytes)],
    ["Stored", bytes(status.stored_bytes)],
  ]);
  say(
    $("saved-prefill-note"),
    status.saved.tokens && !status.saved.prefill_s
      ? "no engine has reported its prefill speed yet"
      : "at each engine's own measured speed",
  );
}

function foundText(headline, found, hasFound) {
  if (!headline.asked_tokens) return "Nothing has been looked up yet.";
  const text = "loaded from the depot, beyond the engines' own caches";
  if (found) return `${text}. Found there: ${share(found.hit_rate)} of the chunks; upper bound (infinite cache) about ${share(found.ceiling)}`;
  return hasFound ? text : `${text}. The upper bound requires the package datasketches on the server.`;
}

function fillCells(row, windows, tag, text) {
  while (row.cells.length > windows.length + 1) row.lastElementChild.remove();
  while (row.cells.length <= windows.length) row.append(make(tag, { class: "num", ...(tag === "th" ? { scope: "col" } : {}) }));
  windows.forEach((window, i) => say(row.cells[i + 1], text(window)));
}

function showStores(status) {
  const memory = {
    name: "Memory",
    state: "",
    bytes: status.used_bytes,
    capacity: status.capacity_bytes,
    facts: [
      ["Chunks", count(status.chunks)],
      ["Held", count(status.holds)],
      ["Evicted since the start", count(status.evicted_chunks)],
    ],
  };
  const tiers = status.tiers.map((tier) => ({
    name: tier.name,
    state: tier.state,
    bytes: tier.bytes,
    capacity: tier.capacity_bytes,
    facts: [
      ["Objects", count(tier.objects)],
      ["Queued", bytes(tier.queued_bytes)],
      ["Writes", tier.write.replaceAll("_", " ")],
      ...(tier.error ? [["Last error", `${duration(Math.round(tier.error_s))} ago: ${tier.error}`]] : []),
    ],
  }));
  list($("stores"), [memory, ...tiers], (store) => store.name, makeStore, fillStore);
  const tenants = status.tenants ?? [];
  $("tenants-part").hidden = !tenants.length;
  const whose = (tenant) => [tenant.tenant, tenant.salt && `salt ${tenant.salt}`].filter(Boolean).join(" ");
  rows($("tenants"), tenants, whose, [
    ["name", (tenant) => whose(tenant) || "others", whose],
    ["num", (tenant) => bytes(tenant.used_bytes)],
    ["num", (tenant) => bytes(tenant.floor_bytes)],
    ["num", (tenant) => (tenant.cap_bytes ? bytes(tenant.cap_bytes) : none)],
    ["num", (tenant) => count(tenant.evicted_chunks)],
    ["num", (tenant) => count(tenant.capped_chunks)],
  ]);
  const sums = status.lease_sums ?? [];
  $("leases-part").hidden = !sums.length && !status.leases.length;
  say($("leases-count"), status.lease_count > 1 ? count(status.lease_count) : "");
  rows($("lease-sums"), sums, (sum) => `${sum.tenant}/${sum.kind}`, [
    ["name", (sum) => sum.tenant || "no tenant", (sum) => sum.tenant],
    ["", (sum) => sum.kind],
    ["num", (sum) => `${count(sum.leases)} of ${count(sum.begun)}`],
    ["num", (sum) => bytes(sum.bytes)],
    ["num", (sum) => count(sum.saved_tokens), (sum) => exact(sum.saved_tokens)],
    ["num", (sum) => bytes(sum.spared_bytes)],
  ]);
  rows($("leases"), status.leases, (lease) => `${lease.tenant}/${lease.name}`, [
    ["name", (lease) => lease.name, (lease) => (lease.tenant ? `${lease.name} of ${lease.tenant}` : lease.name)],
    ["", (lease) => lease.kind],
    ["num", (lease) => bytes(lease.bytes)],
    ["num", (lease) => (lease.ends_s == null ? "never" : duration(lease.ends_s))],
    ["num", (lease) => count(lease.saved_tokens), (lease) => exact(lease.saved_tokens)],
  ]);
}

function makeStore(store) {
  const meter = make(
    "div",
    { class: "bar", role: "meter", "aria-label": `${store.name} in use`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 },
    make("span", { class: "fill" }),
  );
  return make(
    "article",
    { class: "card tile" },
    make("h3", {}, make("span", { class: "ellipsis" }, store.name), make("span", { class: "tag ellipsis" })),
    make("div", { class: "sizes" }, make("p", { class: "big" }), make("p", { class: "soft of" })),
    meter,
    make("dl", { class: "small beside" }),
  );
}

function fillStore(card, store) {
  const tag = card.querySelector(".tag");
  tag.hidden = !store.state;
  say(tag, store.state);
  set(tag, "data-level", store.state === "up" ? "good" : "look");
  set(card.querySelector("h3 .ellipsis"), "title", store.name);
  say(card.querySelector(".big"), bytes(store.bytes));
  const part = store.capacity ? store.bytes / store.capacity : 0;
  const text = store.capacity ? `${share(part)} of ${bytes(store.capacity)}` : "capacity unknown";
  const meter = card.querySelector(".bar");
  meter.hidden = !store.capacity;
  if (store.capacity) bar(meter, part, text);
  say(card.querySelector(".of"), text);
  fillFacts(card.querySelector("dl"), store.facts);
}

function showUsers(status) {
  say($("engines-count"), status.engine_count ? count(status.engine_count) : "");
  // In order of connection: the server lists the last heard first, an order that changes each second.
  const engines = status.engines.toSorted((a, b) => b.since_s - a.since_s || (a.id < b.id ? -1 : 1));
  rows($("engines"), engines, (engine) => engine.id, [
    ["", enginePart, (engine) => [engine.tenant, engine.device].filter(Boolean).join(", ")],
    ["mono soft", (engine) => engine.id],
    ["", engineState],
    ["name", (engine) => engine.models.join(", ") || none, (engine) => engine.models.join("\n")],
    ["num", (engine) => count(engine.sessions)],
    ["num", (engine) => count(engine.pinned_chunks)],
    ["num", (engine) => rough(engine.since_s), (engine) => duration(Math.round(engine.since_s))],
  ]);
  say($("namespaces-count"), status.namespaces.length > 1 ? count(status.namespaces.length) : "");
  const full = (space) => [space.tenant, space.model, `${space.world_size} ranks`, `${space.blocks_in_chunk} blocks per chunk`];
  rows($("namespaces"), status.namespaces, (space) => JSON.stringify(full(space)), [
    ["name", (space) => (space.tenant ? `${space.tenant}: ${space.model}` : space.model), (space) => full(space).filter(Boolean).join(", ")],
    ["num", (space) => bytes(space.bytes)],
    ["num", (space) => share(status.capacity_bytes ? space.bytes / status.capacity_bytes : null)],
    ["num", (space) => count(space.chunks)],
    ["num", (space) => share(space.lookup_chunks ? space.hit_chunks / space.lookup_chunks : null)],
    ["num", (space) => count(space.engines)],
  ]);
}

function showEvents(status) {
  const events = [...status.events].reverse();
  $("events-none").hidden = events.length > 0;
  $("events").parentElement.hidden = events.length === 0;
  list(
    $("events"),
    events,
    (event) => `${event.wall_s} ${event.kind} ${event.text}`,
    (event) => make("li", {}, make("time"), make("span", { class: "kind" }, event.kind.replaceAll("_", " ")), make("span", {}, event.text)),
    (item, event) => {
      const time = item.firstElementChild;
      set(time, "datetime", new Date(event.wall_s * 1000).toISOString());
      set(time, "title", ago(status.wall_s - event.wall_s));
      say(time, moment(event.wall_s, status.wall_s));
    },
  );
}

function showDetails(status) {
  rows(
    $("latencies"),
    status.latencies.filter((latency) => latency.count),
    (latency) => latency.request,
    [
      ["", (latency) => latency.request],
      ["num", (latency) => count(latency.count)],
      ["num", (latency) => count(latency.errors)],
      ["num", (latency) => latencyTime(percentile(latency.buckets, 0.5))],
      ["num", (latency) => latencyTime(percentile(latency.buckets, 0.99))],
      ["num", (latency) => duration(latency.sum_s / latency.count)],
    ],
  );
  rows($("losses"), status.losses, (loss) => `${loss.where} ${loss.counter}`, [
    ["name", (loss) => loss.where, (loss) => loss.where],
    ["why", (loss) => loss.what, (loss) => loss.counter],
    ["num", (loss) => count(loss.count), (loss) => exact(loss.count)],
  ]);
  $("devices-part").hidden = !status.devices.length;
  rows($("devices"), status.devices, (device) => device.uuid, [
    ["", (device) => device.name, (device) => device.uuid],
    ["", (device) => device.failure || "working"],
    ["num", (device) => count(device.registrations)],
    ["num", (device) => bytes(device.context_bytes)],
    ["num", (device) => bytes(device.staging_bytes)],
  ]);
}
