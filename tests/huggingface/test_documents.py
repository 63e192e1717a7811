"""The script in docs/huggingface.md, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import tokenizers
import transformers

from tests.conftest import HANG_S, Depot
from tests.huggingface.models import make

PAGE = Path(__file__).parents[2] / "docs/huggingface.md"


def test_the_script_of_the_page_loads_what_its_first_run_has_stored(depot: Depot, tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len([line for line in script.splitlines() if line]) <= 12
    words = {f"word{number}": number for number in range(512)}
    words["<unk>"] = words.pop("word0")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    make("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "document.txt").write_text(" ".join(f"word{1 + number % 500}" for number in range(300)))
    assert '"Qwen/Qwen3-0.6B"' in script
    script = (
        script.replace('"Qwen/Qwen3-0.6B"', repr(str(tmp_path / "model")))
        + "\nprint(tokens, output.sequences.tolist())"
    )
    environ = {**os.environ, "KVDEPOT_URL": depot.url}
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, timeout=HANG_S
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0]
    (first, answer), (second, again) = (run.stdout.split(" ", 1) for run in runs)
    assert (first, second) == ("0", "256")
    assert answer == again
