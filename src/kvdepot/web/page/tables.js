// The tables of the page: models, tenants, leases, engines, events, details.

import { $, child, list, make, rows, say, set } from "./dom.js";
import * as format from "./format.js";
import { shareOf, windowName, windowsOf } from "./panels.js";
import { percentile } from "./series.js";

const { bytes, count, duration, exact, limit, none, rough, share, short } = format;

/** A cell with a button for an action on this row; main.js listens. */
const actionCell = (action, label, about) => (cell, item) => {
  const button = child(cell, () => make("button", { type: "button", class: "small-button", "data-action": action }, `${label}…`));
  set(button, "aria-label", `${label} ${about(item)}`);
  set(button, "data-of", about(item));
};

export function showUsers(status) {
  const spaces = status.namespaces;
  const tenants = tenantsOf(status);
  const parts = [`${count(status.namespace_count || spaces.length)} ${spaces.length === 1 ? "model" : "models"}`];
  if (tenants.length) parts.push(`${count(tenants.length)} tenants`);
  if (status.lease_count) parts.push(`${count(status.lease_count)} ${status.lease_count === 1 ? "lease" : "leases"}`);
  say($("users-count"), parts.join(", "));
  say($("namespaces-count"), spaces.length > 1 ? count(spaces.length) : "");
  const full = (space) => [space.tenant, space.model, `${space.world_size} ranks`, `${space.blocks_in_chunk} blocks per chunk`];
  rows($("namespaces"), spaces, (space) => JSON.stringify(full(space)), [
    ["name", (space) => (space.tenant ? `${space.tenant}: ${space.model}` : space.model), (space) => full(space).filter(Boolean).join(", ")],
    ["num", (space) => (space.asked_tokens ? count(space.asked_tokens) : none), (space) => exact(space.asked_tokens)],
    ["num", (space) => share(shareOf(tokensOf(space), space.reused_tokens)), (space) => `${exact(space.reused_tokens)} tokens; found: ${share(shareOf(tokensOf(space), space.found_tokens))}`],
    ["num", (space) => bytes(space.bytes), (space) => `${exact(space.chunks)} chunks`],
    ["num more", (space) => share(status.capacity_bytes ? space.bytes / status.capacity_bytes : null)],
    ["num more", (space) => count(space.engines)],
    ["action", null, null, actionCell("forget", "Forget", (space) => space.model)],
  ]);
  $("tenants-part").hidden = !tenants.length;
  const whose = (tenant) => [tenant.tenant, tenant.salt && `salt ${tenant.salt}`].filter(Boolean).join(" ");
  rows($("tenants"), tenants, whose, [
    ["name", (tenant) => whose(tenant) || "others", whose],
    ["num", (tenant) => (tenant.asked_tokens ? count(tenant.asked_tokens) : none), (tenant) => exact(tenant.asked_tokens)],
    ["num", (tenant) => share(shareOf(tokensOf(tenant), tenant.reused_tokens)), (tenant) => exact(tenant.reused_tokens)],
    ["num", (tenant) => bytes(tenant.used_bytes)],
    ["num", (tenant) => limit(tenant.quota?.floor_bytes)],
    ["num", (tenant) => limit(tenant.quota?.cap_bytes)],
    ["num more", (tenant) => count(tenant.evicted_chunks)],
    ["num more", (tenant) => count(tenant.capped_chunks)],
  ]);
}

/** As `shareOf` takes it. */
const tokensOf = (usage) => ({ asked: usage.asked_tokens });

/** Tenants by name, with what they asked for and their quotas; none if there is only the nameless one. */
function tenantsOf(status) {
  const found = new Map(status.tenants.map((tenant) => [`${tenant.tenant}/${tenant.salt ?? ""}`, { ...tenant }]));
  for (const usage of status.usage ?? []) {
    const tenant = found.get(`${usage.tenant}/`) ?? { tenant: usage.tenant };
    found.set(`${usage.tenant}/`, { ...tenant, asked_tokens: usage.asked_tokens, reused_tokens: usage.reused_tokens });
  }
  return found.size > 1 || status.tenants.length ? [...found.values()] : [];
}

export function showLeases(leases) {
  $("leases-part").hidden = !leases.length;
  rows($("leases"), leases, (lease) => `${lease.tenant}/${lease.name}`, [
    ["name", (lease) => lease.name, (lease) => (lease.tenant ? `${lease.name} of ${lease.tenant}` : lease.name)],
    ["more", (lease) => lease.kind],
    ["num", (lease) => bytes(lease.bytes), (lease) => `${exact(lease.chunks)} chunks of ${lease.model}`],
    ["num", (lease) => (lease.ends_s == null ? "never" : duration(Math.round(lease.ends_s)))],
    ["num more", (lease) => lease.priority],
    ["action", null, null, actionCell("release", "End", (lease) => lease.name)],
  ]);
}

/** The role of an engine's process. */
const enginePart = (engine) => (engine.ranks.length ? `worker ${engine.ranks.join(", ")}` : "scheduler");

