"""The benchmark with tiny sizes, to keep it working. Its numbers mean nothing, but they must exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

BENCH = Path(__file__).parent.parent / "bench" / "bench.py"
FIELDS = {"figure", "unit", "median", "floor", "ratio", "bar", "holds"}
SHARE_CLOSED = "learned, of the distance from LRU to the bound"
"""Tiny traces leave this figure to chance."""


def check(environ: dict[str, str], out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tiny benchmark; every figure has all that a figure has, and was printed."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", *words, "--out", str(out)], env=environ, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(out.read_text()):
        assert set(row) == FIELDS and row["floor"] > 0, row
        assert row["median"] > 0 or row["figure"] == SHARE_CLOSED, row
        assert row["ratio"] == pytest.approx(row["median"] / row["floor"]), row
        assert re.match(r"(>=|<=) \d", row["bar"]) and isinstance(row["holds"], bool), row
        assert row["figure"] in done.stdout
    return done


def test_the_tiny_benchmark_reports_every_figure_beside_its_floor(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    check(dict(os.environ), out, "--no-vllm")
    figures = [row["figure"] for row in json.loads(out.read_text())]
    assert len(figures) > 60
    for layout in ("Llama-8B", "Llama-70B TP 4", "MLA", "cross-layer"):
        assert any(figure.startswith("gpu ") and figure.endswith(f", {layout}") for figure in figures), layout


def test_a_tiny_queue_before_a_slow_tier_loses_no_chunk() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is missing")
    code = "import json, queued; from common import TINY; print(json.dumps([f.median for f in queued.run(TINY, [])]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == 80  # four chunks of each of the 20 prompts
