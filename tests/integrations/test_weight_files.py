from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

from kvdepot.integrations.weight_files import ALL_KINDS, Kind, Weights, find_weights, read_state
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


def _found(
    path: Path | str, revision: str | None = None, cache: Path | None = None, kinds: Collection[Kind] = ALL_KINDS
) -> Weights:
    found = find_weights(str(path), revision, str(cache) if cache else None, kinds)
    assert found is not None
    return found


def _version(weights: Weights) -> tuple[str, float]:
    """What is known of weights but for their place on this host."""
    return weights.digest, weights.changed_at


def test_weights_are_told_apart_by_their_contents_and_by_nothing_else(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", b"1", (0, 0))
    other = _model(tmp_path / "other", b"2", (0, 0))
    assert _found(one).digest != _found(other).digest
    assert _found(one).digest == _found(_model(tmp_path / "copy", b"1", (1, 1))).digest


LAYERS = 48


def _tensors(file: Path, changed: str = "") -> Path:
    """A large safetensors file of zeros, most of it a hole, but for one place in the tensor `changed`."""
    shapes = {"model.embed_tokens.weight": [65536, 1024]}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.mlp.weight": [4096, 1024], f"{layer}.norm.weight": [1024], f"{layer}.bias": [3]}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
        if changed:
            start, stop = header[changed]["data_offsets"]
            place, width = ((stop - start) // 2 + 700 * 2048, 2048) if len(shapes[changed]) == 2 else (0, 1)
            out.seek(8 + len(text) + start + place)
            out.write(b"1" * width)
    os.utime(file, ns=(0, 0))
    return file


@pytest.mark.parametrize("changed", ["17.norm.weight", "17.bias", "model.embed_tokens.weight"])
def test_one_norm_one_bias_or_one_row_of_the_embeddings_is_another_version(tmp_path: Path, changed: str) -> None:
    one, other = _tensors(tmp_path / "one.safetensors"), _tensors(tmp_path / "other.safetensors", changed)
    assert one.stat().st_size == other.stat().st_size > 500 << 20
    assert _found(one).digest != _found(other).digest
    assert _found(one).digest == _found(_tensors(tmp_path / "copy.safetensors")).digest


def test_files_of_torch_are_told_apart_by_the_checksums_at_their_end(tmp_path: Path) -> None:
    for name, value in (("one.bin", b"1"), ("other.bin", b"2")):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for number in range(4):
                content = bytearray(3_000_000)
                content[1_500_000:1_500_001] = value if number == 1 else b"0"
                file.writestr(zipfile.ZipInfo(f"archive/data/{number}"), bytes(content))
    assert (tmp_path / "one.bin").stat().st_size == (tmp_path / "other.bin").stat().st_size
    assert _found(tmp_path / "one.bin").digest != _found(tmp_path / "other.bin").digest


@pytest.mark.parametrize(
    "start", [b"\0" * 8, b"\xff" * 8, b"\2" + b"\0" * 7 + b"[]", b"\x0b" + b"\0" * 7 + b'{"a": {"b"}']
)
def test_a_file_that_is_no_safetensors_has_a_version_or_none(tmp_path: Path, start: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(start + bytes(3_000_000))
    assert (find_weights(str(file)) is None) == (b"{" in start)


@pytest.mark.parametrize("name", ["weights.tensors", "modeling_mine.py", "sub/shard.anything", "hf_quant_config.json"])
def test_any_file_that_comes_or_changes_is_another_version(tmp_path: Path, name: str) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"1")
    added = _found(folder).digest
    (folder / name).write_bytes(b"2")
    assert len({before, added, _found(folder).digest}) == 3


@pytest.mark.parametrize(
    "name",
    ["README.md", "LICENSE", "train.log", ".cache/x", "__pycache__/modeling.pyc", "chart.png", "generation_config.json",
     "original/consolidated.pth", "pytorch_model-00001-of-00002.bin"],
)  # fmt: skip
def test_files_that_no_engine_loads_change_nothing(tmp_path: Path, name: str) -> None:
    folder = _model(tmp_path / "model")
    before = _found(folder).digest
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"1")
    assert _found(folder).digest == before


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


def _tick(clock: Path, changed_at: float) -> None:
    """Wait until what changes in the file system now has a later time."""

    def ticked() -> bool:
        clock.write_bytes(b"")
        return clock.stat().st_ctime_ns / 1e9 > changed_at

    eventually(ticked)


@pytest.mark.parametrize("moved", ["", "outer", "model/sub"])
def test_a_folder_that_was_renamed_into_place_has_changed_then(tmp_path: Path, moved: str) -> None:
    """Also a folder above and one below, and if more was put into it afterwards."""
    place = tmp_path / "place"
    folder = _model(place / "outer" / "model")
    (folder / "sub").mkdir()
    (folder / "sub" / "more.safetensors").write_bytes(b"1")
    at = place / "outer" / (moved.removeprefix("outer") or ".") if moved else folder
    before, seen = _found(folder), read_state(folder)
    _tick(place / "clock", before.changed_at)
    at.rename(tmp_path / "next"), (tmp_path / "next").rename(at)
    renamed_at = at.stat().st_ctime_ns / 1e9
    assert _version(_found(folder)) == (before.digest, renamed_at) and renamed_at > before.changed_at
    assert not read_state(folder).is_same(seen) and read_state(folder).changed_at == renamed_at
    _tick(place / "clock", renamed_at)
    (at / "README.md").write_bytes(b"")
    assert _found(folder).changed_at >= renamed_at


def test_a_busy_folder_in_a_quiet_one_has_not_moved(tmp_path: Path) -> None:
    folder = _model(tmp_path / "adapters" / "one")
    before, seen = _found(folder), read_state(folder)
    _tick(tmp_path / "clock", before.changed_at)
    quiet = read_state(folder)
    _model(tmp_path / "adapters" / "two")  # changes the folder that it is in, too
    assert read_state(folder).is_same(quiet)
    busy = _model(tmp_path / "far" / "above" / "model")
    before, quiet = _found(busy), read_state(busy)
    _tick(tmp_path / "far" / "clock", before.changed_at)
    (tmp_path / "more").mkdir()
    assert _found(busy) == before and read_state(busy).is_same(quiet), "two busy folders far above"
    (folder / "README.md").write_bytes(b"")
    assert _found(folder).digest == before.digest and seen.files == read_state(folder).files


def test_what_comes_and_goes_above_weights_that_were_known_before_is_no_change(tmp_path: Path) -> None:
    """Else one process of an engine could take them for changed, and another that looked before not."""
    folder = _model(tmp_path / "place" / "org" / "model")
    before = _found(folder)
    _tick(tmp_path / "place" / "clock", before.changed_at)
    (tmp_path / "place" / "org" / "a.log").write_bytes(b"")
    (tmp_path / "place" / "another").mkdir()
    assert _found(folder).changed_at > before.changed_at
    known = [before.digest[:16], "0" * 16]
    assert find_weights(str(folder), known=known) == before
    for moved in (folder, folder.parent):
        moved.rename(tmp_path / "next"), (tmp_path / "next").rename(moved)
        found = find_weights(str(folder), known=known)
        assert found is not None and found.changed_at == moved.stat().st_ctime_ns / 1e9 > before.changed_at


@pytest.mark.parametrize("link", ["sub", "shard.safetensors"])
def test_a_link_on_the_way_to_any_file_counts(tmp_path: Path, link: str) -> None:
    """Links of the folder that lead through another link, which is turned."""
    place = tmp_path / "place"
    for version in ("v1", "v2"):
        _model(place / version)
    (place / "current").symlink_to("v1")
    folder = _model(place / "model")
    (folder / link).symlink_to("../current" if link == "sub" else "../current/model.safetensors")
    before, seen = _found(folder), read_state(folder)
    _tick(tmp_path / "clock", before.changed_at)
    (place / "current").unlink()
    (place / "current").symlink_to("v2")
    turned_at = (place / "current").lstat().st_ctime_ns / 1e9
    assert _version(_found(folder)) == (before.digest, turned_at)
    assert not read_state(folder).is_same(seen)


def _hub(cache: Path) -> Path:
    """A hub's local cache with two commits of organisation/model, as `huggingface_hub` makes them."""
    repository = cache / "models--organisation--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    for commit in COMMITS:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, content in {"model.safetensors": commit.encode() * 50_000, "config.json": b"{}"}.items():
            (repository / "blobs" / f"{name}-{commit}").write_bytes(content)
            (snapshot / name).symlink_to(f"../../blobs/{name}-{commit}")
        (repository / "refs" / commit[0]).write_text(commit)
    return repository


def test_a_name_of_the_hub_is_the_commit_that_lies_in_the_local_cache(tmp_path: Path) -> None:
    from huggingface_hub import ResolvedRevision

    repository = _hub(tmp_path)
    main = repository / "refs" / "main"
    main.write_text(COMMITS[0])
    first = _found("organisation/model", cache=tmp_path)
    assert first.changed_at == main.stat().st_ctime_ns / 1e9
    assert first.digest == _found("organisation/model", COMMITS[0], tmp_path).digest
    assert first.digest == _found("organisation/model", "a", tmp_path).digest
    main.write_text(COMMITS[1])
    assert _found("organisation/model", cache=tmp_path).digest != first.digest
    pinned = ResolvedRevision(COMMITS[0], initial="main")  # which vLLM's loader goes on using
    assert _version(_found("organisation/model", pinned, tmp_path)) == (first.digest, 0.0)


def test_a_model_is_the_same_in_a_hubs_cache_through_a_link_and_in_a_copy(tmp_path: Path) -> None:
    snapshot = _hub(tmp_path) / "snapshots" / COMMITS[0]
    (tmp_path / "current").symlink_to(snapshot)
    copy = shutil.copytree(snapshot, tmp_path / "copy")
    (copy / "pytorch_model.bin").write_bytes(b"the same weights for other programs")
    of_the_hub = _found("organisation/model", COMMITS[0], tmp_path).digest
    assert of_the_hub == _found(snapshot).digest == _found(tmp_path / "current").digest == _found(copy).digest


def test_weights_in_a_download_folder_are_joined_by_what_lies_in_the_hubs_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps only weights in `--download-dir`."""
    from huggingface_hub import constants

    own, given = _hub(tmp_path / "own"), _hub(tmp_path / "given")
    whole = _found(own / "snapshots" / COMMITS[0]).digest
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own.parent))
    (own / "snapshots" / COMMITS[0] / "model.safetensors").unlink()
    (given / "snapshots" / COMMITS[0] / "config.json").unlink()
    assert _found("organisation/model", COMMITS[0], given.parent).digest == whole


def test_files_that_a_hubs_download_brings_later_are_not_part_of_a_text_model(tmp_path: Path) -> None:
    snapshot = _hub(tmp_path) / "snapshots" / COMMITS[0]
    read = {Kind.WEIGHTS, Kind.CONFIG}
    before = _found(snapshot, kinds=read)
    assert before.changed_at == 0.0, "what a download brought has not changed"
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "modeling.py", "merges.txt"):
        (snapshot / name).symlink_to(f"../../blobs/config.json-{COMMITS[1]}")
        assert _found(snapshot, kinds=read) == before
        assert _found(snapshot).digest != before.digest


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "modeling.py"])
def test_a_file_of_a_hubs_cache_that_is_edited_through_its_link_is_another_version(tmp_path: Path, name: str) -> None:
    repository = _hub(tmp_path)
    file = repository / "snapshots" / COMMITS[0] / name
    if not file.exists():
        (tmp_path / "shared").write_bytes(b"{}")  # by several repositories
        (repository / "blobs" / name).symlink_to(tmp_path / "shared")
        file.symlink_to(f"../../blobs/{name}")
    before = _found("organisation/model", COMMITS[0], tmp_path)
    assert before.changed_at == 0.0
    _tick(tmp_path / "clock", file.lstat().st_ctime_ns / 1e9)
    with file.open("r+b") as edited:
        edited.write(b"12")
    assert _found("organisation/model", COMMITS[0], tmp_path).digest != before.digest
    assert _found("organisation/model", COMMITS[0], tmp_path).changed_at == file.stat().st_ctime_ns / 1e9
    file.unlink()
    file.write_bytes(b"my own")
    assert _found("organisation/model", COMMITS[0], tmp_path).digest != before.digest


def test_with_modelscope_a_name_is_the_copy_that_vllm_loads_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub(tmp_path / "hub")
    theirs, asked = _model(tmp_path / "theirs"), []

    def snapshot_download(model_id: str, revision: str | None, local_files_only: bool) -> str:
        asked.append((model_id, revision, local_files_only))
        if model_id != "organisation/model":
            raise LookupError(model_id)
        return str(theirs)

    stand_in = ModuleType("modelscope.hub.snapshot_download")
    stand_in.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.hub", ModuleType("modelscope.hub"))
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", stand_in)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True ")
    assert _found("organisation/model", "a", tmp_path / "hub").digest == _found(theirs).digest
    assert find_weights("organisation/other", None, str(tmp_path / "hub")) is None
    assert asked == [("organisation/model", "a", True), ("organisation/other", None, True)]
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", None)
    assert find_weights("organisation/model", "a", str(tmp_path / "hub")) is None


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
