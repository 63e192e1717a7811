"""A status as metrics: series begin at 0, families have one unit, and what is not listed is told as a sum."""

from __future__ import annotations

from msgspec.structs import replace

from kvdepot.protocol.counters import SERVER, refusal
from kvdepot.protocol.metrics import ENGINES
from kvdepot.protocol.quotas import Quota
from kvdepot.status import OTHERS, Histogram, NamespaceStatus, Status, TenantStatus, TierStatus, TokenCounts, Usage
from kvdepot.web.prometheus import families
from tests.web.site import empty_status


def values(status: Status, name: str, label: str = "") -> dict[str, float]:
    """The values of one metric by this label."""
    samples = [sample for family in families(status) for sample in family.samples]
    return {sample.labels.get(label, ""): sample.value for sample in samples if sample.name == f"kvdepot_{name}"}


def test_models_beyond_the_fifty_largest_are_one_sum() -> None:
    large = [NamespaceStatus("", f"model-{number:02}", 1, 4, 1, 1000 + number, 1) for number in range(50)]
    parts = [NamespaceStatus("", "parts", 1, 4, 1, 600, 1)] * 2
    beyond = NamespaceStatus(OTHERS, OTHERS, 0, 0, 7, 5, 0)  # what the status itself does not list
    status = replace(empty_status(), namespaces=[*large, *parts], other_namespaces=beyond)
    held = values(status, "namespace_bytes", "model")
    assert held["parts"] == 1200
    assert len(held) == 51 and "model-00" not in held
    assert held[OTHERS] == 1000 + 5
    assert values(status, "namespace_chunks", "model")[OTHERS] == 1 + 7


def test_tokens_are_counted_by_model_by_tenant_and_in_all() -> None:
    usage = [Usage("", 10, 8, 5), Usage("blue", 7, 3, 2)]
    models = [Usage("", 10, 8, 5, "m"), Usage("blue", 6, 3, 2, "n"), Usage(OTHERS, 1, 0, 0, OTHERS)]
    tokens = TokenCounts(17, 11, 7)
    status = replace(empty_status(), usage=usage, model_usage=models, tokens=tokens)
    assert values(status, "tenant_reused_tokens_total", "tenant") == {"": 5, "blue": 2}
    for name, total in (("asked", 17), ("found", 11), ("reused", 7)):
        by_model = values(status, f"model_{name}_tokens_total", "model")
        assert sum(by_model.values()) == total == sum(values(status, f"tenant_{name}_tokens_total", "tenant").values())
        assert values(status, f"{name}_tokens_total") == {"": total}


def test_a_histogram_has_its_buckets_added_up_and_those_of_tiers_are_one_family() -> None:
    tiers = [
        TierStatus(name, "through", "up", None, None, None, 0, 0, {}, loads=2, histograms=[
            Histogram("load_seconds", "s", [0.5, 1.0], [1, 2, count], 9.5)
        ]) for name, count in (("near", 3), ("far", 4))
    ]  # fmt: skip
    hits = Histogram("hit_tokens", "tokens", [64.0, 256.0], [0, 2, 1], 900.0)
    status = replace(empty_status(), tiers=tiers, histograms=[hits])
    made = {family.name: {(s.name, *s.labels.values()): s.value for s in family.samples} for family in families(status)}
    assert made["kvdepot_hit_tokens"] == {
        ("kvdepot_hit_tokens_bucket", "64"): 0, ("kvdepot_hit_tokens_bucket", "256"): 2,
        ("kvdepot_hit_tokens_bucket", "+Inf"): 3, ("kvdepot_hit_tokens_count",): 3, ("kvdepot_hit_tokens_sum",): 900,
    }  # fmt: skip
    loads = made["kvdepot_tier_load_seconds"]
    assert loads["kvdepot_tier_load_seconds_count", "near"] == 6
    assert loads["kvdepot_tier_load_seconds_bucket", "far", "1"] == 3
    assert made["kvdepot_tier_loads"] == {("kvdepot_tier_loads", "near"): 2, ("kvdepot_tier_loads", "far"): 2}


def test_salts_have_a_label_and_bytes_on_disk_need_a_disk() -> None:
    tenants = [
        TenantStatus("", 5, 1, Quota(), 2, 0),
        TenantStatus("blue", 7, 1, Quota(3, 19, 2.0, 60, 12, 13), 4, 6, 11),
        TenantStatus("blue", 8, 1, Quota(3, 19, 2.0, 60, 22, 0), 4, 6, 21, "5a17"),
    ]
    found: dict[str, dict[tuple[str, str], float]] = {}
    for family in families(replace(empty_status(), tenants=tenants)):
        for sample in family.samples:
            if "salt" in sample.labels:
                place = sample.labels["tenant"], sample.labels["salt"]
                found.setdefault(sample.name.removeprefix("kvdepot_tenant_"), {})[place] = sample.value
    assert found["used_bytes"] == {("", ""): 5, ("blue", ""): 7, ("blue", "5a17"): 8}
    assert found["disk_bytes"] == {("blue", ""): 11, ("blue", "5a17"): 21}
    assert found["disk_floor_bytes"] == {("blue", ""): 12, ("blue", "5a17"): 22}
    assert found["disk_cap_bytes"] == {("blue", ""): 13, ("blue", "5a17"): 0}


def test_every_counter_is_there_before_it_counts() -> None:
    for counted in SERVER:
        if what := refusal(counted):
            assert values(empty_status(), "refused_total", "what")[what] == 0.0
        else:
            assert values(empty_status(), f"{counted.series}_total") == {"": 0.0}, counted.name


def test_requests_of_engines_have_series_before_the_first_one() -> None:
    for name in ("duration_seconds_bucket", "duration_seconds_sum", "duration_seconds_count", "errors_total"):
        assert values(empty_status(), f"request_{name}", "request") == dict.fromkeys(ENGINES, 0.0), name
