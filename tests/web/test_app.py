"""The HTTP API, compared with the server's own status and with what the test did."""

from __future__ import annotations

import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdepot import errors
from kvdepot.client import MessageQueueClient
from kvdepot.config import default_url
from kvdepot.keys import ChunkChain
from kvdepot.protocol import wire
from kvdepot.protocol.counters import SERVER, TIER
from kvdepot.protocol.keys import salt_tag
from kvdepot.web.app import engine_flag
from tests.client.engine import CHUNK, PER_CHUNK, Engine
from tests.conftest import HANG_S, eventually
from tests.web.conftest import StartWeb, Web, samples

pytestmark = pytest.mark.faults  # a server and a web process each

READ = (
    "/healthz", "/readyz", "/v1/status", "/v1/history", "/v1/leases", "/metrics",
)  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_every_path_answers_and_says_that_nobody_may_keep_or_embed_it(web: Web, path: str) -> None:
    answer = web.get(path)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers
    if path != "/metrics":
        assert answer.headers["content-type"].startswith("application/json")
        json.loads(answer.body)


def test_prometheus_own_format_says_the_same_numbers(web: Web) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    answer = web.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {
        sample.name for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples
    }
    assert names == {name for name, _ in samples(web.get("/metrics"))}


def test_metrics_are_the_numbers_of_the_status(start_web: StartWeb, tmp_path: Path) -> None:
    web = start_web("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1")
    engine = Engine(web.depot)
    try:
        engine.store(list(range(CHUNK)), list(range(PER_CHUNK)))
        assert engine.lookup(list(range(CHUNK))) == CHUNK
    finally:
        engine.close()

    def steady() -> tuple[dict[str, Any], dict[Any, float]] | None:
        """Status and metrics of the same moment."""
        before = web.get("/v1/status").body
        found = samples(web.get("/metrics"))
        return (json.loads(before), found) if web.get("/v1/status").body == before else None

    web.status()
    said, told = eventually(steady)
    plain = {name: value for (name, labels), value in told.items() if not labels}
    assert plain["kvdepot_up"] == 1 and 0 < plain["kvdepot_loop_lag_seconds"] < HANG_S
    stat = Path(f"/proc/{web.depot.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.M)
    assert booted is not None
    began = int(booted[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    assert plain["process_start_time_seconds"] == pytest.approx(began, abs=0.02), "the server's, not the page's"
    assert plain["kvdepot_memory_used_bytes"] == said["used_bytes"] > 0
    assert plain["kvdepot_stored_bytes_total"] == said["stored_bytes"] > 0
    for name, count in said["tokens"].items():
        assert plain[f"kvdepot_{name}_tokens_total"] == count, name
    series = {counted.name: counted.series for counted in SERVER}
    for name, count in said["counters"].items():
        if name.endswith("_refused"):
            assert told["kvdepot_refused_total", (("what", name.removesuffix("_refused")),)] == count
        else:
            assert plain[f"kvdepot_{series[name]}_total"] == count, name
    for tier in said["tiers"]:
        label = (("tier", tier["name"]),)
        assert told["kvdepot_tier_up", label] == 1
        for field in ("objects", "bytes", "capacity_bytes", "free_bytes", "queued_bytes", "saves", "loads"):
            if tier[field] is not None:
                assert told[f"kvdepot_tier_{field}", label] == tier[field], field
        series = {counted.name: counted.series for counted in TIER}
        for name, count in tier["counters"].items():
            assert told[f"kvdepot_tier_{series[name]}_total", label] == count, name
    for kind in said["latencies"]:
        label = (("request", kind["request"]),)
        assert told["kvdepot_request_duration_seconds_count", label] == kind["count"] == sum(kind["buckets"])
        assert told["kvdepot_request_duration_seconds_sum", label] == pytest.approx(kind["sum_s"])
        assert told["kvdepot_request_errors_total", label] == kind["errors"]


def test_warm_and_forget_do_what_they_say(start_web: StartWeb, tmp_path: Path) -> None:
    web = start_web("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1")
    engine = Engine(web.depot)
    tokens = list(range(3 * CHUNK))
    client = MessageQueueClient(web.depot.url, web.depot.context)
    try:
        engine.store(tokens, list(range(3 * PER_CHUNK)))
        eventually(lambda: web.depot.status()["tiers"][0]["counters"].get("saved_chunks", 0) == 3)
        client.ask(wire.Clear()).result(HANG_S)
        assert web.depot.status()["chunks"] == 0
        assert web.change("/v1/warm", {"tokens": tokens, "model": engine.model[:9]}).value == {
            "chunks": 3, "of_chunks": 3,
        }  # fmt: skip
        assert web.depot.status()["chunks"] == 3
        tier = f"disk://{tmp_path}/kv"
        seen = web.change("/v1/forget/preview", {"model": engine.model}).value
        assert seen["memory"]["chunks"] == 3 and seen["memory"]["bytes"] > 0
        assert seen["tiers"].keys() == {tier}
        assert web.depot.status()["chunks"] == 3
        other = web.change("/v1/forget", {"model": "some-other-model"})
        assert (other.status, other.value["code"]) == (502, "tier")
        assert f"removed: memory: 0 chunks; disk://{tmp_path}/kv: 0 chunks" in other.value["message"]
        mere = web.change("/v1/forget", {"model": engine.model[:9]})  # which may begin others that lie in the tier
        assert (mere.status, mere.value["code"]) == (502, "tier")
        assert f"removed: memory: 3 chunks; disk://{tmp_path}/kv: 3 chunks" in mere.value["message"]
        gone = web.change("/v1/forget", {"model": engine.model})
        assert (gone.status, gone.value) == (200, {"memory": 0, f"disk://{tmp_path}/kv": 0})
        assert engine.lookup(tokens) == 0
    finally:
        client.close()
        engine.close()


def test_a_lease_is_begun_listed_and_released_with_its_chunks(start_web: StartWeb) -> None:
    web = start_web()
    engine = Engine(web.depot)
    tokens = list(range(3 * CHUNK))
    chain = ChunkChain(CHUNK)
    chain.extend(tokens)
    hashes = [chain.slice(i, i + 1).hex() for i in range(2)]
    try:
        engine.store(tokens, list(range(3 * PER_CHUNK)))
        assert web.change("/v1/lease", {"hashes": hashes, "name": "system"}).value == {"chunks": 2, "of_chunks": 2}
        assert web.change("/v1/release", {"name": "system", "drops": False}).value["name"] == "system"
        status = web.depot.status()
        assert (status["lease_count"], status["chunks"]) == (0, 3), "its chunks stay"
        begun = web.change("/v1/lease", {"tokens": tokens, "name": "agent", "ttl_s": 600, "priority": 70})
        assert begun.value == {"chunks": 3, "of_chunks": 3}
        (lease,) = web.get("/v1/leases").value
        assert (lease["name"], lease["kind"], lease["chunks"], lease["priority"]) == ("agent", "retain", 3, 70)
        assert web.change("/v1/release", {"tokens": tokens}).value == {"name": "", "removed_chunks": 0}
        assert web.change("/v1/release", {"name": "agent"}).value == {"name": "agent", "removed_chunks": None}
        eventually(lambda: web.depot.status()["chunks"] == 0)
        again = web.change("/v1/release", {"name": "agent"})
        assert (again.status, again.value["code"]) == (400, "bad_request")
        assert "there is no lease 'agent'" in again.value["message"]
        engine.store(tokens, list(range(3 * PER_CHUNK)))
        kept = web.change("/v1/release", {"tokens": tokens, "model": engine.model, "keep": 1})
        assert kept.value == {"name": "", "removed_chunks": 2}
        assert web.depot.status()["chunks"] == 1
    finally:
        engine.close()


def test_a_quota_of_a_tenant_that_no_key_has_is_refused_with_the_servers_reason(web: Web) -> None:
    refused = web.change("/v1/quota", {"tenant": "blue", "quota": {"cap_bytes": 4096}})
    assert (refused.status, refused.value["code"]) == (400, "bad_request")
    assert "'blue'" in refused.value["message"]
    ended = web.change("/v1/quota", {"tenant": "blue"})
    assert (ended.status, ended.value) == (200, {"tenant": "blue", "salt": "", "quota": None})


def test_a_quota_of_a_salt_is_answered_and_shown_with_its_tag(web: Web) -> None:
    try:
        answer = web.change("/v1/quota", {"salt": "alice", "quota": {"cap_bytes": 4096}})
        tag = salt_tag("alice").hex()[:16]
        assert answer.status == 200 and (answer.value["tenant"], answer.value["salt"]) == ("", tag)
        assert [each["salt"] for each in web.depot.status()["tenants"]] == ["", tag]
    finally:
        assert web.change("/v1/quota", {"salt": "alice"}).status == 200
    assert web.depot.status()["tenants"] == []


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/quota", {"tenant": ""}, "give `tenant`, `salt` or both"),
        ("/v1/quota", {"tenant": "blue", "quota": {"floor_bytes": -1}}, "floor_bytes"),
        ("/v1/quota", {"tenant": "blue", "quota": {"floor": 1}}, "quota: object contains unknown field `floor`"),
        ("/v1/lease", {"tokens": [1], "name": "a", "kind": "keep"}, "the body: kind: invalid enum value 'keep'"),
        ("/v1/forget", {}, "nothing to forget"),
        ("/v1/forget", {"modle": "x", "all": True}, "the body: object contains unknown field `modle`"),
        ("/v1/forget", {"all": "yes"}, "the body: all: expected `bool`, got `str`"),
        ("/v1/forget", b"{", "the body: not JSON (Input data was truncated)"),
        ("/v1/warm", {}, "give either `tokens` or `hashes`"),
        ("/v1/lease", {"hashes": ["ab" * 32], "name": "a"}, "no engine has registered yet"),
        ("/v1/warm", {"tokens": [-1]}, "tokens[0]: expected `int` >= 0"),
        ("/v1/warm", {"hashes": ["xyz"]}, "hashes[0]: expected `str` matching regex"),
        ("/v1/lease", {"tokens": [1], "name": ""}, "name"),
        ("/v1/lease", {"tokens": [1], "name": "a", "kind": "expire"}, "ttl_s"),
        ("/v1/release", {}, "either the `name`"),
        ("/v1/release", {"name": "a", "keep": 1}, "are for a prompt"),
        ("/v1/release", {"tokens": [1], "drops": False}, "`drops` is for a lease"),
        ("/v1/release", [1], "expected `object`, got `array`"),
    ],
)
def test_a_wrong_body_is_refused_with_what_is_wrong(web: Web, path: str, body: Any, said: str) -> None:
    answer = web.change(path, body)
    assert answer.status == 400, answer.body
    assert answer.value.keys() == {"code", "message"}
    assert answer.value["code"] in ("bad_request", "config")
    assert said in answer.value["message"]


def test_what_is_not_there_and_what_cannot_be_done_is_said_like_any_error(web: Web) -> None:
    for path in ("/v1/nothing", "/../../etc/passwd", "/%2e%2e/config.py", "/page/index.html/x", "/v1/status/x"):
        answer = web.get(path)
        assert (answer.status, answer.value["code"]) == (404, "not_found"), path
    wrong = web.change("/v1/status", {})
    assert (wrong.status, wrong.value["code"]) == (405, "method")
    assert "GET" in wrong.headers["allow"]
    assert web.get("/v1/forget").status == 405


def test_every_error_there_is_has_an_http_status() -> None:
    from kvdepot.web.dispatch import HTTP_STATUS

    def leaves(root: type[errors.KVDepotError]) -> list[type[errors.KVDepotError]]:
        return [root, *(leaf for child in root.__subclasses__() for leaf in leaves(child))]

    assert HTTP_STATUS.keys() == {leaf.code for leaf in leaves(errors.KVDepotError)}
    assert all(400 <= status <= 599 for status in HTTP_STATUS.values())


CHANGES = ["/v1/warm", "/v1/lease", "/v1/release", "/v1/forget", "/v1/forget/preview", "/v1/quota"]
FIELDS = ["tokens", "hashes", "model", "salt", "name", "ttl_s", "kind", "drops", "keep", "all", "tenant", "quota"]
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False)
BODIES = st.dictionaries(
    st.sampled_from(FIELDS), VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.text(max_size=4), VALUES)
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(CHANGES), body=BODIES)
def test_any_body_is_answered_without_a_fault_of_the_server(web: Web, path: str, body: dict[str, Any]) -> None:
    answer = web.change(path, body)
    assert answer.status in (200, 400), answer.body


def test_the_flag_for_engines_names_this_server_unless_it_is_the_default_one(web: Web) -> None:
    option, given = shlex.split(web.latest()["engine_flag"])
    assert option == "--kv-transfer-config"
    connector = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    assert json.loads(given) == {**connector, "kv_connector_extra_config": {"kvdepot.url": web.depot.url}}
    assert json.loads(shlex.split(engine_flag(default_url()))[1]) == connector


def test_every_file_of_the_page_is_served_with_its_type_and_all_it_names_is_there(web: Web) -> None:
    folder = resources.files("kvdepot.web") / "page"
    if not (folder / "index.html").is_file():
        pytest.skip("the page is not in this checkout")
    root = web.get("/")
    assert root.status == 200
    assert root.headers["content-type"] == "text/html; charset=utf-8"
    assert root.body == (folder / "index.html").read_bytes() == web.get("/index.html").body
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', root.body.decode())
    assert named
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    for name in named:
        answer = web.get(f"/{name}")
        assert answer.status == 200, name
        if (kind := name.rpartition(".")[2]) in types:
            assert answer.headers["content-type"] == types[kind]
