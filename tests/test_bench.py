"""The benchmark with tiny sizes, to keep it working. Its numbers mean nothing, but they must exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakecuda.machine import Machine
from tests.programs import BEYOND_GPU_TESTS, hidden

NEEDED = {
    "redis": (["redis-server"], ["redis"]),
    "object (S3)": ([], ["obstore", "moto", "flask"]),
    "object (file)": ([], ["obstore"]),
    "mooncake": ([], ["mooncake"]),
}
"""What the figures of stores need; where it is missing they are left out, but not in CI."""


def _is_there(store: str) -> bool:
    commands, modules = NEEDED[store]
    found = all(map(shutil.which, commands)) and all(map(importlib.util.find_spec, modules))
    assert found or not os.environ.get("CI"), f"{store}: one of {commands + modules} is missing"
    return found


BENCH = Path(__file__).parent.parent / "bench" / "bench.py"
SHARE_CLOSED = "learned, of the distance from LRU to the bound"
FIELDS = {"figure", "unit", "median", "floor", "ratio", "bar", "holds"}
EXPECTED = (
    [
        f"{what} {tokens} tokens, {order} blocks, {threads}"
        for threads in ("1 copy thread", "2 copy threads")
        for order in ("shuffled", "adjacent")
        for what in ("store", "retrieve")
        for tokens in ("2k", "8k")
    ]
    + [f"{what} 8k tokens, --verify {mode}" for mode in ("sampled", "always") for what in ("store", "retrieve")]
    + [f"lookup {tokens} tokens, all hit" for tokens in ("1k", "8k", "32k", "128k")]
    + [f"lookup {tokens} tokens repeated with 256 more" for tokens in ("1k", "8k", "32k", "128k")]
    + ["lookups a second, 8k tokens, 4 clients"]
    + [f"lookup {tokens} tokens, two groups" for tokens in ("8k", "128k")]
    + [
        f"lookup {which} with {chunks} chunks in the index"
        for which in ("p50", "p99.9")
        for chunks in ("1k", "100k", "1M")
    ]
    + [
        "lookup p99, 10 pages open and metrics scraped",
        "status with 1M chunks, asked by a client",
        "status with 1M chunks, kvdepot status --json",
    ]
    + [
        f"lookup p99, another client floods: {kind}"
        for kind in ("lookups", "status", "garbage", "requests whose answers it never reads")
    ]
    + [
        "kvdepot serve, launch to first answer",
        "embedded server, launch to first answer",
        "kill -9 to hits again, 100k chunks",
        "kvdepot serve, resident without the arena",
    ]
    + [
        "KV compressed by a tier, ratio",
        "KV compressed by a tier",
        "KV decompressed by a tier",
        "KV encrypted by a tier",
        "KV decrypted by a tier",
        "another thread waits while a tier compresses KV",
        "another thread waits while a tier encrypts KV",
    ]
    + [f"disk {what} 8 MiB, {threads}" for threads in ("1 thread", "4 threads") for what in ("write", "read")]
    + ["disk start with 100k objects, counted"]
    + [
        f"{store} {what} {mib} MiB, 2 threads"
        for store in ("redis", "object (S3)", "object (file)")
        if _is_there(store)
        for mib in (1, 8, 32)
        for what in ("write", "read")
    ]
    + [
        f"mooncake {what}, 2 threads, {mib} MiB"
        for mib in (1, 8, 32)
        for what in ("write", "read")
        if _is_there("mooncake")
    ]
    + [
        figure
        for figure in (
            "lookup 8k tokens in memory, a tier behind it",
            "lookup that misses, the tier hangs, worst",
            "lookup p99 in memory, the tier hangs",
        )
        if _is_there("redis")
    ]
    + ["launch to first answer, 100k chunks on disk", "launch to hits of all of 100k chunks on disk"]
    + ["a store that evicts, quotas for 8 tenants"]
    + ["lookups a second with 10k leases"]
    + [
        *(f"learned on {trace}, at its worst beside LRU" for trace in ("scans", "a loop", "agents", "a shifting mix")),
        "learned on average beside LRU",
        "learned, of the distance from LRU to the bound",
        "1M block references, learned",
        "a chunk in runs of 16, learned",
        "a run of 1 chunk, learned",
        "memory per chunk, learned",
    ]
)

PEAKS_OF_GPUS = [f"gpu peak of registered tmpfs, {what}" for what in ("store", "retrieve", "both at once")]
LAYOUTS_OF_GPUS = {
    kind: [
        *(f"gpu {what} {tokens} tokens, {kind}" for what in ("store", "retrieve") for tokens in ("2k", "8k")),
        *(f"gpu store and retrieve at once {tokens} tokens, {kind}" for tokens in ("2k", "8k")),
    ]
    for kind in ("Llama-8B", "Llama-70B TP 4", "MLA", "cross-layer")
}
for _kind in ("Llama-8B", "Llama-70B TP 4"):
    LAYOUTS_OF_GPUS[_kind] += [
        f"gpu retrieve of one 256-token chunk, {_kind}",
        *(f"gpu matrix products while {what} run, {_kind}" for what in ("stores", "retrieves")),
        *(f"gpu decoding step beside a 10 GB load, {part}, {_kind}" for part in ("p50", "p99")),
    ]
REGISTRATIONS_OF_GPUS = ["gpu memory in use after 100 registrations", "gpu server, resident after 100 registrations"]


@pytest.mark.faults
def test_the_tiny_benchmark_reports_every_figure_beside_its_floor(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--no-vllm", "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu: left out" in done.stderr
    assert "processor" in done.stdout and "Python" in done.stdout
    check(done.stdout, out, EXPECTED)


@pytest.mark.faults
def test_the_tiny_benchmark_of_gpus_reports_every_figure_beside_its_floor(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "bench.json"
    with closing(Machine()) as machine:
        done = run_on(machine, out)
        assert done.returncode == 0, done.stdout + done.stderr
        check(done.stdout, out, [*PEAKS_OF_GPUS, *chain(*LAYOUTS_OF_GPUS.values()), *REGISTRATIONS_OF_GPUS])
        pieces = re.findall(r"gpu: (.+), pieces of (\d+) KiB: of the peak of registered tmpfs: store 2k ", done.stdout)
        assert pieces == [("Llama-8B", "64"), ("Llama-70B TP 4", "16"), ("MLA", "72"), ("cross-layer", "128")]
        assert machine.failures() == []
        assert machine.used_bytes(0) == machine.used_bytes(1) == 0


@pytest.mark.faults
def test_a_layout_that_fails_and_a_missing_torch_cost_only_their_own_figures(tmp_path: Path) -> None:
    """In an environment that lacks most of kvdepot's dependencies, like that of `make bench-gpu`."""
    lacking = Path(hidden(tmp_path / "hidden", *BEYOND_GPU_TESTS))
    (tmp_path / "torch.py").write_text("raise ImportError('not installed')")
    out = tmp_path / "bench.json"
    with closing(Machine()) as machine:
        machine.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", nth=3)  # of the benchmark: the first layout's
        done = run_on(machine, out, lacking, tmp_path)
        assert done.returncode == 1 and "Llama-8B: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY" in done.stderr
        reason = "matrix products and decoding steps beside Llama-70B TP 4 are left out: torch is not installed"
        assert reason in done.stdout
        others = [row for kind, rows in LAYOUTS_OF_GPUS.items() if kind != "Llama-8B" for row in rows]
        without = [row for row in others if "matrix" not in row and "decoding" not in row]
        check(done.stdout, out, PEAKS_OF_GPUS + without + REGISTRATIONS_OF_GPUS)
        assert machine.used_bytes(0) == machine.used_bytes(1) == 0


