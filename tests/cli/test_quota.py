"""`kvdepot quota`: what it says a change would evict, and that it asks before it evicts."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvdepot.cli.quota import _losses
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota, shown_tag
from kvdepot.protocol.status import OTHERS, NamespaceStatus, Status, TenantStatus, TierStatus
from tests.cli.command import run
from tests.cli.test_view import a_status
from tests.client.engine import CHUNK, Engine
from tests.conftest import StartDepot

MIB = 1 << 20


@pytest.mark.faults
def test_a_cap_that_may_evict_is_set_only_after_asking(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=32)
    engine = Engine(depot, block_bytes=MIB)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    name = f"salt {shown_tag(salt_tag('ten'))} of clients without a tenant"
    low = ("quota", "--salt", "ten", "--cap", "1MiB", "--url", depot.url)
    tried = run(*low, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    lost = f"memory: {name} has at most 4 MiB, and what is above 1 MiB would be evicted"
    assert tried.stdout.splitlines() == [lost, "nothing was changed: this was a dry run"]
    unasked = run(*low)
    assert unasked.returncode == 2 and lost in unasked.stderr and "--yes" in unasked.stderr
    assert depot.status()["tenants"] == []
    high = ("quota", "--salt", "ten", "--cap", "16MiB", "--url", depot.url)
    assert "nothing would be evicted" in run(*high, "--dry-run").stdout
    assert run(*low, "--yes").returncode == 0
    assert "1 MiB" in run("quota", "--url", depot.url).stdout
    remove = ("quota", "--salt", "ten", "--remove", "--url", depot.url)
    ends = f"the quota of {name} would be removed: floor 0 bytes, cap {MIB} bytes, weight 1"
    assert run(*remove, "--dry-run").stdout.splitlines()[0] == ends
    assert json.loads(run(*remove, "--dry-run", "--json").stdout)["ends"]["cap_bytes"] == MIB
    done = run(*remove)
    assert (done.returncode, done.stdout) == (0, f"{name} has no quota\n"), done.stderr
    engine.close()


def said(status: Status, new: Quota | None, *asked: str) -> list[str]:
    tenant, salt = asked
    now = next((each for each in status.tenants if (each.tenant, each.salt) == asked), None)
    return _losses(status, now, new, (tenant, salt), "X")


def namespace(tenant: str, held: int) -> NamespaceStatus:
    return NamespaceStatus(tenant, "m", 1, 4, 1, held, 1)


def tier(held: int | None) -> TierStatus:
    return TierStatus("disk:///kv", "through", "up", 1, held, None, 0, 0, {})


CAP, DISK, TTL = Quota(cap_bytes=MIB), Quota(disk_cap_bytes=MIB), Quota(ttl_s=60)


def test_a_tenant_without_a_quota_has_at_most_what_its_models_have() -> None:
    status = a_status(namespaces=[namespace("blue", 3 * MIB), namespace("red", 9 * MIB)])
    above = "and what is above 1 MiB would be evicted"
    assert said(status, CAP, "blue", "") == [f"memory: X has at most 3 MiB, {above}"]
    assert said(status, CAP, "green", "") == []
    others = msgspec.structs.replace(status, other_namespaces=namespace(OTHERS, 2 * MIB))
    assert said(others, CAP, "blue", "ab") == [f"memory: X has at most 5 MiB, {above}"]
    assert said(status, DISK, "blue", "") == [], "no tier"
    for held, words in ((2 * MIB, "at most 2 MiB"), (None, "an unknown amount")):
        disk = msgspec.structs.replace(status, tiers=[tier(held)])
        assert said(disk, DISK, "blue", "") == [f"each tier disk://: X has {words}, {above}"]
    assert said(a_status(), TTL, "", "ab") == []
    assert said(status, TTL, "blue", "") == ["chunks of X that are older than 1 min 0 s would be removed"]


def test_a_salt_whose_quota_ends_counts_for_its_tenant_again() -> None:
    salted = TenantStatus("blue", 2 * MIB, 1, 0, 0, 1.0, 0, 0, 0, salt="ab")
    whole = TenantStatus("blue", 3 * MIB, 1, 0, 4 * MIB, 1.0, 0, 0, 0)
    above = "memory: X has 5 MiB, and what is above 4 MiB would be evicted"
    assert said(a_status(tenants=[salted, whole]), None, "blue", "ab") == [above]
    assert said(a_status(tenants=[salted]), None, "blue", "ab") == []
    assert said(a_status(tenants=[salted, whole]), CAP, "blue", "ab") == [
        "memory: X has 2 MiB, and what is above 1 MiB would be evicted"
    ]
