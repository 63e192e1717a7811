"""`kvdepot simulate` on a terminal and in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run, terminal


@pytest.mark.faults
def test_progress_is_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": n, "hash_ids": [n, 1]}) + "\n" for n in range(50)))
    words = ("simulate", str(trace), "--policy", "lru", "--capacity-blocks", "10")
    with terminal(*words) as seen:
        assert seen.end() == 0
        assert "replay" in seen.text and "Hit rate in %" in seen.text
    done = run(*words)
    assert (done.returncode, done.stderr) == (0, "")
