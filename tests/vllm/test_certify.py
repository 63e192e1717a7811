"""`kvdepot certify` with real engines: it finds a tier that lies, and an interrupt leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.cli.completions import Completion, difference
from kvdepot.client import admin
from kvdepot.errors import KVDepotError
from tests.cli.command import heed_signals
from tests.conftest import HANG_S, eventually
from tests.vllm.engines import ENVIRON, START_S

Certify = Callable[..., "subprocess.Popen[str]"]
ARGUMENTS = (
    "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max_model_len=4096",
    "--num-gpu-blocks-override", "64",
)  # fmt: skip
LIAR = """
import sys

if "kvdepot.integrations.vllm.certify" in sys.orig_argv:
    print("plugins may print when they are imported")
if "serve" in sys.argv:
    from kvdepot.tiers import Blob, disk, format

    read, first = disk.Disk.read, {}

    def swapped(self, blobs):
        return read(self, [Blob(first.setdefault(blob.size, blob.name), blob.buffers) for blob in blobs])

    disk.Disk.read, format.Header.names = swapped, lambda *_: True
"""
"""A plugin that prints, and a server's tier that answers with the object of that size that it was asked for first; all
headers seem right."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        yield Path(name)


@pytest.fixture
def certify(folder: Path, models: dict[str, Path]) -> Iterator[Certify]:
    """Start the command on the Llama; it ends with the test."""
    started = []

    def start(*words: str, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvdepot.cli", "certify", *words, str(models["gqa"]), *ARGUMENTS]
        given = {**os.environ, **ENVIRON, "TMPDIR": str(folder), "KVDEPOT_ARENA_GIB": "0.125", **environ}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=given, preexec_fn=heed_signals)
        )
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        ended(process)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, errors = process.communicate(timeout=2 * START_S)
    return process.returncode, said, errors


def processes(folder: Path) -> list[Path]:
    """The processes that were started with this folder, or one in it, for temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append(process)
    return found


def test_every_road_is_tried_and_a_tier_that_swaps_objects_fails(folder: Path, certify: Certify) -> None:
    # tests/test_docs.py runs the command of docs/start.md, which passes.
    (folder / "liar").mkdir()
    (folder / "liar" / "sitecustomize.py").write_text(LIAR)
    path = os.pathsep.join([str(folder / "liar"), os.environ.get("PYTHONPATH", "")])
    page = folder / "page.html"
    code, said, errors = ended(
        certify("--prompts=512,1024", "--pressure", "--html", str(page), "--json", PYTHONPATH=path)
    )
    assert code == 1, said + errors
    found = json.loads(said)
    assert not found["passed"]
    roads = {each["road"]: each for each in found["results"] if each["prompt"] == "1: 521 tokens"}
    assert [*roads] == ["computed", "own cache", "same engine", "first hit", "fresh engine", "after kill -9", "tier"]
    loaded = [each["loaded"] for road, each in roads.items() if road != "first hit"]
    assert loaded == [0, 0, 512, 512, 512, 512]
    for each in found["results"]:  # of a tier that is too slow on this machine, the engine computes a part
        assert each["identical"] == (each["road"] != "tier" or not each["loaded"]), each
        assert each["ttft_s"] > 0, each
    storms = found["pressure"]
    assert storms["requests"] >= 30 and storms["answers"] == 2 * storms["requests"]
    assert 4096 <= storms["cache_tokens"] < storms["requests"] * storms["prompt_tokens"]
    assert storms["depot"]["computed"] < storms["without"]["computed"]
    assert {fault for fault in storms["faults"] if not fault.endswith(" without")} == set()  # answers, not times
    assert found["faults"][0].startswith("tier, prompt 1: 521 tokens: token ")
    assert "instead of" in found["faults"][0]
    assert all(word in page.read_text() for word in ("FAILED", "What is wrong", "WRONG", "arrive at once"))
    assert processes(folder) == []
    assert {path.name for path in folder.iterdir()} == {"page.html", "liar"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-such-flag"], "vLLM: unrecognized arguments: --no-such-flag"),
        (["--hf-config-path", "/none/model"], "/none/model"),
    ],
)
def test_an_engine_that_cannot_run_says_why(words: list[str], said: str, folder: Path, certify: Certify) -> None:
    code, _, errors = ended(certify(*words, "--prompts=1024"))
    assert code == 2
    assert said in errors
    assert errors.startswith("kvdepot: the engine failed: ")
    assert [*folder.iterdir()] == []


def test_an_interrupt_leaves_no_process_and_no_memory(folder: Path, certify: Certify) -> None:
    process = certify("--prompts=1024")

    def has_engine() -> bool:
        assert process.poll() is None, ended(process)
        with contextlib.suppress(KVDepotError, StopIteration):
            socket = next(folder.glob("*/depot.sock"))
            with admin.connect(f"ipc://{socket}", timeout_s=1.0) as client:
                return admin.status(client).instances > 0
        return False

    eventually(has_engine, START_S)
    started = processes(folder)
    mapped = set()
    for each in started:
        with contextlib.suppress(OSError):  # it has ended
            lines = (each / "maps").read_text().splitlines()
            mapped |= {line.split()[-1] for line in lines if "/dev/shm/" in line}
    assert len(started) >= 4  # it, the server, vLLM's front end and engine core
    assert any("kvdepot" in name for name in mapped) and not any("torch_" in name for name in mapped)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    eventually(lambda: not processes(folder), HANG_S)
    eventually(lambda: not any(Path(name).exists() for name in mapped), HANG_S)
    assert [*folder.iterdir()] == []


def answer(*steps: tuple[int, dict[str, float]]) -> Completion:
    return Completion(0.1, [token for token, _ in steps], [logprobs for _, logprobs in steps], 0, 0, 0)


@pytest.mark.parametrize(
    ("other", "most", "where"),
    [
        ([(1, {"1": -0.5}), (2, {"2": -0.25})], 0.0, ""),
        ([(1, {"1": -0.5}), (2, {"2": -0.75})], 0.5, "token 2: the logprob of 2 is -0.75 instead of -0.25"),
        ([(1, {"1": -0.5}), (3, {"3": -0.25})], 1e9, "token 2 is 3 instead of 2; token 2: the logprob of 2"),
        ([(1, {"1": float("nan")}), (2, {"2": -0.25})], 1e9, "token 1: the logprob of 1 is nan"),
    ],
)
def test_answers_are_compared_up_to_the_first_other_token(
    other: list[tuple[int, dict[str, float]]], most: float, where: str
) -> None:
    found = difference(answer((1, {"1": -0.5}), (2, {"2": -0.25})), answer(*other))
    assert found[0] == most
    assert found[1].startswith(where)
    assert bool(found[1]) == bool(where)