def run_on(machine: Machine, out: Path, *before: Path) -> subprocess.CompletedProcess[str]:
    """The tiny benchmark of GPUs; before: folders that come first on the import path."""
    environ = machine.environment()
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, before), environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--only", "gpu", "--out", str(out)],
        env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_figures_are_written_as_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import bench
    import report

    out = tmp_path / "bench.json"

    def run(scale: object, notes: list[str]) -> Iterator[object]:
        yield report.at_least("first", "GB/s", [1.0], [1.0], 1)
        assert [row["figure"] for row in json.loads(out.read_text())] == ["first"]
        raise RuntimeError("no more")

    monkeypatch.setitem(sys.modules, "gpu", SimpleNamespace(run=run))
    with pytest.raises(RuntimeError, match="no more"):
        bench.main(["--tiny", "--only", "gpu", "--out", str(out)])
    assert [row["figure"] for row in json.loads(out.read_text())] == ["first"]
    assert "1 figures, 0 missed" in capsys.readouterr().out


def check(printed: str, out: Path, expected: list[str]) -> None:
    """Every figure that is expected is there, with all that a figure has, and was printed."""
    rows = json.loads(out.read_text())
    assert [row["figure"] for row in rows] == expected
    for row in rows:
        assert set(row) == FIELDS, row
        assert row["unit"] in {"GB/s", "us", "ms", "1/s", "MB", "B", "x", "%", "s"}, row
        assert row["floor"] > 0, row
        if row["figure"] != SHARE_CLOSED:  # which tiny traces leave to chance
            assert row["median"] > 0, row
        assert row["ratio"] == pytest.approx(row["median"] / row["floor"]), row
        assert re.match(r"(>=|<=) \d", row["bar"]) and isinstance(row["holds"], bool), row
        assert row["figure"] in printed
        assert ("OK" if row["holds"] else "MISSED") in printed


def test_a_figure_holds_exactly_when_it_is_on_the_right_side_of_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import report

    assert report.at_least("f", "GB/s", [8.5, 1.0, 9.0], [10.0], 0.85).holds
    assert not report.at_least("f", "GB/s", [8.4], [10.0], 0.85).holds
    assert report.at_least("f", "%", [49.7], [50.0], 1, -0.3).holds
    assert not report.at_least("f", "%", [49.6], [50.0], 1, -0.3).holds
    assert not report.at_least("f", "%", [50.9], [50.0], 1, 1.0).holds
    assert report.at_most("f", "ms", [3.0], [1.0], 3).holds
    assert not report.at_most("f", "ms", [3.1], [1.0], 3).holds
    assert report.at_most("f", "ms", [11.4], [10.0], 1.1, 0.5).holds
    assert not report.at_most("f", "ms", [11.6], [10.0], 1.1, 0.5).holds
    assert report.below("f", "MB", [120.0], [30.0], 120).holds
    assert not report.below("f", "MB", [121.0], [30.0], 120).holds
