// Health: turns one status into a verdict. Draws nothing.

import { count, duration } from "./format.js";

/** What counts as recent, in seconds. */
export const RECENT_S = 300;

/**
 * Level (good, look, bad, wait), headline, and warnings. slow: why responses are missing or late, as a sentence;
 * dropped: chunks not stored because memory was full, in RECENT_S.
 */
export function verdict(status, slow, dropped) {
  const reasons = [...concerns(status, slow, dropped)];
  return reasons.length
    ? { level: "look", headline: "Working, with warnings", reasons }
    : { level: "good", headline: "Working", reasons };
}

function* concerns(status, slow, dropped) {
  if (slow) yield slow;
  for (const tier of status.tiers) {
    if (tier.state !== "up") yield `${tier.name}: ${tier.state}, retrying with backoff: ${tier.error || "it fails"}.`;
  }
  for (const device of status.devices) {
    if (device.failure) yield `${device.name} (${device.uuid}): ${device.failure}.`;
  }
  const corrupt = status.counters.corrupt_chunks;
  if (corrupt) {
    yield `${count(corrupt)} ${corrupt === 1 ? "chunk" : "chunks"} failed their checksum since the start; suspect faulty RAM.`;
  }
  if (status.unrecorded_shards) {
    yield `${count(status.unrecorded_shards)} shards have no record and would not survive a restart.`;
  }
  if (dropped >= 1) {
    yield `${count(Math.round(dropped))} chunks were dropped in the last ${duration(RECENT_S)}: memory is full of chunks in use or leased.`;
  }
}

/** The role of an engine's process. */
export function enginePart(engine) {
  return engine.ranks.length ? `worker ${engine.ranks.join(", ")}` : "scheduler";
}

/** The state of an engine. */
export function engineState(engine) {
  if (engine.queued) return "copying";
  if (engine.sessions) return "serving";
  return engine.idle_s < 60 ? "ready" : `idle ${duration(60 * Math.floor(engine.idle_s / 60))}`;
}
