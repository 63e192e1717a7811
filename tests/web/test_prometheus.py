"""A status as metrics: series begin at 0, and do not fall when the order of namespaces changes."""

from __future__ import annotations

import importlib

from msgspec.structs import replace

from kvdepot.protocol.counters import SERVER, refusal
from kvdepot.protocol.leases import Sum
from kvdepot.status import NamespaceStatus, Status, TenantStatus
from tests.web.conftest import need
from tests.web.site import empty_status


def values(status: Status, name: str) -> dict[str, float]:
    """The values of one metric by model, by tenant, by what was refused, or without a label."""
    need("prometheus_client")
    families = importlib.import_module("kvdepot.web.prometheus").families(status)
    return {
        next(
            (sample.labels[label] for label in ("model", "tenant", "what") if label in sample.labels), ""
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"kvdepot_{name}"
    }


def by_salt(status: Status, name: str) -> dict[tuple[str, str], float]:
    """The values of one metric by tenant and salt."""
    need("prometheus_client")
    families = importlib.import_module("kvdepot.web.prometheus").families(status)
    samples = [sample for family in families for sample in family.samples if sample.name == f"kvdepot_{name}"]
    return {(sample.labels["tenant"], sample.labels["salt"]): sample.value for sample in samples}


def test_a_model_with_a_layout_that_has_little_room_keeps_what_was_counted_of_it() -> None:
    large = [NamespaceStatus("", f"model-{number:02}", 1, 4, 1, 1000 + number, 1, 10, 5) for number in range(49)]
    layouts = [
        NamespaceStatus("", "twice", 1, 4, 1, 5000, 1, 100, 50),
        NamespaceStatus("", "twice", 1, 4, 1, 0, 1, 7, 3),
    ]
    asked = values(replace(empty_status(), namespaces=[*large, *layouts]), "namespace_lookup_chunks_total")
    assert asked["twice"] == 107
    assert len(asked) == 50


def test_there_are_metrics_of_the_fifty_models_that_have_most_bytes_in_all_their_layouts() -> None:
    large = [NamespaceStatus("", f"model-{number:02}", 1, 4, 1, 1000 + number, 1) for number in range(50)]
    parts = [NamespaceStatus("", "parts", 1, 4, 1, 600, 1)] * 2
    held = values(replace(empty_status(), namespaces=[*large, *parts]), "namespace_bytes")
    assert held["parts"] == 1200
    assert len(held) == 50 and "model-00" not in held


def test_a_tenant_with_a_quota_has_metrics_and_the_others_share_theirs() -> None:
    tenants = [
        TenantStatus("", 5, 1, 0, 0, 1.0, 0, 2, 0),
        TenantStatus("blue", 7, 1, 3, 9, 2.0, 60, 4, 6),
    ]
    status = replace(empty_status(), tenants=tenants)
    assert values(status, "tenant_used_bytes") == {"": 5, "blue": 7}
    assert values(status, "tenant_floor_bytes") == {"": 0, "blue": 3}
    assert values(status, "tenant_cap_bytes") == {"": 0, "blue": 9}
    assert values(status, "tenant_evicted_chunks_total") == {"": 2, "blue": 4}
    assert values(status, "tenant_capped_chunks_total") == {"": 0, "blue": 6}
    assert values(empty_status(), "tenant_used_bytes") == {} == values(status, "tenant_disk_bytes")


def test_salts_with_quotas_have_a_label_and_what_is_on_disk_is_shown_where_there_is_a_disk() -> None:
    tenants = [
        TenantStatus("", 5, 1, 0, 0, 1.0, 0, 2, 0),
        TenantStatus("blue", 7, 1, 3, 9, 2.0, 60, 4, 6, 11, 12, 13),
        TenantStatus("blue", 8, 1, 3, 9, 2.0, 60, 4, 6, 21, 22, 0, "5a17"),
    ]
    status = replace(empty_status(), tenants=tenants)
    assert by_salt(status, "tenant_used_bytes") == {("", ""): 5, ("blue", ""): 7, ("blue", "5a17"): 8}
    assert by_salt(status, "tenant_disk_bytes") == {("blue", ""): 11, ("blue", "5a17"): 21}
    assert by_salt(status, "tenant_disk_floor_bytes") == {("blue", ""): 12, ("blue", "5a17"): 22}
    assert by_salt(status, "tenant_disk_cap_bytes") == {("blue", ""): 13, ("blue", "5a17"): 0}


def test_leases_have_metrics_by_tenant_and_kind_and_those_that_held_most_if_there_are_many() -> None:
    sums = [Sum("blue", "retain", 2, 7, 9, 70.5, 30, 512, 0.25), Sum("red", "expire", 1, 0, 1, 0.0, 0, 0, 0.0)]
    status = replace(empty_status(), lease_sums=sums)
    assert values(status, "lease_bytes") == {"blue": 7, "red": 0}
    assert values(status, "lease_byte_seconds_total") == {"blue": 70.5, "red": 0}
    assert values(status, "lease_spared_bytes_total") == {"blue": 30, "red": 0}
    assert values(status, "lease_saved_tokens_total") == {"blue": 512, "red": 0}
    assert values(status, "lease_saved_prefill_seconds_total") == {"blue": 0.25, "red": 0}
    many = [Sum(f"tenant-{i}", "retain", 1, 1, 1, float(i), 0, 0, 0.0) for i in range(200)]
    held = values(replace(empty_status(), lease_sums=many), "lease_bytes")
    assert len(held) == 192 and "tenant-7" not in held and "tenant-8" in held


def test_every_counter_is_there_before_it_counts() -> None:
    for counted in SERVER:
        if what := refusal(counted):
            assert values(empty_status(), "refused_total")[what] == 0.0
        else:
            assert values(empty_status(), f"{counted.name}_total") == {"": 0.0}, counted.name
