"""`kvdepot quota`: what it says a change would evict, and that it asks before it evicts."""

from __future__ import annotations

import pytest

from kvdepot.cli.quota import _losses
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota, shown_tag
from tests.cli.command import run
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot

MIB = 1 << 20
EVICTED = "what X has above 1 MiB would be evicted"


@pytest.mark.faults
def test_a_cap_that_may_evict_is_set_only_after_asking(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=32)
    engine = Engine(depot, block_bytes=MIB)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    name = f"salt {shown_tag(salt_tag('ten'))} of clients without a tenant"
    low = ("quota", "--salt", "ten", "--cap", "1MiB", "--url", depot.url)
    tried = run(*low, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    lost = f"memory: what {name} has above 1 MiB would be evicted"
    assert tried.stdout.splitlines() == [lost, "nothing was changed: this was a dry run"]
    unasked = run(*low)
    assert unasked.returncode == 2 and lost in unasked.stderr and "--yes" in unasked.stderr
    assert depot.status()["tenants"] == []
    assert run(*low, "--yes").returncode == 0
    assert "1 MiB" in run("quota", "--url", depot.url).stdout
    remove = ("quota", "--salt", "ten", "--remove", "--url", depot.url)
    assert "nothing would be evicted" in run(*remove, "--dry-run").stdout
    done = run(*remove)
    assert (done.returncode, done.stdout) == (0, f"{name} has no quota\n"), done.stderr
    engine.close()


@pytest.mark.parametrize(
    ("now", "new", "losses"),
    [
        (Quota(), Quota(cap_bytes=MIB), [f"memory: {EVICTED}"]),
        (Quota(cap_bytes=MIB), Quota(cap_bytes=2 * MIB), []),
        (Quota(disk_cap_bytes=2 * MIB), Quota(disk_cap_bytes=MIB), [f"each tier disk://: {EVICTED}"]),
        (Quota(ttl_s=90), Quota(ttl_s=60), ["chunks of X that are older than 1 min 0 s would be removed"]),
        (Quota(ttl_s=60), Quota(ttl_s=90), []),
    ],
)
def test_only_a_lower_limit_removes_chunks(now: Quota, new: Quota, losses: list[str]) -> None:
    assert _losses("X", now, new) == losses


@pytest.mark.faults
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--cap", "5"], "'5' has no unit: write 5GiB or 5MiB, say"),
        (["--disk-floor", "1e9"], "'1e9' is not a size"),
        (["--cap", "1MiB", "--weight", "0"], "weight: 0 is out of range"),
        (["--cap", "1MiB", "--floor", "2MiB"], "cap_bytes: 1048576 is below floor_bytes, 2097152"),
        (["--cap", "99999999TiB"], "cap_bytes: 1.09951161678e+20 is out of range"),
        (["--cap", "9GiB", "--floor", "8GiB"], "all floors together are 8589934592 bytes, more than the arena's"),
        (["--cap", "1MiB", "--ttl-s", "9999999999"], "ttl_s: 9999999999 is out of range"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_impossible_quota_is_refused_before_any_question(depot: Depot, words: list[str], fault: str) -> None:
    tried = run("quota", "--salt", "ten", *words, "--url", depot.url)
    assert tried.returncode in (1, 2)
    assert fault in tried.stderr and "--yes" not in tried.stderr
