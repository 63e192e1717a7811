"""`kvdepot size`: what fits into memory, from a model's configuration."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvdepot import cli
from tests.simulate.test_kv_size import GPT_OSS_20B, LLAMA_8B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_size_tells_tokens_prompts_and_chats(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["size", str(model), "--gib", "64", "-g", "512MiB", "-j"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_per_token"] == 128 << 10
    assert said["sizes"] == [
        {"bytes": 64 << 30, "tokens": 524_288, "prompts": 64, "chats": 128},
        {"bytes": 512 << 20, "tokens": 4096, "prompts": 0, "chats": 1},
    ]
    assert cli.main(["size", str(model / "config.json"), "--prompt-tokens", "1024"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["size", "--bytes-per-token", "128KiB", "-g", "64", "-j"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"][0]["tokens"] == 524_288
    assert "128 KiB of KV per token" in said and "prompts of 1,024" in said and "256 GiB" in said


def test_size_reads_standard_input_and_counts_windows_where_they_are_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(GPT_OSS_20B)))
    assert cli.main(["size", "-", "--gib", "64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["windows"] == [{"tokens": 128, "bytes_per_token": 24 << 10}]
    assert said["prompt_bytes"] == (32 + 2) * 256 * (24 << 10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give either MODEL_CONFIG or --bytes-per-token"),
        (["meta-llama/Llama-3.1-8B"], "nothing is downloaded"),
        (["FOLDER", "--gib", "many"], "--gib: 'many' is not a size: write 64GiB or 512MiB, say"),
        (["FOLDER", "--gib", "1e30"], "--gib: '1e30' is out of range"),
        (["FOLDER", "--prompt-tokens", "100"], "must be at least a chunk (256 tokens)"),
        (["FOLDER/broken.json"], "not JSON"),
    ],
)
def test_what_size_cannot_read_is_said(
    words: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "broken.json").write_bytes(b"\xff{")
    assert cli.main(["size", *(word.replace("FOLDER", str(model)) for word in words)]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
