"""An engine that sleeps, by the calls that vLLM 0.33 makes: its KV's memory is released and comes back as other memory.

A worker's half with real tensors and a real server; vLLM's own sleep mode needs a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.integrations.vllm import worker as module
from kvdepot.integrations.vllm.connector import KVDepotConnector
from kvdepot.integrations.vllm.messages import Orders
from kvdepot.integrations.vllm.process import EngineProcess
from kvdepot.integrations.vllm.settings import read_settings
from kvdepot.integrations.vllm.worker import WorkerHalf
from tests.conftest import HANG_S, Depot, StartDepot, eventually, suspend

BLOCKS, TOKENS = 8, 128
LAYERS = ("layer.0", "layer.1")


class Worker:
    """A worker's half on two layers of its own."""

    def __init__(self, url: str, model: Path) -> None:
        told = KVTransferConfig(
            kv_connector="KVDepotConnector", kv_role="kv_both", kv_connector_extra_config={"kvdepot.url": url}
        )
        config = EngineArgs(model=str(model), skip_tokenizer_init=True, kv_transfer_config=told).create_engine_config()
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        made = self.connector = object.__new__(KVDepotConnector)  # its constructor wants vLLM's process groups
        made._vllm_config, made._kv_transfer_config, made._kv_cache_config = config, told, caches
        made._role, made._settings = KVConnectorRole.WORKER, read_settings(told.kv_connector_extra_config)
        made._process = EngineProcess(config, caches, made._settings, rank=0)
        made._kv_caches, made._is_asleep = {}, False
        made._half = WorkerHalf(config, 0, made._process.fails_whole)
        made._link = made._link_worker()
        self.kv = {name: torch.randint(-99, 99, (BLOCKS, 2, TOKENS, 64)).to(torch.bfloat16) for name in LAYERS}
        made.register_kv_caches(self.kv)
        half = made._worker
        self.half, self.depot = half, half._depot

    def sleep(self) -> None:
        """As vLLM does: the connector first, then the memory; tensors and their addresses stay, as far as it knows."""
        self.connector.unregister_kv_caches()
        for tensor in self.kv.values():
            tensor.set_(torch.zeros_like(tensor))

    def transfer(self, name: str, blocks: list[int], loads: bool = False) -> None:
        """Order the store or load of one chunk of this name, from or into these blocks."""
        chunk = Transfer(name, bytes(32), 0, name.encode().ljust(32, b"."), pack_block_ids(blocks))
        orders = Orders(loads={name: [chunk]} if loads else {}, stores=[] if loads else [chunk])
        self.half.start_loads(orders)
        self.half.store(orders)

    def ended(self) -> tuple[set[int], int]:
        """Once nothing is under way: blocks that failed to load, and stores that were dropped."""

        def is_idle() -> bool:
            self.half.get_finished(Orders(ended=set(self.depot.store_futures)))
            return not self.depot.store_futures and not self.depot.retrieve_futures

        eventually(is_idle)
        return self.half.get_block_ids_with_load_errors(), self.depot.counters["stores_dropped"]

    def close(self) -> None:
        self.connector.shutdown()


@pytest.fixture
def server(start_depot: StartDepot) -> Depot:
    return start_depot(arena_mib=64)


@pytest.fixture
def worker(server: Depot, models: dict[str, Path]) -> Iterator[Worker]:
    made = Worker(server.url, models["gqa"])
    yield made
    made.close()


def registered(server: Depot) -> int:
    """Workers' registrations that the server knows."""
    return int(server.status()["instances"])


def test_no_copy_touches_a_sleeping_engine_and_loads_fill_what_it_wakes_with(
    server: Depot, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    before = {name: tensor.clone() for name, tensor in worker.kv.items()}
    worker.transfer("kept", [1, 2])
    assert worker.ended() == (set(), 0)
    assert registered(server) == 1
    worker.sleep()
    assert registered(server) == 0
    worker.connector.unregister_kv_caches()  # vLLM may say it twice: a discard, then a sleep
    worker.connector.restore_kv_caches()
    worker.connector.restore_kv_caches()
    assert registered(server) == 1
    worker.transfer("kept", [5, 3], loads=True)
    assert worker.ended() == (set(), 0)
    for name, tensor in worker.kv.items():
        assert torch.equal(tensor[5], before[name][1]) and torch.equal(tensor[3], before[name][2])
        assert not tensor[[0, 1, 2, 4, 6, 7]].any(), "other blocks were written"
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_copies_under_way_when_an_engine_falls_asleep_never_count_as_done(
    server: Depot, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SLEEP_S", 0.2)
    worker.transfer("kept", [1, 2])
    worker.ended()
    suspend(server.process.pid)
    worker.transfer("kept", [3, 4], loads=True)
    worker.transfer("late", [5, 6])
    worker.sleep()
    assert "the server has not heard that this engine sleeps" in caplog.text
    server.process.send_signal(18)  # SIGCONT
    eventually(lambda: registered(server) == 0)
    worker.transfer("asleep", [1, 2])
    worker.transfer("kept", [5, 7], loads=True)
    failed, _ = worker.ended()
    assert failed == {3, 4, 5, 7}
    assert not any(tensor.any() for tensor in worker.kv.values()), "the memory that it wakes with"
    worker.connector.restore_kv_caches()
    for name in ("late", "asleep"):
        worker.transfer(name, [6, 7], loads=True)
        assert worker.ended()[0] == {6, 7}, "nothing is stored while there is no memory"


@pytest.mark.parametrize("is_back", ["before it wakes", "after it woke"])
def test_a_restarted_server_knows_a_sleeping_engine_only_once_it_is_awake(
    is_back: str, server: Depot, start_depot: StartDepot, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.sleep()
    server.process.kill()
    server.process.wait(HANG_S)
    if is_back == "before it wakes":
        server = start_depot(url=server.url, arena_mib=64)
        eventually(lambda: worker.depot.client.pump() or worker.depot.client.is_welcomed)
        assert registered(server) == 0
        worker.connector.restore_kv_caches()
    else:
        worker.connector.restore_kv_caches()
        assert "woke up without a server" in caplog.text
        server = start_depot(url=server.url, arena_mib=64)
    eventually(lambda: worker.depot.client.pump() or registered(server) == 1)
    worker.transfer("new", [1, 2])
    worker.ended()
    worker.transfer("new", [3, 4], loads=True)
    assert worker.ended() == (set(), 0)


def test_an_engine_whose_copies_are_wrong_once_it_wakes_stores_and_loads_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.transfer("kept", [1, 2])
    worker.ended()
    worker.sleep()
    move = HostBlocks.move

    def move_wrongly(blocks: HostBlocks, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        move(blocks, arena, pieces, is_store)
        arena.bytes[pieces[0].extents[0][0]] ^= is_store

    monkeypatch.setattr(HostBlocks, "move", move_wrongly)
    worker.connector.restore_kv_caches()
    assert "woke up, but" in caplog.text and "the self-test of copies failed" in caplog.text
    worker.transfer("kept", [3, 4], loads=True)
    assert worker.ended() == ({3, 4}, 0)
    assert "self-test" in worker.half.take_report(Orders()).fault, "so the scheduler looks nothing up any more"
