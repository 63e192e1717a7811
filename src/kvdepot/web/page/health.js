// Is it working? What one status says of that, in words. Decides, draws nothing.

import { count, duration, share } from "./format.js";

/** Level (good, look, bad, wait), headline, and what to look at. failure: why no status came, if none did. */
export function verdict(status, silent_s, failure) {
  if (failure) return { level: "bad", ...failure };
  if (silent_s > 5) {
    return {
      level: "bad",
      headline: "Not answering",
      reasons: [`The depot has not answered for ${duration(Math.floor(silent_s))}. The figures below are old.`],
    };
  }
  const reasons = [...concerns(status)];
  return reasons.length
    ? { level: "look", headline: "Working, with something to look at", reasons }
    : { level: "good", headline: "Working", reasons };
}

function* concerns(status) {
  for (const tier of status.tiers) {
    if (tier.state !== "up") yield `${tier.name} is ${tier.state}: it fails, and is tried again from time to time.`;
  }
  for (const device of status.devices) {
    if (device.failure) yield `${device.name} (${device.uuid}): ${device.failure}.`;
  }
  const corrupt = status.counters.corrupt_chunks;
  if (corrupt) {
    yield `${count(corrupt)} ${corrupt === 1 ? "chunk" : "chunks"} in memory were found damaged, and dropped, since the start.`;
  }
  if (status.unrecorded_shards) {
    yield `${count(status.unrecorded_shards)} stored parts have no record: a restart would lose them.`;
  }
  if (status.capacity_bytes && status.holds && status.used_bytes === status.capacity_bytes && status.counters.dropped_chunks) {
    const stores = status.counters.stored_chunks + status.counters.dropped_chunks;
    const part = status.counters.dropped_chunks / stores;
    if (part > 0.01) yield `Memory is full of what is held: ${share(part)} of the chunks to store found no room.`;
  }
}

/** Which part of an engine a process is. */
export function enginePart(engine) {
  return engine.ranks.length ? `worker ${engine.ranks.join(", ")}` : "scheduler";
}

/** In which state an engine is. */
export function engineState(engine) {
  if (engine.queued) return "copying";
  if (engine.sessions) return "serving";
  return engine.idle_s < 60 ? "ready" : `idle ${duration(60 * Math.floor(engine.idle_s / 60))}`;
}
