"""The health of a server: a headline, and each problem with advice, in the words of page, commands and doctor."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvdepot.protocol.counters import SERVER
from kvdepot.protocol.status import Status
from kvdepot.values import plural

RECENT_S = 300.0
_ADVICE = {counted.name: counted.advice for counted in SERVER}


class Concern(msgspec.Struct, frozen=True):
    """A problem, and the advice against it, as sentences."""

    what: str
    advice: str


class Health(msgspec.Struct, frozen=True):
    """The state of a server that answers. level: `good` without concerns, otherwise `look`. headline: a sentence."""

    level: str
    headline: str
    concerns: list[Concern]


def judge(status: Status, trouble: str = "", dropped: float = 0.0) -> Health:
    """The health of a server. trouble: the error of `/healthz`, empty if there is none. dropped: shards not stored in
    the last `RECENT_S` because memory was full."""
    concerns = list(_concerns(status, trouble, dropped))
    if concerns:
        return Health("look", f"Needs attention: {plural(len(concerns), 'warning')}", concerns)
    if not status.engine_count:
        return Health("good", "Healthy, no engine is connected", [])
    return Health("good", "Healthy", [])


def _concerns(status: Status, trouble: str, dropped: float) -> Iterator[Concern]:
    if status.unreachable:
        advice = "Restart the server. Engines that are already connected keep working until then."
        yield Concern(f"No new engine can connect: {status.unreachable}.", advice)
    elif trouble:
        advice = "Run `kvdepot doctor` on its machine, which may be overloaded."
        yield Concern(f"{trouble[0].upper()}{trouble[1:]}.", advice)
    if status.http_failure:
        advice = "Page, metrics and HTTP probes are missing; engines work without them."
        yield Concern(f"HTTP is not served: {status.http_failure}.", advice)
    for tier in status.tiers:
        if tier.state != "up":
            advice = "Memory and the other tiers work without it. Check that it is running, reachable and not full, "
            advice += "and that its user may read, write and remove objects."
            error = tier.error.removeprefix(f"{tier.name}: ").rstrip(".") or "unknown error"
            yield Concern(f"{tier.name}: {tier.state}, retrying with backoff: {error}.", advice)
        elif (
            tier.capacity_bytes and tier.free_bytes is not None and tier.bytes is not None
            # Other files fill its file system, or that is smaller than the capacity; the alert has the same limits.
            and tier.free_bytes < 0.05 * tier.capacity_bytes and tier.bytes < 0.95 * tier.capacity_bytes
        ):  # fmt: skip
            what = f"{tier.name}: its file system is nearly full, though the tier has not reached its capacity."
            yield Concern(what, "Free space on it, or lower `capacity_gib`: at its capacity, the tier evicts.")
    if status.faulty_engines:
        what = f"{plural(status.faulty_engines, 'engine')} can neither store nor load KV"
        if faulty := next((each for each in status.engines if each.fault), None):  # the list of engines is limited
            what += f", such as {faulty.engine}: {faulty.fault.rstrip('.')}"
        yield Concern(
            f"{what}.", "Such an engine computes all prompts. Its log has the error; restart it when the cause is gone."
        )
    if status.divided_engines:
        what = f"{plural(status.divided_engines, 'engine')}: scheduler and workers disagree on the identity of the KV."
        yield Concern(what, "It stores and loads nothing. Report it with the error line in the engine's log.")
    for model in status.quarantined:
        what = f"{model} is in quarantine, because a sampled hit differed: its chunks are misses."
        advice = (
            "Run `kvdepot inspect --compare`; then forget the model's chunks, and release it "
            "(`kvdepot inspect --release MODEL`)."
        )
        yield Concern(what, advice)
    if status.settings.get("kv_events") and status.instances and not status.kv_event_topics:
        advice = "Set `kvdepot.events_topic` of each engine, or start the server without `--kv-events`."
        yield Concern("No engine names a topic for its KV events, so routers receive none.", advice)
    if corrupt := status.counters.get("corrupt_chunks", 0):
        what = f"{plural(corrupt, 'chunk')} failed checksum verification since the start; engines recomputed the KV."
        yield Concern(what, _ADVICE["corrupt_chunks"])
    if status.unrecorded_shards:
        what = f"{plural(status.unrecorded_shards, 'shard')} would not survive a restart: the record table is full."
        yield Concern(what, "Use larger chunks, or fewer models per server.")
    if dropped >= 1:
        number = round(dropped)
        what = f"{plural(number, 'shard')} {'was' if number == 1 else 'were'} dropped in the last 5 minutes"
        yield Concern(f"{what}: memory was full.", _ADVICE["dropped_chunks"])
