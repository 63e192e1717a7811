"""tools/boundaries.py on a trace whose hits can be counted by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import HANG_S

TOOL = Path(__file__).parents[2] / "tools" / "boundaries.py"
PROMPTS = [
    [0, 1, 2, 3, 4, 5, 6, 7, 100],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 101],  # continues the first one at its end
    [0, 1, 2, 9, 102],  # parts from both in between, where nothing can be resumed without a spacing
    [0, 1, 2, 10, 103],  # parts from them at the same place
]
"""The last block of each is not whole: 8 + 9 + 4 + 4 chunks, of which 11 are new."""


def table(path: Path, *options: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(path), *options], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    return [line.split() for line in done.stdout.splitlines()[2:]]


def test_the_table_counts_what_is_cached_and_what_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": i, "hash_ids": p}) + "\n" for i, p in enumerate(PROMPTS)))
    every, second, fourth, *_, none = table(path)
    assert every == ["512", f"{(8 + 3 + 3) / 25:.2%}", "1.000"]
    assert second[1] == f"{(8 + 2 + 3) / 25:.2%}"
    assert fourth[1] == none[1] == f"{(8 + 0 + 3) / 25:.2%}", "the third prompt leaves a boundary where it parts"
    assert none[2] == f"{5 / 11:.3f}", "ends of four prompts and one place where they part"
    assert table(path, "--no-junctions")[-1][1:] == [f"{8 / 25:.2%}", f"{4 / 11:.3f}"]
    assert table(path, "--no-junctions", "--reach-tokens", "1024")[-1][2] == f"{6 / 11:.3f}", "blocks 2 and 6 to 10"
