"""`kvdepot quota`: what it says a change would evict, and that it asks before it evicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import msgspec
import pytest

from kvdepot.cli import load, quota
from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.protocol.keys import ROOT, salt_tag
from kvdepot.protocol.quotas import Quota, shown_tag
from kvdepot.protocol.status import OTHERS, NamespaceStatus, Status, TenantStatus, TierStatus
from tests.cli.command import run
from tests.cli.test_view import a_status
from tests.conftest import HANG_S, Depot, StartDepot

CHUNK_BYTES = 256 << 10
TAG = shown_tag(salt_tag("ten"))


def store(depot: Depot, chunks: int, salt: str) -> None:
    """Store a prompt of chunks of 256 KiB under a salt."""
    plan = load.Plan(depot.url, "", "m", 1, 1, chunks, CHUNK_BYTES)
    with load._worker(plan) as worker:
        hashes = b"".join(hashlib.blake2b(b"%d" % at, digest_size=32).digest() for at in range(chunks))
        blocks = pack_block_ids(range(chunks * load.BLOCKS))
        done = worker.submit_store(["r"], [Transfer("r", ROOT, 0, hashes, blocks, salt=salt_tag(salt))], None)
        assert worker.client.wait(done.done, HANG_S) and done.outcome() == [True]


@pytest.mark.faults
def test_a_first_cap_of_a_salt_evicts_only_after_asking(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=32)
    store(depot, 64, "ten")
    low = ("quota", "--salt", "ten", "--cap", "1MiB", "--url", depot.url)
    tried = run(*low, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.splitlines() == [
        f"memory: salt {TAG} of clients without a tenant has 16 MiB, and 15 MiB would be evicted",
        "nothing was changed: this was a dry run",
    ]
    unasked = run(*low)
    assert unasked.returncode == 2 and "15 MiB would be evicted" in unasked.stderr and "--yes" in unasked.stderr
    assert depot.status()["chunks"] == 64 and depot.status()["tenants"] == []
    high = ("quota", "--salt", "ten", "--cap", "16MiB", "--url", depot.url)
    assert "nothing would be evicted" in run(*high, "--dry-run").stdout
    assert run(*low, "--yes").returncode == 0
    assert depot.status()["chunks"] == 4


@pytest.mark.faults
def test_a_dry_run_of_remove_says_what_would_end(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=32)
    remove = ("quota", "--salt", "ten", "--remove", "--dry-run", "--url", depot.url)
    whose = f"salt {TAG} of clients without a tenant"
    assert run(*remove).stdout.splitlines()[0] == f"{whose} has no quota"
    assert run("quota", "--salt", "ten", "--floor", "1MiB", "--ttl-s", "60", "--url", depot.url).returncode == 0
    store(depot, 4, "ten")
    done = run(*remove)
    ends = Quota(1 << 20, ttl_s=60)
    assert done.stdout.splitlines() == [
        f"the quota of {whose} would be removed: {ends.words}; it has 1 MiB in memory",
        "nothing would be evicted",
        "nothing was changed: this was a dry run",
    ]
    assert json.loads(run(*remove, "--json").stdout) == {"losses": [], "ends": msgspec.to_builtins(ends)}
    assert len(depot.status()["tenants"]) == 2, "the salt, and all others"


def said(server: Status, tenant: str, salt: str, new: Quota, counted: int | None = None) -> list[str]:
    return quota._losses(server, quota._part_of(server, tenant, salt, counted), new, "X")


def namespace(tenant: str, held: int) -> NamespaceStatus:
    return NamespaceStatus(tenant, "m", 1, 4, 1, held, 1)


def test_what_a_tenant_without_a_quota_has_is_taken_from_its_models() -> None:
    cap = Quota(cap_bytes=1 << 20)
    server = a_status(namespaces=[namespace("blue", 3 << 20), namespace("red", 9 << 20)])
    assert said(server, "blue", "", cap) == ["memory: X has 3 MiB, and 2 MiB would be evicted"]
    assert said(server, "green", "", cap) == []
    salted = TenantStatus("blue", 2 << 20, 1, 0, 0, 1.0, 0, 0, 0, salt="ab")
    assert said(msgspec.structs.replace(server, tenants=[salted]), "blue", "", cap) == [], "a salt counts for itself"


def test_what_cannot_be_known_is_asked_about() -> None:
    cap, disk = Quota(cap_bytes=1 << 20), Quota(disk_cap_bytes=1 << 20)
    server = a_status(namespaces=[namespace("blue", 3 << 20)])
    others = msgspec.structs.replace(server, other_namespaces=namespace(OTHERS, 2 << 20))
    unknown = "memory: what X has above 1 MiB would be evicted; what it has is unknown, at most"
    assert said(server, "blue", "ab", cap) == [f"{unknown} 3 MiB"]
    assert said(others, "blue", "", cap) == [f"{unknown} 5 MiB"]
    assert said(server, "blue", "", disk) == [], "no tier"
    tier: Callable[[int | None], TierStatus] = lambda held: TierStatus(  # noqa: E731
        "disk:///kv", "through", "up", 1, held, None, 0, 0, {}
    )
    for held, words in ((2 << 20, ", at most 2 MiB"), (None, "")):
        assert said(msgspec.structs.replace(server, tiers=[tier(held)]), "blue", "", disk) == [
            f"each tier disk://: what X has above 1 MiB would be evicted; what it has is unknown{words}"
        ]
    assert said(msgspec.structs.replace(server, tiers=[tier(1 << 20)]), "blue", "", disk) == []
    ttl = Quota(ttl_s=60)
    assert said(a_status(), "", "ab", ttl, 0) == []
    assert said(a_status(), "", "ab", ttl, 1) == ["chunks of X that are older than 1 min 0 s would be removed"]


def test_a_salt_whose_quota_ends_counts_for_its_tenant_again() -> None:
    salted = TenantStatus("blue", 2 << 20, 1, 0, 0, 1.0, 0, 0, 0, salt="ab")
    whole = TenantStatus("blue", 3 << 20, 1, 0, 4 << 20, 1.0, 0, 0, 0)
    assert quota._losses_of_tenant(a_status(tenants=[salted, whole]), salted) == [
        "memory: blue has 5 MiB, and 1 MiB would be evicted"
    ]
    assert quota._losses_of_tenant(a_status(tenants=[salted]), salted) == []
