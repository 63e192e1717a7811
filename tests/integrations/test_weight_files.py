from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvdepot.integrations.vllm.weight_files import Weights, find_weights
from tests.conftest import eventually

COMMITS = ("a" * 40, "b" * 40)


def _model(folder: Path, fill: bytes = b"1", times: tuple[int, int] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": b"{}", "model.safetensors": fill * 3_000_000, "tokenizer.json": b"[]"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        if times is not None:
            os.utime(folder / name, ns=times)
    return folder


def _found(path: Path | str, revision: str | None = None, cache: Path | None = None) -> Weights:
    found = find_weights(str(path), revision, str(cache) if cache else None)
    assert found is not None
    return found


def test_weights_are_told_apart_by_their_contents_where_an_image_build_set_all_times_alike(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", b"1", (0, 0))
    other = _model(tmp_path / "other", b"2", (0, 0))
    assert _found(one).digest != _found(other).digest
    assert _found(one).digest == _found(_model(tmp_path / "copy", b"1", (0, 0))).digest


@pytest.mark.parametrize("name", ["weights.tensors", "modeling_mine.py", "sub/shard.anything", "hf_quant_config.json"])
def test_any_file_that_comes_or_changes_is_another_version(tmp_path: Path, name: str) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"1")
    added = _found(folder).digest
    (folder / name).write_bytes(b"2")
    assert len({before, added, _found(folder).digest}) == 3


@pytest.mark.parametrize("name", ["README.md", "train.log", ".cache/x", "__pycache__/modeling.pyc", "chart.png"])
def test_files_that_no_engine_loads_change_nothing(tmp_path: Path, name: str) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"1")
    assert _found(folder).digest == before


def test_weights_that_were_touched_are_another_version(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert _found(folder).digest != before


def test_the_home_folder_and_links_lead_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _model(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _found(folder).digest == _found("~/model").digest == _found(tmp_path / "link").digest
    assert _found(folder / "model.safetensors").digest != _found(folder).digest


def test_a_change_is_dated_by_what_nobody_can_set_back(tmp_path: Path) -> None:
    """File times can be set; the times at which their inode, the folder's name or a link changed cannot."""
    began = time.time() - 1  # clocks of file systems lag behind by some milliseconds
    long_ago = (0, 0)
    folder = _model(tmp_path / "model", times=long_ago)
    os.utime(folder, ns=long_ago)
    assert _found(folder).changed_at >= began
    links = [tmp_path / "current", tmp_path / "next"]
    links[0].symlink_to(folder)
    assert _found(links[0]).changed_at >= links[0].lstat().st_ctime_ns / 1e9


def test_a_folder_that_was_renamed_into_place_has_changed_then(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    changed_at = folder.stat().st_ctime_ns / 1e9

    def ticked() -> bool:
        (tmp_path / "clock").write_bytes(b"")
        return (tmp_path / "clock").stat().st_ctime_ns / 1e9 > changed_at

    eventually(ticked)
    folder = folder.rename(tmp_path / "renamed")
    assert _found(folder).changed_at == folder.stat().st_ctime_ns / 1e9 > changed_at


def _hub(cache: Path) -> Path:
    """A hub's local cache with two commits of organisation/model."""
    repository = cache / "models--organisation--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    for commit in COMMITS:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs" / f"weights-{commit}").write_bytes(b"same size")
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/weights-{commit}")
        (repository / "refs" / commit[0]).write_text(commit)
    return repository


def test_a_name_of_the_hub_is_the_commit_that_lies_in_the_local_cache(tmp_path: Path) -> None:
    repository = _hub(tmp_path)
    main = repository / "refs" / "main"
    main.write_text(COMMITS[0])
    first = _found("organisation/model", cache=tmp_path)
    assert first.changed_at == main.stat().st_ctime_ns / 1e9
    assert first.digest == _found("organisation/model", COMMITS[0], tmp_path).digest
    assert first.digest == _found("organisation/model", "a", tmp_path).digest
    assert first.digest == _found(repository / "snapshots" / COMMITS[0]).digest
    main.write_text(COMMITS[1])
    assert _found("organisation/model", cache=tmp_path).digest != first.digest


def test_a_commit_never_changes_but_by_hand(tmp_path: Path) -> None:
    snapshot = _hub(tmp_path) / "snapshots" / COMMITS[0]
    before = _found("organisation/model", COMMITS[0], tmp_path)
    assert before.changed_at == 0.0
    (snapshot / "tokenizer.json").symlink_to("../../blobs/weights-" + COMMITS[1])  # downloaded later
    assert _found("organisation/model", COMMITS[0], tmp_path).digest == before.digest
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"my own")
    assert _found("organisation/model", COMMITS[0], tmp_path).digest != before.digest


@pytest.mark.parametrize("name", ["organisation/nowhere", "/no/such/path", "s3://bucket/model", "a\0b", "", "x" * 5000])
def test_what_is_not_to_be_seen_has_no_version(tmp_path: Path, name: str) -> None:
    _hub(tmp_path)
    assert find_weights(name, None, str(tmp_path)) is None


def test_a_folder_with_a_dangling_link_or_another_kind_of_file_can_be_described(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    assert _found(folder).digest == before
