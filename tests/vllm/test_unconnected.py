"""What scheduler and workers do before they have a server, each by itself, and how a half takes over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.integrations.vllm import connector
from kvdepot.integrations.vllm.link import ServerLink
from kvdepot.integrations.vllm.messages import Orders
from kvdepot.integrations.vllm.settings import ServerPlace, read_settings
from kvdepot.integrations.vllm.worker import WorkerHalf
from kvdepot.keys import derive_root
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.vllm.conftest import StartSteps
from tests.vllm.engines import write_lora
from tests.vllm.test_requests import request


def orders(holds: bool = False) -> Any:
    """The orders of a connected scheduler: loads of two requests, a store, and the end of a third."""

    def transfer(name: str, blocks: list[int], skip: int = 0) -> Transfer:
        return Transfer(name, derive_root(), 0, bytes(64), pack_block_ids(blocks), skip)

    loads = {"a": [transfer("a", [1, 2, 3, 4], skip=1)], "b": [transfer("b", [5, 6, 7, 8])]}
    stores = [transfer("c", [9, 10, 11, 12])]
    return Orders("m", loads, stores, ended={"c"}, holds=holds, step=7)


@pytest.mark.parametrize("fails_whole", [False, True])
def test_a_worker_without_a_server_fails_loads_and_ends_stores_at_once(fails_whole: bool) -> None:
    quiet: Any = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
    worker = WorkerHalf(quiet, 1, fails_whole)

    def step(told: Any) -> tuple[Any, ...]:
        worker.give_up_preempted(told)
        worker.start_loads(told)
        worker.store(told)
        stored, loaded = worker.get_finished(told)
        return stored, loaded, worker.take_failed_requests(), worker.get_block_ids_with_load_errors()

    blocks = set() if fails_whole else {2, 3, 4, 5, 6, 7, 8}  # not what the load was to leave as it is
    requests = {"a", "b"} if fails_whole else set()
    assert step(orders()) == ({"c"}, {"a", "b"}, requests, blocks)
    assert worker.take_report(orders()).ended == {}
    assert worker.take_report(orders(holds=True)).ended == {7: {1}}
    assert worker.take_report(orders()).step == 7
    assert step(Orders()) == (None, None, set(), set())
    assert worker.stats.take() is None


def test_a_scheduler_takes_requests_up_when_its_server_comes_and_ends_none_twice(
    start_depot: StartDepot, start_steps: StartSteps, tmp_path: Path
) -> None:
    url = f"ipc://{tmp_path}/late.sock"
    steps = start_steps(url)
    connector = steps.connector
    one = request(list(range(512)))
    connector.on_new_request(one)
    assert connector.get_num_new_matched_tokens(one, 0) == (0, False)
    before = steps.build(512)
    assert (before.loads, before.stores, before.step) == ({}, [], 0)
    assert before.model == connector._process.model  # or a connected worker would say that the two differ
    start_depot(url=url)
    assert connector._link._settled.wait(HANG_S)
    after = steps.build()  # now the connected half
    assert after.step == 1
    steps.back(before), steps.back(after)
    assert connector.request_finished(one, [1, 2, 3, 4]) == (False, None)  # it began before: nothing is awaited
    two = request(list(range(512)))
    connector.on_new_request(two)
    eventually(lambda: connector.get_num_new_matched_tokens(two, 0) == (0, False))
    stored = steps.build(512)
    steps.back(stored)
    assert [store.request_id for store in steps.build().stores] == ["r"]
    assert connector.request_finished(two, [1, 2, 3, 4]) == (True, None)


def test_a_reset_without_a_server_counts_when_one_comes(
    start_depot: StartDepot, start_steps: StartSteps, tmp_path: Path
) -> None:
    url = f"ipc://{tmp_path}/late.sock"
    connector = start_steps(url).connector
    assert connector.reset_cache() is True  # vLLM stays paused where it is not, and nothing was stored yet
    start_depot(url=url)
    assert connector._link._settled.wait(HANG_S)
    one = request(list(range(512)))
    connector.on_new_request(one)
    assert connector._scheduler._tracked["r"].prompt.chain.root != derive_root()


def test_an_adapter_that_was_swapped_before_the_server_came_is_not_cached(
    start_depot: StartDepot, start_steps: StartSteps, tmp_path: Path
) -> None:
    adapter = write_lora(tmp_path / "adapter", 1)
    connector = start_steps(f"ipc://{tmp_path}/late.sock").connector
    lora = LoRARequest("red", 1, str(adapter))
    connector.on_new_request(request(list(range(512)), lora_request=lora))  # workers load it
    adapter.rename(tmp_path / "old"), write_lora(adapter, 2)
    start_depot(url=f"ipc://{tmp_path}/late.sock")
    assert connector._link._settled.wait(HANG_S)
    connector.on_new_request(request(list(range(512)), lora_request=lora))
    assert not connector._scheduler._tracked


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ({"kvdepot.url": "nowhere"}, "kvdepot.url: 'nowhere' is not an endpoint"),
        ({"kvdepot.start": "always"}, "kvdepot.start is 'always', not one of auto, never"),
        ({"kvdepot.required": "yes"}, "kvdepot.required is 'yes', not of type bool"),
        ({"kvdepot.boundary_chunks": True}, "kvdepot.boundary_chunks is True, not of type int"),
        ({"save_decode": True}, "save_decode is not a kvdepot setting; did you mean kvdepot.save_decode?"),
        ({"KVDepot.save-decode": True}, "did you mean kvdepot.save_decode?"),
        ({"kvdepot": {"save_decode": True}}, 'write each setting with its prefix, such as "kvdepot.save_decode": "on"'),
        ({"kvdepot.arena_gib": 5}, "not a kvdepot setting; it is the server's: set it in KVDEPOT_ARENA_GIB, where the"),
        ({"kvdepot.tenants": {}}, "it is the server's: set it in its settings file"),
        ({"kvdepot.load_failure_policy": "die"}, "kvdepot.load_failure_policy is 'die', not one of recompute, fail"),
        ({"weather": 1}, "weather is not a kvdepot setting; valid settings: kvdepot.url, "),
    ],
)
def test_settings_that_make_no_sense_are_refused(extra: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"lmcache.mp.host": "left from another connector", **extra})
    assert fault in str(caught.value)


def test_settings_without_effect_and_a_replaced_policy_are_each_told_once(
    vllm_depot: Depot, start_steps: StartSteps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector.log, "handlers", [caplog.handler])
    monkeypatch.setattr(connector.log, "propagate", False)
    caplog.set_level("INFO", connector.log.name)
    left = {"lmcache.mp.host": "h", "lmcache.mp.port": 5555}
    config = start_steps(vllm_depot.url, **left).connector._kv_transfer_config
    told = [text for text in caplog.messages if "lmcache" in text or "kv_load_failure_policy" in text]
    assert len(told) == 2 and "kv_load_failure_policy is recompute" in told[0]
    assert "KVDepotConnector ignores lmcache.mp.host, lmcache.mp.port: " in told[1] and "remove them" in told[1]
    assert config.kv_load_failure_policy == "recompute"
    caplog.clear()
    kept = start_steps(vllm_depot.url, **{"kvdepot.load_failure_policy": "fail"}).connector._kv_transfer_config
    assert kept.kv_load_failure_policy == "fail"
    assert not [text for text in caplog.messages if "kv_load_failure_policy" in text]


@pytest.mark.parametrize("required", [False, True])
def test_an_address_that_cannot_be_connected_to_is_a_server_that_is_away(required: bool, tmp_path: Path) -> None:
    def make(client: Any) -> Any:
        raise AssertionError("there is no server")

    half: Any = SimpleNamespace(connect=make, shutdown=make)
    link: Any = ServerLink(ServerPlace(f"ipc://{tmp_path}/{'x' * 108}", required=required), half)
    try:
        if required:
            with pytest.raises(Unavailable, match="at most 107 bytes"):
                link.begin(make)
        else:
            link.begin(make)
    finally:
        link.close()
