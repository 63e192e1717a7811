"""Administration by a client: an engine's cache is reset, prompts are dropped, leases are listed."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from contextlib import closing
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient, admin
from kvdepot.client.calls import answer
from kvdepot.client.copies import Arenas, carry
from kvdepot.errors import ConfigError
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.protocol import wire
from kvdepot.protocol.layout import BlockFormat
from tests.conftest import HANG_S, Depot, StartDepot, eventually

pytestmark = pytest.mark.faults

BLOCK_BYTES = 512
CHUNKS = 5


def fill(client: MessageQueueClient, model: str, instance: int, chunk_tokens: int = 0) -> bytes:
    """Store a prompt of whatever bytes; return its keys."""
    formed = BlockFormat(bytes(32), BLOCK_BYTES)
    assert client.ask(wire.Register(instance, formed, model, 1, 0, 1, chunk_tokens)).result(HANG_S) is None
    hashes = secrets.token_bytes(HASH_BYTES * CHUNKS)
    part = wire.Shards("r", model, 1, 0, ROOT, 0, hashes, 1)
    placed = client.ask(wire.Store(instance, [part])).result(HANG_S)
    assert isinstance(placed, wire.Placement)
    view = Arenas(client.arena_dir).of(placed.arena, placed.boot)
    assert client.ask(carry(view, placed, BLOCK_BYTES, lambda view: None)).result(HANG_S) is True
    return hashes


def found(client: MessageQueueClient, model: str, hashes: bytes) -> int:
    return answer(client, wire.Lookup(model, 1, 1, model, 1, hashes, True), wire.Hit, HANG_S).chunks


def objects(depot: Depot) -> int:
    return int(depot.status()["tiers"][0]["counters"].get("saved_chunks", 0))


def test_prompts_have_the_chunk_size_of_running_engines(start_depot: StartDepot, tmp_path: Path) -> None:
    depot, file = start_depot(), tmp_path / "tokens"
    file.write_text(" ".join(map(str, range(256))))
    with closing(MessageQueueClient(depot.url, depot.context)) as client:
        for chunk_tokens in (256, 64):
            fill(client, "m", chunk_tokens, chunk_tokens)
        with pytest.raises(ConfigError, match="registered in 2 shapes"):
            admin.read_prompt(client, str(file), None, "m", "")
        client.ask(wire.Unregister(256)).result(HANG_S)
        assert admin.read_prompt(client, str(file), None, "m", "").spec.chunk_tokens == 64


def test_to_reset_forgets_the_model_in_memory_and_tiers_and_no_other(
    start_depot: StartDepot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    depot = start_depot("--tiers", f"disk://{tmp_path}/tier?capacity_gib=1")
    with closing(MessageQueueClient(depot.url, depot.context)) as client:
        gone, kept = fill(client, "model@1", 1), fill(client, "model@2", 2)
        eventually(lambda: objects(depot) == 2 * CHUNKS)
        assert admin.reset(client, "model@1") is True
        # Neither memory nor, where a lookup looks next, the tier has it.
        assert (found(client, "model@1", gone), found(client, "model@2", kept)) == (0, CHUNKS)
        assert admin.reset(client, "model@1") is True, "nothing was there to be forgotten"
        assert not caplog.records


def test_to_reset_says_where_a_tier_cannot_be_told(start_depot: StartDepot, caplog: pytest.LogCaptureFixture) -> None:
    depot = start_depot("--tiers", "redis://127.0.0.1:1")
    with closing(MessageQueueClient(depot.url, depot.context)) as client:
        hashes = fill(client, "model@1", 1)
        assert admin.reset(client, "model@1") is False
        (line,) = caplog.messages
        assert line.startswith("chunks of model@1 may remain stored: redis://127.0.0.1:1: not forgotten:")
        assert depot.status()["chunks"] == 0 and found(client, "model@1", hashes) == 0


@pytest.mark.parametrize("how", ["killed", "gone before"])
def test_to_reset_without_a_server_says_that_something_may_be_left(
    start_depot: StartDepot, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    depot = start_depot()
    caplog.set_level(logging.WARNING, "kvdepot.client.admin")
    with closing(MessageQueueClient(depot.url, depot.context)) as client:
        fill(client, "model@1", 1)
        depot.process.send_signal(signal.SIGKILL)
        if how == "gone before":
            depot.process.wait(HANG_S)
        assert admin.reset(client, "model@1") is False
        assert "chunks of model@1 may remain stored: kvdepot:" in caplog.text


def test_a_drop_removes_a_prompts_end_from_memory_and_tiers_and_no_other(
    start_depot: StartDepot, tmp_path: Path
) -> None:
    depot = start_depot("--tiers", f"disk://{tmp_path}/tier?capacity_gib=1")
    with closing(MessageQueueClient(depot.url, depot.context)) as client:
        gone, kept = fill(client, "model@1", 1), fill(client, "model@2", 2)
        eventually(lambda: objects(depot) == 2 * CHUNKS)
        prompt = admin.make_prompt(client, [], gone, "model@1", "")
        keys = [gone[start : start + HASH_BYTES].hex() for start in range(0, len(gone), HASH_BYTES)]

        def on_disk() -> list[str]:
            # os.walk goes on where the tier removes a directory meanwhile; Path.rglob raises.
            names = [name for _, _, files in os.walk(tmp_path / "tier") for name in files]
            return [key for key in keys if any(name.startswith(key) for name in names)]

        assert admin.drop(client, prompt, keep=2) == CHUNKS - 2
        eventually(lambda: on_disk() == keys[:2])  # tiers follow after the answer
        assert (found(client, "model@1", gone), found(client, "model@2", kept)) == (2, CHUNKS)
        client.ask(wire.EndSession("model@1")).result(HANG_S)
        assert admin.drop(client, prompt) == 2
        eventually(lambda: not on_disk())
        assert found(client, "model@1", gone) == 0
        assert admin.drop(client, prompt) == 0, "nothing was there to be dropped"