function engineState(engine) {
  if (engine.fault) return "uncached";
  if (engine.queued) return "copying";
  if (engine.sessions) return "serving";
  return engine.idle_s < 60 ? "ready" : `idle ${duration(60 * Math.floor(engine.idle_s / 60))}`;
}

export function showEngines(status) {
  say($("engines-count"), status.engine_count ? `${count(status.engine_count)} processes` : "none");
  // In order of connection: the server lists the last heard first, an order that changes each second.
  const engines = status.engines.toSorted((a, b) => b.since_s - a.since_s || (a.id < b.id ? -1 : 1));
  rows($("engines"), engines, (engine) => engine.id, [
    ["", enginePart, (engine) => [engine.tenant, `connection ${engine.id}`].filter(Boolean).join(", ")],
    ["soft ellipsis", (engine) => engine.engine || short(engine.id), (engine) => engine.engine],
    ["soft more", (engine) => (engine.pid ? `${engine.host}:${engine.pid}` : none)],
    ["", engineState, (engine) => engine.fault],
    ["name", (engine) => engine.models.join(", ") || none, (engine) => engine.models.join("\n")],
    ["num", (engine) => count(engine.sessions)],
    ["num more", (engine) => count(engine.pinned_chunks)],
    ["num", (engine) => rough(engine.since_s), (engine) => duration(Math.round(engine.since_s))],
  ]);
}

export function showEvents(status) {
  const events = [...status.events].reverse();
  $("events-none").hidden = events.length > 0;
  $("events").parentElement.hidden = events.length === 0;
  say($("events-latest"), events.length ? `latest at ${format.moment(events[0].wall_s, status.wall_s)}` : "none");
  list(
    $("events"),
    events,
    (event) => `${event.wall_s} ${event.kind} ${event.text}`,
    (event) => make("li", {}, make("time"), make("span", { class: "kind" }, event.kind.replaceAll("_", " ")), make("span", {}, event.text)),
    (item, event) => {
      const time = item.firstElementChild;
      set(time, "datetime", new Date(event.wall_s * 1000).toISOString());
      set(time, "title", format.ago(status.wall_s - event.wall_s));
      say(time, format.moment(event.wall_s, status.wall_s));
    },
  );
}

const UNITS = { bytes, s: rough, tokens: (value) => count(Math.round(value)), "bytes/s": format.byteRate };

/** The value of a gauge of the status, in the unit that its name ends with. */
const gauge = (field, value) => (field.endsWith("_bytes") ? bytes : field.endsWith("_s") ? rough : count)(value);

const windowOf = (window) => (window.isAll ? "since the start" : windowName(window.window_s));

export function showDetails(status, history) {
  rows($("windows"), windowsOf(status, history).filter((window) => window.asked), (window) => String(windowOf(window)), [
    ["", windowOf],
    ["num", (window) => count(window.asked), (window) => exact(window.asked)],
    ["num", (window) => share(shareOf(window, window.reused)), (window) => exact(window.reused)],
    ["num", (window) => share(shareOf(window, window.found || null)), (window) => exact(window.found)],
  ]);
  rows(
    $("latencies"),
    status.latencies.filter((latency) => latency.count),
    (latency) => latency.request,
    [
      ["", (latency) => latency.request],
      ["num", (latency) => count(latency.count)],
      ["num", (latency) => (latency.errors ? count(latency.errors) : none)],
      ["num", (latency) => format.latency(percentile(latency.buckets, 0.5, status.bounds_s), status.bounds_s)],
      ["num", (latency) => format.latency(percentile(latency.buckets, 0.99, status.bounds_s), status.bounds_s)],
      ["num", (latency) => duration(latency.sum_s / latency.count)],
    ],
  );
  rows($("losses"), status.losses, (loss) => `${loss.where} ${loss.counter}`, [
    ["name", (loss) => loss.where, (loss) => loss.where],
    ["why", (loss) => loss.what, (loss) => loss.counter],
    ["num", (loss) => count(loss.count), (loss) => exact(loss.count)],
  ]);
  const seen = (status.histograms ?? []).filter((each) => each.counts.some((number) => number));
  const total = (each) => each.counts.reduce((sum, number) => sum + number, 0);
  const text = (each, value) => (UNITS[each.unit] ?? count)(value);
  const at = (part) => (each) => {
    const value = percentile(each.counts, part, each.bounds); // within the first bucket, only its end is known
    return value < each.bounds[0] ? `<${text(each, each.bounds[0])}` : text(each, value);
  };
  $("histograms-part").hidden = !seen.length;
  rows($("histograms"), seen, (each) => each.name, [
    ["why", (each) => status.meanings[each.name] ?? each.name, (each) => each.name],
    ["num", (each) => count(total(each)), (each) => exact(total(each))],
    ["num", at(0.5)],
    ["num", at(0.9)],
    ["num", (each) => text(each, each.sum / total(each))],
  ]);
  rows($("figures"), Object.keys(status.meanings).filter((field) => status[field] != null), (field) => field, [
    ["why", (field) => status.meanings[field], (field) => field],
    ["num", (field) => gauge(field, status[field]), (field) => exact(status[field])],
  ]);
}
