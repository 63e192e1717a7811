"""LoRA adapters and cache salts: which KV is shared, on vLLM's own request objects."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from kvdepot.integrations.vllm.lora import Adapters, Roots
from kvdepot.integrations.vllm.weights import NamedWeights
from kvdepot.integrations.weight_files import read_state
from tests.conftest import eventually
from tests.vllm.test_requests import request


def write(folder: Path, contents: str = "one") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(contents)
    return folder


def lora(path: Path | str, number: int = 1, name: str = "red") -> Any:
    return LoRARequest(name, number, str(path))


def started(later_s: float = 60.0) -> Any:
    """The adapters of an engine that starts after the last change on disk."""
    return Adapters(time.time() + later_s)


def test_files_that_were_there_before_the_engine_name_its_adapter_for_every_engine(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    one, two = started(), started()
    assert one.parts(lora(folder)) == two.parts(lora(folder)) == one.parts(lora(folder))
    assert one.is_unchanged(lora(folder))
    assert one.parts(lora(folder, 2, "blue")) == one.parts(lora(folder)), "a name is for people"
    (folder / "README.md").write_text("no weights")
    assert one.is_unchanged(lora(folder))
    assert one.parts(lora(shutil.copytree(folder, tmp_path / "copy"), 3)) == one.parts(lora(folder))
    write(folder, "another")
    assert started().parts(lora(folder)) != two.parts(lora(folder))


def test_files_replaced_under_an_engine_are_not_cached_even_when_they_come_back(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    adapters = started()
    assert adapters.parts(lora(folder))
    times = (folder / "adapter_model.safetensors").stat()
    folder.rename(tmp_path / "old")
    write(folder, "two")  # as long, and as old as it says
    os.utime(folder / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not adapters.is_unchanged(lora(folder))
    folder.rename(tmp_path / "new")
    (tmp_path / "old").rename(folder)
    assert adapters.parts(lora(folder)) is None


def test_files_that_are_newer_than_the_engine_are_shared_with_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    one, two = started(-60), started(-60)
    parts = one.parts(lora(folder))
    assert parts and parts == one.parts(lora(folder)) and one.is_unchanged(lora(folder))
    assert parts != two.parts(lora(folder)) != started().parts(lora(folder))


def test_an_adapter_in_the_home_directory_is_looked_at_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "adapter")
    adapters = started()
    before = adapters.parts(lora("~/adapter"))
    assert before == started().parts(lora("~/adapter"))
    write(tmp_path / "adapter", "another")
    assert adapters.parts(lora("~/adapter")) is None
    assert started().parts(lora("~/adapter")) != before


def test_a_hub_name_is_its_snapshot_where_nobody_asks_the_network_and_else_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "models--acme--red"
    for commit in ("a" * 40, "b" * 40):
        write(repo / "snapshots" / commit, commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    name = lora("acme/red")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert started().parts(name) != started().parts(name)
    assert started().parts(lora("acme/unknown")) != started().parts(lora("acme/unknown"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    first, adapters = started().parts(name), started()
    assert first == adapters.parts(name) == started().parts(name)
    (repo / "refs" / "main").write_text("b" * 40)
    assert adapters.parts(name) is None
    assert started().parts(name) not in (None, first)


def test_an_adapter_that_is_downloaded_by_its_first_load_is_private_and_cached(tmp_path: Path) -> None:
    adapters = started(-60)
    before = adapters.parts(lora(tmp_path / "later"))
    write(tmp_path / "later")
    assert before and adapters.parts(lora(tmp_path / "later")) == before
    write(tmp_path / "later", "another")
    assert adapters.parts(lora(tmp_path / "later")) is None


def test_an_engine_that_connects_late_shares_no_adapter_that_changed_since(tmp_path: Path) -> None:
    """What it loaded before it had a server may have been another version."""
    folder = write(tmp_path / "adapter")
    eventually(lambda: time.time() > read_state(folder).changed_at + 2.5)
    assert Adapters().parts(lora(folder)) != Adapters().parts(lora(folder))


def names_only(request: Any) -> list[Any]:
    """What vLLM 0.30 puts into the key of its own cache for an adapter."""
    return [request.lora_request.lora_name] if request.lora_request is not None else []


def roots(prefix_caching: bool = True) -> Any:
    config: Any = SimpleNamespace(
        lora_config=object(), cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)
    )
    made = Roots(config, NamedWeights("", str))
    made.adapters = started()
    return made


@pytest.mark.parametrize("release", ["0.30", "installed"])
@pytest.mark.parametrize("change", ["folder", "files"])
def test_a_name_that_is_loaded_again_with_other_files_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, change: str
) -> None:
    """vLLM's own cache takes the new adapter for the old one: 0.30 knows its name, later ones its folder as well."""
    if release == "0.30":
        monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", names_only)
    tokens = list(range(512))
    first, second = write(tmp_path / "v1"), write(tmp_path / "v2", "another")
    engine = roots()
    before = engine.root(request(tokens, lora_request=lora(first, 1)))
    assert before is not None
    assert engine.root(request(tokens, lora_request=lora(first, 2))) == before
    if change == "files":
        second = write(tmp_path / "v1", "another")
    for _ in range(2):
        after = engine.root(request(tokens, lora_request=lora(second, 3)))
        is_confused = release == "0.30" or change == "files"
        assert (after is None) == is_confused and after != before
    assert engine.root(request(tokens)) == roots().root(request(tokens)) is not None
    assert roots(prefix_caching=False).root(request(tokens, lora_request=lora(second, 3))) is not None


def test_a_salt_that_vllm_takes_for_an_adapters_name_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.30 has both as plain text in its key."""

    def plain(request: Any, start: int, end: int, item: int) -> tuple[tuple[Any, ...] | None, int]:
        salts = [request.cache_salt] if start == 0 and request.cache_salt else []
        return tuple(names_only(request) + salts) or None, item

    monkeypatch.setattr("kvdepot.integrations.vllm.lora.generate_block_hash_extra_keys", plain)
    assert kv_cache_utils.generate_block_hash_extra_keys is not plain
    engine, tokens, adapter = roots(), list(range(512)), lora(write(tmp_path / "red"))
    assert engine.root(request(tokens, cache_salt="blue")) is not None
    assert engine.root(request(tokens, cache_salt="red")) is not None
    assert engine.root(request(tokens, lora_request=adapter)) is None
    assert engine.root(request(tokens, cache_salt="blue", lora_request=adapter)) is not None
    assert engine.root(request(tokens, cache_salt="red")) is None


def test_kv_of_an_uncached_adapter_is_not_taken_for_a_later_one(tmp_path: Path) -> None:
    """One id for two adapters: vLLM computes with the first, and keeps it under the second's name."""
    red, blue = write(tmp_path / "red"), write(tmp_path / "blue", "another")
    engine, tokens = roots(), list(range(512))
    assert engine.root(request(tokens, lora_request=lora(red, 1))) is not None
    assert engine.root(request(tokens, lora_request=lora(blue, 1, "blue"))) is None
    assert engine.root(request(tokens, lora_request=lora(blue, 2, "blue"))) is None
